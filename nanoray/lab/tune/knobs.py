"""What a search may change: a list of knobs, each with the values that it offers here.

A knob is one entry of KNOBS: data. Without --may a search takes only what leaves the result of a run
as it is, up to rounding: the batch of a step, its samples and their order never change. What does
not go together is refused by the configuration's table of conflicts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from nanoray.cli.forecast.job import Job
from nanoray.cli.forecast.layouts import candidates, refusal
from nanoray.cli.forecast.parallelisms.record import divisors
from nanoray.cli.forecast.rank_memory import memory_of
from nanoray.config import Config, micro_batches, resolve_batch
from nanoray.config.choose import cannot_compile
from nanoray.config.conflicts import first
from nanoray.config.layout import Layout
from nanoray.config.load import make_config
from nanoray.config.mesh import AXES, SHARDS_STATE
from nanoray.errors import ConfigError
from nanoray.lab.tune.request import COMPRESSION, MASKS, NORMS, PRECISION

BATCH = ("global_batch_size", "micro_batch_size", "grad_accum_steps")
ALWAYS = frozenset({PRECISION, COMPRESSION})
Choice = tuple[tuple[str, Any], ...]  # sorted keys and values: what is not as it is now


@dataclass(frozen=True)
class TunedRun:
    """What is tuned, and where."""

    config: Config  # as it would train now, with what the devices decide
    ranks: int
    device: str  # cpu or cuda
    threads: int  # of a rank now
    cores: int  # that a rank may have: an equal share of its node's
    in_batches: bool = False  # a script's data come in batches, each a micro batch
    matters: frozenset[str] = ALWAYS  # words of --may that mean something for this model
    job: Job | None = None  # of a gpt: what formulas know

    @property
    def layout(self) -> Layout:
        return Layout.of(self.config, self.ranks)

    @property
    def data_ranks(self) -> int:
        """The ranks that sum gradients."""
        return self.layout.size_of("dp_cp")


Values = Iterable[tuple[Any, ...]]


@dataclass(frozen=True)
class Knob:
    """One thing that can be set otherwise."""

    name: str
    keys: tuple[str, ...]
    values: Callable[[TunedRun], Values]  # a value for each of the keys
    changes: tuple[str, ...] = ()  # what it may change in the result beyond rounding, words of MAY

    def changes_here(self, here: TunedRun) -> set[str]:
        """Return what it changes in the result of this run."""
        return set(here.matters.intersection(self.changes))

    def choices(self, here: TunedRun) -> list[Choice]:
        """Return what is another setting than the present one, and goes together with the others."""
        found = []
        for values in self.values(here):
            choice = with_settings(here, (), zip(self.keys, values, strict=True))
            with suppress(ConfigError):
                configured(here, choice)
                found.append(choice)
        return [choice for choice in dict.fromkeys(found) if choice]


def each(*values: Any) -> Callable[[TunedRun], Values]:
    """Return what offers each of these values of one key."""
    return lambda here: [(value,) for value in values]


def _micro_batches(here: TunedRun) -> Values:
    """Offer a rank's whole share of a step and what divides it, each at most half of the one above.

    Accumulation follows from the micro batch.
    """
    if here.in_batches:
        return
    batch = resolve_batch(here.config, here.layout.dp)
    share = batch.micro * batch.accum
    most = share
    for micro in reversed(micro_batches(here.config, share)):
        if micro > most:
            continue
        most = micro // 2
        if micro != batch.micro:
            yield (batch.global_size, micro, 0)


def _threads(here: TunedRun) -> Values:
    """Offer 1, 2, 4, ... threads, and as many as a rank may have."""
    if here.device == "cpu":
        doubled = [1 << n for n in range(here.cores.bit_length()) if 1 << n < here.cores]
        for count in (*doubled, here.cores):
            yield (float(count),)


def _modes(here: TunedRun) -> Values:
    if here.data_ranks > 1:
        for mode in ("ddp", "ddp_by_hand", "zero1", "zero2", "fsdp"):
            yield (mode, "full")
        yield ("fsdp", "grad_op")


def _buckets(here: TunedRun) -> Values:
    if here.data_ranks > 1:
        for size in (1.0, 2.0, 8.0, 25.0, 100.0):
            yield (size,)


def _layouts(here: TunedRun) -> Values:
    """Offer each way to divide the ranks for which every parallelism has a size."""
    if here.job is None or here.ranks == 1:
        return
    for layout in candidates(here.job, here.ranks):
        if not refusal(here.job, layout):
            # torch's DDP has neither pipelines nor experts on several ranks.
            yield (*(getattr(layout, axis.key) for axis in AXES), here.job.mode(layout))


def _replicas(here: TunedRun) -> Values:
    if here.config.dp_mode in SHARDS_STATE:
        for groups in divisors(here.layout.dp)[:-1]:
            yield (groups,)


def _schedules(here: TunedRun) -> Values:
    if here.config.pp > 1:
        for schedule in ("gpipe", "1f1b", "interleaved", "zero_bubble"):
            yield (schedule,)


def _formats(here: TunedRun) -> Values:
    on_gpus = ("tf32", "fp16", "fp8") if here.device == "cuda" else ()
    return [(form,) for form in ("fp32", "bf16", *on_gpus)]


def _compiled(here: TunedRun) -> Values:
    if cannot_compile(here.device) is None:
        for value in (False, True, "cuda_graphs"):
            yield (value,)


# A search tries them in this order. Compiling is last, because a block of it takes longest.
KNOBS = (
    Knob("micro_batch", BATCH, _micro_batches, (NORMS, MASKS)),
    Knob("attention", ("attention",), each("flash", "plain", "cudnn"), (MASKS,)),
    Knob("loss_chunk", ("loss_chunk",), each(0, 256, 1024, 4096)),
    Knob("checkpointing", ("activation_checkpointing",), each("none", "selective", "block")),
    Knob("threads", ("cpus_per_worker",), _threads),
    Knob("dp_mode", ("dp_mode", "fsdp_reshard"), _modes),
    Knob("buckets", ("bucket_mb",), _buckets),
    Knob("allreduce", ("allreduce",), each("backend", "ring", "double_tree", "halving_doubling")),
    Knob("layout", (*(axis.key for axis in AXES), "dp_mode"), _layouts, (MASKS,)),
    Knob("replicas", ("replicas",), _replicas),
    Knob("pipeline", ("pp_schedule",), _schedules),
    Knob("context", ("cp_attention",), each("ring", "all_gather")),
    Knob("tensor", ("sequence_parallel",), each(False, True)),
    Knob("precision", ("precision",), _formats, (PRECISION,)),
    Knob("compression", ("grad_compress",), each("none", "bf16", "fp16"), (COMPRESSION,)),
    Knob("compile", ("compile",), _compiled, (MASKS,)),
)


def options(here: TunedRun, may: Collection[str], leave: Collection[str] = ()) -> dict[Choice, str]:
    """Return each choice of one knob that a search may try, and the knob's name."""
    return {
        choice: knob.name
        for knob in KNOBS
        if knob.name not in leave and knob.changes_here(here) <= set(may)
        for choice in knob.choices(here)
    }


def with_settings(here: TunedRun, choice: Choice, more: Iterable[tuple[str, Any]]) -> Choice:
    """Return a choice with more settings in the place of its own; what is so already is left out."""
    merged = dict(choice) | dict(more)
    return tuple(sorted(item for item in merged.items() if not _is_now(here, *item)))


def _is_now(here: TunedRun, key: str, value: Any) -> bool:
    """Return whether a key has this value now, or one that means the same."""
    if key in BATCH:
        return False  # a micro batch is written with all of them
    if key == "cpus_per_worker":
        return bool(here.threads == value)
    if key == "bucket_mb" and here.job is not None:
        return bool(here.job.bucket_mb == value)
    return bool(getattr(here.config, key) == value)


def changes_of(here: TunedRun, choice: Choice) -> list[str]:
    """Return what a choice changes in the result beyond rounding, as words of MAY."""
    keys = {key for key, _ in choice} - {"dp_mode"}
    words = [knob.changes_here(here) for knob in KNOBS if keys.intersection(knob.keys)]
    return sorted(set().union(*words))


def left_out(here: TunedRun, may: Collection[str]) -> dict[str, list[str]]:
    """Return the knobs that are left out because of what they would change, by its word of MAY."""
    reasons: dict[str, list[str]] = {}
    for knob in KNOBS:
        for word in knob.changes_here(here) - ALWAYS - set(may):
            if knob.choices(here):
                reasons.setdefault(word, []).append(knob.name)
    return reasons


def configured(here: TunedRun, choice: Choice) -> Config:
    """Return the configuration of a choice. Raises ConfigError for one that cannot be trained."""
    config = make_config(here.config.model_dump() | dict(choice))
    problem = first(config, device=here.device, precision=config.precision, ranks=here.ranks)
    if problem:
        raise ConfigError(problem)
    resolve_batch(config, Layout.of(config, here.ranks).dp)
    return config


def memory_bytes(here: TunedRun, config: Config) -> int:
    """Return the memory of the rank that needs most, by the formulas of a GPT; else 0."""
    if here.job is None:
        return 0
    layout = Layout.of(config, here.ranks)
    batch = resolve_batch(config, layout.dp)
    job = replace(
        here.job,
        config=config,
        precision=config.precision,
        bucket_mb=config.bucket_mb or here.job.bucket_mb,
        sequences=batch.global_size,
    )
    return sum(memory_of(job, layout, batch.micro).values())


def words(choice: Choice) -> str:
    """Write a choice in one line: `attention plain, micro_batch_size 4`."""
    written = dict(choice)
    if "micro_batch_size" in written:  # the others only keep the global batch as it is
        del written["global_batch_size"], written["grad_accum_steps"]
    texts = [f"{key} {_format_value(value)}" for key, value in written.items()]
    return ", ".join(texts) or "as it is"


def _format_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)

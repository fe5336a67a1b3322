"""What a search may change: a list of knobs, each with the settings that it offers here.

A knob is one line of KNOBS. Without --may a search takes only what leaves the result of a run as it
is, up to rounding: the batch of a step, its samples and their order never change. What else a knob
changes it says itself, for a configuration: other masks of dropout, for instance. The settings are
keys of the configuration; what does not go together its table of conflicts refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from nanoray.config import Config, micro_batches, resolve_batch
from nanoray.config.conflicts import first
from nanoray.config.load import make_config
from nanoray.config.mesh import AXES, SHARDS_STATE
from nanoray.errors import ConfigError
from nanoray.forecast.job import Job
from nanoray.forecast.layouts import candidates, refusal
from nanoray.forecast.parallelisms.record import divisors
from nanoray.host.choose import cannot_compile
from nanoray.mesh.layout import Layout
from nanoray.tune.may import COMPRESSION, MASKS, NORMS, PRECISION

BATCH = ("global_batch_size", "micro_batch_size", "grad_accum_steps")
MOST_MICROS = 6  # sizes of micro batches that are offered, the largest of them
BUCKETS_MB = (1.0, 2.0, 8.0, 25.0, 100.0)
CHUNKS = (256, 1024, 4096)


@dataclass(frozen=True)
class TunedRun:
    """What is tuned, and where."""

    config: Config  # as it would train now, with what the devices decide
    ranks: int
    device: str  # cpu or cuda
    threads: int  # of a rank now
    cores: int  # that a rank may have: an equal share of its node's
    has_norms: bool = False  # batch norms
    draws: bool = False  # a script's own model, which may draw random numbers
    in_batches: bool = False  # a script's data come in batches, each a micro batch
    gradient_bytes: int = 0
    bucket_mb: float = 0.0  # of a bucket now
    job: Job | None = None  # of a gpt: what formulas know
    batch_loss: str = ""  # why the loss of a micro batch is no mean over its samples

    @property
    def layout(self) -> Layout:
        return Layout.of(self.config, self.ranks)

    @property
    def data_ranks(self) -> int:
        """The ranks that sum gradients."""
        return self.layout.size_of("dp_cp")


Settings = Mapping[str, Any]  # of the configuration, in the place of its own
Choice = tuple[tuple[str, Any], ...]  # the same, sorted: what is not as it is now


class Option(NamedTuple):
    """A setting that a search tries."""

    knob: str
    choice: Choice


@dataclass(frozen=True)
class Knob:
    """One thing that can be set otherwise."""

    name: str
    offers: Callable[[TunedRun], Iterable[Settings]]
    # What it changes in the result beyond rounding, a word of MAY; "" for nothing
    changes: Callable[[TunedRun], str] = lambda here: ""


def choice_of(settings: Settings) -> Choice:
    """Return settings as a value that can be compared and looked up."""
    return tuple(sorted(settings.items()))


def words(choice: Choice) -> str:
    """Write a choice in one line: `attention plain, micro_batch_size 4`."""
    if not choice:
        return "as it is"
    written = dict(choice)
    if "micro_batch_size" in written:  # the others only keep the global batch as it is
        del written["global_batch_size"], written["grad_accum_steps"]
    return ", ".join(f"{key} {_value(value)}" for key, value in written.items())


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def configured(here: TunedRun, choice: Choice) -> Config:
    """Return the configuration of a choice. Raises ConfigError for one that cannot be trained."""
    config = make_config(here.config.model_dump() | dict(choice))
    problem = first(config, device=here.device, precision=config.precision, ranks=here.ranks)
    if problem:
        raise ConfigError(problem)
    layout = Layout.of(config, here.ranks)
    layout.require(here.ranks)
    resolve_batch(config, layout.dp)
    return config


def with_settings(here: TunedRun, choice: Choice, more: Choice) -> Choice:
    """Return a choice with more settings in the place of its own; what is so already is left out."""
    merged = dict(choice) | dict(more)
    kept = {key: value for key, value in merged.items() if not _is_now(here, key, value)}
    return tuple(sorted(kept.items()))


# ---- the knobs -----------------------------------------------------------------------------------


def _micro_batches(here: TunedRun) -> Iterable[Settings]:
    """Offer each size that divides a rank's share of a step; accumulation follows from it."""
    if here.in_batches or here.batch_loss:
        return
    batch = resolve_batch(here.config, here.layout.dp)
    for micro in micro_batches(here.config, batch.micro * batch.accum)[-MOST_MICROS:]:
        if micro != batch.micro:
            yield micro_batch(batch.global_size, micro)


def micro_batch(global_size: int, micro: int) -> Settings:
    """Return the settings of a micro batch within the same global batch."""
    return {
        "global_batch_size": global_size,
        "micro_batch_size": micro,
        "grad_accum_steps": 0,
    }


def _micro_changes(here: TunedRun) -> str:
    if here.has_norms:
        return NORMS
    return MASKS if here.config.dropout or here.draws else ""


def _attention(here: TunedRun) -> Iterable[Settings]:
    if here.config.model == "gpt":
        for kernel in ("flash", "plain", "cudnn"):
            yield {"attention": kernel}


def _masks(here: TunedRun) -> str:
    return MASKS if here.config.dropout else ""


def _loss_chunks(here: TunedRun) -> Iterable[Settings]:
    if here.config.model != "gpt":
        return
    batch = resolve_batch(here.config, here.layout.dp)
    yield {"loss_chunk": 0}
    for size in CHUNKS:
        if size < batch.micro * here.config.block_size:
            yield {"loss_chunk": size}


def _compile(here: TunedRun) -> Iterable[Settings]:
    yield {"compile": False}
    if cannot_compile(here.device) is None:
        yield {"compile": True}
        if here.device == "cuda":
            yield {"compile": "cuda_graphs"}


def _checkpointing(here: TunedRun) -> Iterable[Settings]:
    if here.config.model == "gpt":
        for what in ("none", "selective", "block"):
            yield {"activation_checkpointing": what}


def _threads(here: TunedRun) -> Iterable[Settings]:
    if here.device != "cpu":
        return
    threads = 1
    while threads <= here.cores:
        yield {"cpus_per_worker": float(threads)}
        threads *= 2
    yield {"cpus_per_worker": float(here.cores)}


def _modes(here: TunedRun) -> Iterable[Settings]:
    if here.data_ranks > 1:
        for mode in ("ddp", "ddp_by_hand", "zero1", "zero2"):
            yield {"dp_mode": mode, "fsdp_reshard": "full"}
        yield {"dp_mode": "fsdp", "fsdp_reshard": "full"}
        yield {"dp_mode": "fsdp", "fsdp_reshard": "grad_op"}


def _buckets(here: TunedRun) -> Iterable[Settings]:
    if here.data_ranks == 1:
        return
    for size in BUCKETS_MB:
        if size != here.bucket_mb:
            yield {"bucket_mb": size}
        if 1e6 * size > here.gradient_bytes:  # one bucket has all of them already
            return


def _all_reduces(here: TunedRun) -> Iterable[Settings]:
    if here.data_ranks > 1:
        for algorithm in ("backend", "ring", "double_tree", "halving_doubling"):
            yield {"allreduce": algorithm}


def _layouts(here: TunedRun) -> Iterable[Settings]:
    """Offer each way to divide the ranks for which every parallelism has a size."""
    if here.job is None or here.ranks == 1:
        return
    for layout in candidates(here.job, here.ranks):
        if refusal(here.job, layout):
            continue
        sizes = {axis.key: getattr(layout, axis.key) for axis in AXES}
        # torch's DDP has neither pipelines nor experts on several ranks.
        yield {**sizes, "dp_mode": here.job.mode(layout)}


def _replicas(here: TunedRun) -> Iterable[Settings]:
    if here.config.dp_mode in SHARDS_STATE:
        for groups in divisors(here.layout.dp)[:-1]:
            yield {"replicas": groups}


def _of_pipelines(here: TunedRun) -> Iterable[Settings]:
    if here.config.pp > 1:
        for schedule in ("gpipe", "1f1b", "interleaved", "zero_bubble"):
            yield {"pp_schedule": schedule}


def _of_contexts(here: TunedRun) -> Iterable[Settings]:
    if here.config.cp > 1:
        for how in ("ring", "all_gather"):
            yield {"cp_attention": how}


def _of_tensors(here: TunedRun) -> Iterable[Settings]:
    if here.config.tp > 1:
        for cut in (False, True):
            yield {"sequence_parallel": cut}


def _precisions(here: TunedRun) -> Iterable[Settings]:
    formats: tuple[str, ...] = ("fp32", "bf16")
    if here.device == "cuda":
        formats = ("fp32", "tf32", "bf16", "fp16", "fp8")
    for form in formats:
        yield {"precision": form}


def _compressions(here: TunedRun) -> Iterable[Settings]:
    if here.data_ranks > 1:
        for kind in ("none", "bf16", "fp16"):
            yield {"grad_compress": kind}


KNOBS = (
    Knob("micro_batch", _micro_batches, _micro_changes),
    Knob("attention", _attention, _masks),
    Knob("loss_chunk", _loss_chunks),
    Knob("compile", _compile, _masks),
    Knob("checkpointing", _checkpointing),
    Knob("threads", _threads),
    Knob("dp_mode", _modes),
    Knob("buckets", _buckets),
    Knob("allreduce", _all_reduces),
    Knob("layout", _layouts, _masks),
    Knob("replicas", _replicas),
    Knob("pipeline", _of_pipelines),
    Knob("context", _of_contexts),
    Knob("tensor", _of_tensors),
    Knob("precision", _precisions, lambda here: PRECISION),
    Knob("compression", _compressions, lambda here: COMPRESSION),
)


def options(here: TunedRun, may: Iterable[str], leave: Collection[str] = ()) -> list[Option]:
    """Return each setting that a search may try beside the present ones, of all knobs but `leave`."""
    allowed = {"", *may}
    found = []
    for knob in KNOBS:
        if knob.name in leave or knob.changes(here) not in allowed:
            continue
        for settings in knob.offers(here):
            changed = {k: v for k, v in settings.items() if not _is_now(here, k, v)}
            if changed:
                found.append(Option(knob.name, choice_of(changed)))
    return list(dict.fromkeys(found))


def changes_of(here: TunedRun, choice: Choice) -> list[str]:
    """Return what a choice changes in the result beyond rounding, as words of MAY."""
    keys = {key for key, _ in choice}
    found = []
    for knob in KNOBS:
        word = knob.changes(here)
        if word and any(keys & settings.keys() for settings in knob.offers(here)):
            found.append(word)
    return list(dict.fromkeys(found))


def left_out(here: TunedRun, may: Iterable[str]) -> dict[str, list[str]]:
    """Return the knobs that are left out because of what they would change, by its word of MAY."""
    reasons: dict[str, list[str]] = {}
    for knob in KNOBS:
        word = knob.changes(here)
        if word in {"", *may} or word in (PRECISION, COMPRESSION) or not any(knob.offers(here)):
            continue
        reasons.setdefault(word, []).append(knob.name)
    return reasons


def _is_now(here: TunedRun, key: str, value: Any) -> bool:
    """Return whether a key has this value now, or one that means the same."""
    if key in BATCH:
        return False  # a micro batch is written with all of them
    if key == "cpus_per_worker":
        return bool(here.threads == value)
    return bool(getattr(here.config, key) == value)

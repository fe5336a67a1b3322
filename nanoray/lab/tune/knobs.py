"""What a search may change: a list of knobs, each with the values that it offers here.

A knob is one entry of KNOBS: data. The batch of a step, its samples and their order never change, so
the result of a run stays as it is, up to rounding. What does not go together is refused by the
configuration's table of conflicts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from nanoray.cli.forecast.job import Job
from nanoray.cli.forecast.layouts import candidates, refusal
from nanoray.cli.forecast.rank_memory import memory_of
from nanoray.config import Config, micro_batches, resolve_batch
from nanoray.config.choose import cannot_compile
from nanoray.config.conflicts import first
from nanoray.config.layout import Layout
from nanoray.config.load import make_config
from nanoray.config.mesh import AXES
from nanoray.errors import ConfigError

Choice = tuple[tuple[str, Any], ...]  # sorted keys and values: what is not as it is now


@dataclass(frozen=True)
class TunedRun:
    """What is tuned, and where."""

    # As it would train now, with what the devices decide: micro batch, threads, kernels
    config: Config
    ranks: int
    device: str  # cpu or cuda
    cores: int  # that a rank may have: an equal share of its node's
    keeps_micro_batch: bool = False  # a script's data come in batches, each a micro batch
    # Its result may follow from the micro batch and the kernels: dropout, batch norms
    draws: bool = False
    job: Job | None = None  # of a gpt: what formulas know

    @property
    def layout(self) -> Layout:
        return Layout.of(self.config, self.ranks)

    @property
    def data_ranks(self) -> int:
        """The ranks that sum gradients."""
        return self.layout.size_of("dp_cp")


Settings = dict[str, Any]
Values = Callable[[TunedRun], Iterable[Settings]]


def each(key: str, *values: Any) -> Values:
    """Return what offers each of these values of one key."""
    return lambda here: [{key: value} for value in values]


def _micro_batches(here: TunedRun) -> Iterable[Settings]:
    """Offer a rank's whole share of a step and what divides it, each at most half of the one above.

    Accumulation follows from the micro batch.
    """
    if here.keeps_micro_batch:
        return
    batch = resolve_batch(here.config, here.layout.dp)
    share = batch.micro * batch.accum
    most = share
    for micro in reversed(micro_batches(here.config, share)):
        if micro <= most:
            most = micro // 2
            yield {"micro_batch_size": micro}


def _threads(here: TunedRun) -> Iterable[Settings]:
    """Offer 1, 2, 4, ... threads, and as many as a rank may have."""
    if here.device == "cpu":
        doubled = [1 << n for n in range(here.cores.bit_length()) if 1 << n < here.cores]
        for count in (*doubled, here.cores):
            yield {"cpus_per_worker": float(count)}


def _modes(here: TunedRun) -> Iterable[Settings]:
    if here.data_ranks > 1:
        for mode in ("ddp", "ddp_by_hand", "zero1", "zero2", "fsdp"):
            yield {"dp_mode": mode, "fsdp_reshard": "full"}
        yield {"dp_mode": "fsdp", "fsdp_reshard": "grad_op"}


def _buckets(here: TunedRun) -> Iterable[Settings]:
    if here.data_ranks > 1:
        for size in (1.0, 2.0, 8.0, 25.0, 100.0):
            yield {"bucket_mb": size}


def _layouts(here: TunedRun) -> Iterable[Settings]:
    """Offer each way to divide the ranks for which every parallelism has a size."""
    if here.job is None or here.ranks == 1:
        return
    for layout in candidates(here.job, here.ranks):
        if not refusal(here.job, layout):
            axes = {axis.key: getattr(layout, axis.key) for axis in AXES}
            # torch's DDP has neither pipelines nor experts on several ranks.
            yield axes | {"dp_mode": here.job.mode(layout)}


def _compiled(here: TunedRun) -> Iterable[Settings]:
    if cannot_compile(here.device) is None:
        for value in (False, True, "cuda_graphs"):
            yield {"compile": value}


# A search tries them in this order. Compiling is last, because a block of it takes longest.
KNOBS: dict[str, Values] = {
    "micro_batch": _micro_batches,
    "attention": each("attention", "flash", "plain", "cudnn"),
    "loss_chunk": each("loss_chunk", 0, 256, 1024, 4096),
    "checkpointing": each("activation_checkpointing", "none", "selective", "block"),
    "threads": _threads,
    "dp_mode": _modes,
    "buckets": _buckets,
    "layout": _layouts,
    "schedule": each("pp_schedule", "gpipe", "1f1b", "interleaved", "zero_bubble"),
    "compile": _compiled,
}
# Dropout draws other masks with another value of these, and batch norms have other statistics
DRAWS = {"micro_batch_size", "attention", "compile", *(axis.key for axis in AXES)}


def options(
    here: TunedRun, may_differ: bool, only: Collection[str] = tuple(KNOBS)
) -> dict[str, list[Choice]]:
    """Return the choices that a search may try, by knob: each changes that knob alone.

    `may_differ`: also those that may change the result. Values that do not go together with the
    present setting are none.
    """
    found: dict[str, list[Choice]] = {}
    for name in only:
        for settings in KNOBS[name](here):
            choice = with_settings(here, (), settings.items())
            if choice and (may_differ or not may_change_result(here, choice)):
                with suppress(ConfigError):
                    configured(here, choice)
                    found.setdefault(name, []).append(choice)
    return found


def with_settings(here: TunedRun, choice: Choice, more: Iterable[tuple[str, Any]]) -> Choice:
    """Return a choice with more settings in the place of its own; what is so already is left out."""
    merged = dict(choice) | dict(more)
    return tuple(
        sorted((key, value) for key, value in merged.items() if getattr(here.config, key) != value)
    )


def may_change_result(here: TunedRun, choice: Choice) -> bool:
    """Return whether a choice may change the result beyond rounding."""
    return here.draws and any(key in DRAWS for key, _ in choice)


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
    return ", ".join(f"{key} {_format_value(value)}" for key, value in choice) or "as it is"


def _format_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)

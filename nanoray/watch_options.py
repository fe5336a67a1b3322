"""The options of what ranks look at beside training, and what they do not go with. config.py is
built on this file.
"""

from __future__ import annotations

import re
from typing import Any

from pydantic import Field

from nanoray.stop_options import StopOptions

# Values of dp_mode with which rank 0 has all weights and all gradients
WHOLE = ("ddp", "ddp_by_hand")
PROFILED = 50  # steps at most of one profile


class WatchOptions(StopOptions):
    """The keys of audit, statistics, memory and profile, a part of Config. Each docstring is the
    help of its flag.
    """

    audit_every: int = Field(0, json_schema_extra={"group": "fault"}, ge=0)
    """steps between audits of gradients: another rank computes one micro batch's gradient of each
    rank, too, and a third one decides where they differ (0 = never). A step with a wrong gradient
    is done again, and no weight has it; wrong twice ends the run. Costs a micro batch's compute
    each time. For whole models on equal devices; on GPUs with plain attention"""

    statistics_every: int = Field(0, json_schema_extra={"group": "log"}, ge=0)
    """steps between statistics of each layer in statistics.jsonl: weights, gradients, updates,
    activations, attention, dead units (0 = never); rank 0 measures them, and no bit of the training
    changes"""

    memory_at: int = Field(0, json_schema_extra={"group": "log"}, ge=0)
    """step whose memory each rank records in the run's memory/: bytes of weights, gradients,
    optimizer, activations, buckets and the rest after each operation, beside the formula (0 =
    none); that step takes longer, and no bit of the training changes"""

    profile: str = Field("", json_schema_extra={"group": "log"})
    """steps A:B, from A up to B but without B, whose operations torch.profiler notes on each rank;
    python -m nanoray.trace RUN --profile puts them on one clock; these steps take longer, no bit of
    the training changes"""

    @property
    def profiled(self) -> range:
        """The steps of `profile`."""
        first, _, stop = self.profile.partition(":")
        return range(int(first or 0), int(stop or 0))


def refuse_watching(config: Any, steps: int) -> None:
    """Raise ValueError when a Config of so many steps watches what it cannot."""
    _refuse_audit(config)
    _refuse_statistics(config)
    last = min(steps, config.stop_at or steps)
    _refuse_memory_at(config, last)
    _refuse_profile(config, last)


def _refuse_audit(config: Any) -> None:
    """Raise ValueError when a Config audits gradients that no other rank can compute."""
    if not config.audit_every:
        return
    found = [(f"{axis} = {size}", "a rank has a part of the model") for axis in ("tp", "pp", "ep")
             if (size := getattr(config, axis)) > 1]  # fmt: skip
    found += [("dp_mode = fsdp", "a rank has a part of the weights")] * (config.dp_mode == "fsdp")
    found += [
        ("sync_batchnorm = True", "a rank's gradient needs all ranks' batches")
    ] * config.sync_batchnorm
    found += [("model = own", "only a rank itself has its batches and draws")] * (
        config.model == "own"
    )
    found += [("workers = 1", "there is no other rank")] * (config.workers == 1)
    if found:
        what, why = found[0]
        raise ValueError(
            f"audit_every = {config.audit_every} with {what}: {why}, so no other rank can compute "
            "its gradient alone; "
            "use audit_every 0, or drop the other"
        )


def _refuse_statistics(config: Any) -> None:
    """Raise ValueError when a Config wants statistics of weights or gradients that rank 0 does not
    have.
    """
    for key, whole in (("dp_mode", WHOLE), ("tp", (1,)), ("pp", (1,)), ("ep", (1,))):
        if config.statistics_every and (value := getattr(config, key)) not in whole:
            raise ValueError(
                f"statistics_every = {config.statistics_every} with {key} = {value}: rank 0 has "
                "only a part of the "
                f"weights or gradients; use {key} {' or '.join(map(str, whole))}, or drop "
                "statistics_every"
            )


def _refuse_memory_at(config: Any, last: int) -> None:
    """Raise ValueError when the step whose memory a Config wants comes after the last one, or shows
    nothing.
    """
    if config.memory_at > last:
        raise ValueError(
            f"memory_at = {config.memory_at} would record nothing: the run ends at step {last}; "
            "use a step up to it"
        )
    if config.memory_at and config.compile:
        raise ValueError(
            f"memory_at = {config.memory_at} with compile = True: compiled layers allocate where "
            "it cannot be seen; "
            "drop one of the two"
        )


def _refuse_profile(config: Any, last: int) -> None:
    """Raise ValueError when the steps that a Config wants profiled are none, or too many."""
    if not config.profile:
        return
    if not re.fullmatch(r"[1-9]\d*:[1-9]\d*", config.profile) or not config.profiled:
        raise ValueError(
            f"profile = {config.profile!r} is not A:B with 1 <= A < B; for steps 5, 6 and 7 write "
            "5:8"
        )
    if config.profiled[-1] > last:
        raise ValueError(
            f"profile = {config.profile}, but the run ends at step {last}; use steps up to it"
        )
    if len(config.profiled) > PROFILED:
        raise ValueError(
            f"profile = {config.profile}: {len(config.profiled)} steps, each of which has "
            "thousands of operations; "
            f"use {PROFILED} at most"
        )
    if config.comm_trace != "off":
        raise ValueError(
            f"profile = {config.profile} with comm_trace = {config.comm_trace}: both need "
            "torch.profiler, of which a "
            "process has one; drop one of the two"
        )

"""Keys of faults: what is checked, what happens after a failure, and which faults are injected."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import WithJsonSchema, field_validator

from nanoray.config.fields import Group, Natural, field


class FaultKeys(Group):
    """Failures: how they are found, how a run recovers, and faults that are injected on purpose."""

    # What is checked while training
    audit_every: Natural = field(0, "fault")
    """steps between audits, in which another rank computes one micro batch's gradient of each rank,
    too (0 = never). A step with a wrong gradient is done again; wrong twice ends the run"""

    # What happens after a failure
    max_failures: Natural = field(3, "fault")
    """failures in a row, with fewer than 10 steps completed between them, before giving up; ranks
    that are left save"""

    recovery: Literal["in_place", "shrink", "restart"] = field("in_place", "fault")
    """when a rank is lost, on Ray: in_place (only that rank is replaced, from another rank's memory;
    a restart with NCCL or where no other rank has its part of the state) | shrink (as in_place, but
    without a replacement in time fewer ranks go on) | restart (all, from a checkpoint)"""

    abort_nccl: bool = field(False, "fault")
    """recovery in place and shrink over NCCL too, or over a backend of your own, where each rank
    holds the whole state. Rehearsed on CPU; no run has recovered on GPUs yet"""

    replace_timeout: float = field(60.0, "fault", ge=0)
    """seconds to wait for a lost rank's replacement; then in_place saves and restarts, and shrink
    continues with fewer ranks"""

    spares: Natural | Literal["auto"] = field("auto", "fault")
    """idle processes, with everything imported and no device, that replace a lost rank at once
    (auto = one, started after half a minute, where a lost rank is replaced in place)"""

    hang_timeout: float = field(60.0, "fault", ge=0)
    """seconds without progress on any rank after which, on Ray, the rank that is behind is named,
    ended and replaced (0 = off). Keep it below timeout_s: after that the collectives fail first,
    and no rank is named"""

    # What happens to a step that is not finite
    on_nan: Literal["stop", "skip", "rollback"] = field("stop", "fault")
    """when a loss or gradient is not finite: stop (exit 5, naming rank, layer and samples) | skip
    (leave that update out; 11 in a row stop) | rollback (to the newest checkpoint, with later data;
    the 4th to the same one stops)"""

    # What happens to a step that runs out of memory
    on_oom: Literal["shrink", "stop"] = field("shrink", "fault")
    """when a step or an evaluation runs out of memory: shrink (all ranks halve the micro batch,
    accumulate more, and do it again) | stop"""

    # Silent errors
    hash_every: Natural = field(250, "fault")
    """steps between comparisons of all ranks' weights and optimizer state, also before each
    checkpoint (0 = never): a rank that differs gets the majority's state"""

    # Faults on purpose, for tests and demonstrations
    faults: Annotated[str, WithJsonSchema({"type": ["string", "array"]})] = field("", "fault")
    """break something on purpose: KIND@rank=R,step=S[,phase=P][;...], KIND kill | stop | exit |
    raise | hang | slow | oom | no-memory | disk-full | nan | bitflip | gradflip; in YAML also a
    list"""

    @field_validator("faults", mode="before")
    @classmethod
    def _write_plan_as_text(cls, plan: Any) -> Any:
        """Turn a YAML list of faults into the text of the flag."""
        if not isinstance(plan, list):
            return plan

        texts = []
        for fault in plan:
            if isinstance(fault, dict):
                values = ",".join(f"{key}={value}" for key, value in fault.items() if key != "kind")
                fault = f"{fault.get('kind', '')}@{values}"
            texts.append(str(fault))
        return ";".join(texts)

"""Keys of faults: what is checked, what happens after a failure, and which faults are injected."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import WithJsonSchema, field_validator

from nanoray.config.fields import Group, Natural, field
from nanoray.config.mesh import AXES


class FaultKeys(Group):
    """Failures: how they are found, how a run recovers, and faults that are injected on purpose."""

    # What is checked while training
    audit_every: Natural = field(0, "fault")
    """steps between audits of gradients: another rank computes one micro batch's gradient of each
    rank, too, and a third one decides where they differ (0 = never). A step with a wrong gradient
    is done again, and no weight has it; wrong twice ends the run. Costs a micro batch's compute
    each time. For whole models on equal devices; on GPUs with plain attention"""

    # What happens after a failure
    max_failures: Natural = field(3, "fault")
    """failures in a row, with fewer than 10 steps completed between them, before giving up; ranks
    that are left save"""

    recovery: Literal["in_place", "shrink", "restart"] = field(
        "in_place",
        "fault",
        description="when a rank is lost, on Ray: in_place (only that rank is replaced, its state "
        "comes from another rank's memory, no step is repeated; a restart with NCCL (but see "
        "--abort_nccl), an --allreduce written by hand, or where no other rank has the lost part "
        "of a divided state: see --mirror and --replicas) | shrink (as in_place, but without a "
        "replacement in time fewer ranks, whole replicas of "
        f"{'*'.join(axis.key for axis in AXES)} or whole groups of --replicas, keep the same "
        "global batch until one comes) | restart (from a checkpoint)",
    )

    abort_nccl: bool = field(False, "fault")
    """recovery in place and shrink over NCCL too, or over a backend of your own, where each rank
    holds the whole state; ranks wait for their device in each step. Rehearsed on CPU over a
    stand-in, whose traits NCCL has on one GPU; no run has recovered on GPUs yet"""

    replace_timeout: float = field(60.0, "fault", ge=0)
    """seconds to wait for a lost rank's replacement; then in_place saves and restarts, and shrink
    continues with fewer ranks"""

    spares: Natural | Literal["auto"] = field("auto", "fault")
    """idle processes, with everything imported and no device taken, that replace a lost rank at
    once (auto = one, started after half a minute, where a lost rank is replaced in place)"""

    hang_timeout: float = field(60.0, "fault", ge=0)
    """seconds without progress on any rank after which, on Ray, the rank that is behind is named,
    ended and replaced (0 = off). Keep it below timeout_s: after that the collectives fail first,
    and no rank is named. Ten times as long a script's function may go on after that of rank 0"""

    # What happens to a step that is not finite
    on_nan: Literal["stop", "skip", "rollback"] = field("stop", "fault")
    """when a loss or gradient is not finite (it never reaches the weights): stop (exit 5, naming
    rank, layer and samples) | skip (leave that update out; 11 in a row stop) | rollback (load the
    newest checkpoint and continue with the data after the bad step; the 4th rollback to the same
    checkpoint stops)"""

    # What happens to a step that runs out of memory
    on_oom: Literal["shrink", "stop"] = field("shrink", "fault")
    """when a forward or backward runs out of memory: shrink (all ranks halve the micro batch, and
    accumulate more; the same step is done again) | stop"""

    # Silent errors
    hash_every: Natural = field(250, "fault")
    """steps between comparisons of all ranks' weights and optimizer state, also made before each
    checkpoint (0 = never, for devices that round differently): a rank that differs gets the
    majority's state"""

    # Faults on purpose, for tests and demonstrations
    faults: Annotated[str, WithJsonSchema({"type": ["string", "array"]})] = field("", "fault")
    """break something on purpose: KIND@rank=R,step=S[,phase=P][;...], KIND kill | stop | exit |
    raise | hang | slow | oom | no-memory | disk-full | nan | bitflip | gradflip; in YAML also a
    list of such texts, or of mappings"""

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

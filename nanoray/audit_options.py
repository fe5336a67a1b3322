"""The option of the swap audit, and what it does not go with. config.py is built on this file."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from nanoray.stop_options import StopOptions


class AuditOptions(StopOptions):
    """The key of an audit of gradients, a part of Config. Its docstring is the help text of its flag."""

    audit_every: int = Field(0, json_schema_extra={"group": "fault"}, ge=0)
    """steps between audits of gradients: another rank computes one micro batch's gradient of each rank, too, and a
    third one decides where they differ (0 = never). A step with a wrong gradient is done again, and no weight has it;
    wrong twice ends the run. Costs a micro batch's compute each time. For whole models on equal devices"""


def refuse_audit(config: Any) -> None:
    """Raise ValueError when a Config audits gradients that no other rank can compute."""
    if not config.audit_every:
        return
    found = [(f"{axis} = {size}", "a rank has a part of the model") for axis in ("tp", "pp", "ep")
             if (size := getattr(config, axis)) > 1]  # fmt: skip
    found += [("dp_mode = fsdp", "a rank has a part of the weights")] * (config.dp_mode == "fsdp")
    found += [("sync_batchnorm = True", "a rank's gradient needs all ranks' batches")] * config.sync_batchnorm
    found += [("model = own", "only a rank itself has its batches and draws")] * (config.model == "own")
    found += [("workers = 1", "there is no other rank")] * (config.workers == 1)
    if found:
        what, why = found[0]
        raise ValueError(
            f"audit_every = {config.audit_every} with {what}: {why}, so no other rank can compute its gradient alone; "
            "use audit_every 0, or drop the other"
        )

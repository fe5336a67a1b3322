"""The faults of one run: printed at once, written to faults.jsonl when their outcome is known."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from nanoray.faults import exit_record
from nanoray.faults.cause import (
    Failure,
    FailureCollector,
    FaultReport,
    announce,
    outcome_of,
    without_progress,
)
from nanoray.launch.recovery.worker_group import WorkerGroup
from nanoray.machine.environment import from_here
from nanoray.machine.output import say

LOG_LINES = 8  # of a dead rank's log, in the report
END_OF_LOG = "end of its log:"
LOG_BYTES = 1 << 14  # read from the end of the log: long enough for those lines


class FaultLog:
    """The causes so far, and the fault that the run is recovering from at present, if any."""

    def __init__(self, folder: Path, max_failures: int, clock: Any = time) -> None:
        self.max_failures = max_failures
        self.causes: list[Failure] = []  # one per fault, oldest first
        self.present: FaultReport | None = None
        self._folder = folder
        self._clock = clock

    def add(self, collector: FailureCollector, group: WorkerGroup) -> Failure:
        """Print a fault of a group of ranks, and return its cause."""
        cause = collector.cause
        detail = cause.detail
        # The end of a dead process's log is in the report, and all of it in its file
        if detail.startswith(END_OF_LOG):
            log = self._folder / "logs" / f"rank{cause.rank}.log"
            detail = f"its log  {from_here(str(log))}"
        consequences = announce(cause, collector.others, detail)

        if self.present:  # the previous fault was not overcome before this one
            self.close(self.present.recovery)
        self.causes.append(cause)

        # The fault is overcome when a step is completed that no rank had completed before.
        completed = [failure.completed for failure in collector.failures]
        for position, _ in group.positions().values():
            completed.append(Failure(0, "killed", "", *position).completed)
        known_at = collector.first_failure_at
        self.present = FaultReport(
            cause,
            consequences,
            group.spec.attempt,
            len(group.members),
            known_at,
            max(completed),
        )

        boot = cause.exit_record.get("boot")
        if cause.cause == "hung":
            self.present.detect_s = round(cause.silent_s, 3)
        elif boot and boot == exit_record.boot_id():
            # Monotonic clocks of two processes are comparable on one host since one boot only.
            detect_s = known_at - cause.exit_record["monotonic"]
            self.present.detect_s = round(max(0.0, detect_s), 4)
        return cause

    @property
    def budget(self) -> str:
        """Return how many of the failures that are allowed have happened, e.g. `1/3`."""
        return f"{without_progress(self.causes)}/{self.max_failures}"

    @property
    def target(self) -> int | None:
        """The step after which the present fault is overcome; None if there is none."""
        return self.present.target if self.present else None

    def set_recovery(self, kind: str, replaced: int = 0) -> None:
        """Note how the run recovers from the present fault: in_place, spare, shrink or restart.

        `replaced`: how many ranks have new processes.
        """
        assert self.present
        self.present.recovery = kind
        self.present.replaced = replaced

    def explain(self, text: str) -> None:
        """Print, and note in the report, a consequence of the present fault."""
        assert self.present
        self.present.consequences.append(text)
        say(f"mirror   {text}")

    def close_as_recovered(self) -> None:
        """Write the report of the present fault: a step was completed for the first time since."""
        fault = self.present
        assert fault
        fault.overcome(self._clock.monotonic())
        self.close(fault.recovery)
        say(f"recover  {outcome_of(fault.record())}\n")

    def close(self, recovery: str) -> None:
        """Write the report of the present fault."""
        assert self.present
        self.present.recovery = recovery
        self.present.write(self._folder)
        self.present = None


def end_of_log(path: Path) -> str:
    """Return the last lines of a rank's log, with a heading; empty if it cannot be read."""
    # Read only the end: a log may have gigabytes.
    with suppress(OSError):
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
        return "\n".join([END_OF_LOG, *lines[-LOG_LINES:]])
    return ""

"""How one rank ended, as the driver tells it: an error that it returned, or the death of its
process or node.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from ray.exceptions import ActorDiedError, OutOfMemoryError, RayActorError, RayError

from nanoray.faults import exit_record
from nanoray.faults.cause import Failure
from nanoray.faults.progress import ProgressFile
from nanoray.launch.fault_log import end_of_log
from nanoray.run import RunSpec


@dataclass(frozen=True)
class RankEnd:
    """The process in a slot, whose end is to be described."""

    slot: int
    facts: dict[str, Any]  # pid, node, ip, devices
    spec: RunSpec
    clock: Any = time

    @property
    def name(self) -> str:
        return f"rank {self.slot} (pid {self.facts['pid']}, node {self.facts['ip']})"

    def by_error(self, result: dict[str, Any]) -> Failure:
        """Return the failure of a rank whose `run` returned an error."""
        lines = f"{result['error']}: {result['message']}"
        return Failure(
            self.slot,
            result["kind"],
            f"{self.name} failed in {result['phase']} of step {result['step']}: {lines}",
            result["step"],
            result["phase"],
            "" if result["kind"] == "refused" else result["traceback"],
            retry=result["kind"] != "refused",
            exit_code=result["exit_code"],
            signature=lines,
            facts=self.facts,
        )

    def by_death(self, error: RayError, record_by: float) -> Failure:
        """Return the failure of a rank that did not return from `run`.

        record_by: monotonic seconds until which its exit record is awaited.
        """
        step, phase = self._position()
        failure = Failure(
            self.slot,
            "killed",
            "",
            step,
            phase,
            end_of_log(self.spec.log(self.slot)),
            facts=self.facts,
        )
        what, how = "died", "killed, or crashed without a Python exception"
        if isinstance(error, OutOfMemoryError):
            failure.cause, how = "out_of_memory", "ended by Ray's memory monitor"
            failure.detail = str(error)
        elif isinstance(error, ActorDiedError):
            record = failure.exit_record = self._exit_record(record_by)
            if record.get("oom"):
                failure.cause, how = (
                    "out_of_memory",
                    "killed by the kernel, which was out of memory",
                )
            elif name := record.get("signal"):
                how = f"killed by {name}"
            elif "exit_code" in record:
                how = f"exited with code {record['exit_code']} and without a Python exception"
        elif isinstance(error, RayActorError):
            failure.cause, what, how = "node_lost", "is out of reach", "its node is lost or busy"
        else:
            failure.cause, what, how = "exception", "failed", str(error)
        failure.title = f"{self.name} {what} in {phase} of step {step}: {how}"
        failure.signature = how if failure.cause != "node_lost" and phase != "regroup" else ""
        return failure

    def by_silence(self) -> Failure:
        """Return the failure of a rank that did not notice that its group broke, or never reached
        the rendezvous.
        """
        step, phase = self._position()
        title = f"{self.name} did not leave the group that broke, in {phase} of step {step}; it was ended"
        return Failure(self.slot, "hung", title, step, phase, end_of_log(self.spec.log(self.slot)))

    def by_drain(self, notice: str) -> Failure:
        """Return the failure of a rank that left its group because its node will be taken away."""
        step, phase = self._position()
        title = f"{self.name} left after step {max(0, step - 1)}: its node is being drained{notice}"
        return Failure(self.slot, "drained", title, step, phase, facts=self.facts)

    def _position(self) -> tuple[int, str]:
        return ProgressFile.read(self.spec.progress(self.slot)) or (0, "init")

    def _exit_record(self, record_by: float) -> dict[str, Any]:
        """Return how the process ended, waiting for its record; empty if none is written."""
        while True:
            record = exit_record.read(self.spec.exit_record(self.slot))
            if record.get("pid") == self.facts["pid"]:
                return record
            if self.clock.monotonic() > record_by:
                return {}
            self.clock.sleep(0.005)

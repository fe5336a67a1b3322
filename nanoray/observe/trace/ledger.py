"""Account for the time of a run: each second of each rank's process, in a mapped file.

Each rank's process adds up the seconds of its phases in logs/rank0.*.ledger, which survives SIGKILL.
accounts.py reads the files of a run.

Seconds are the host's: with a GPU, the time in which the host waits for the device counts where the
host waits, mostly in the log. A host whose time of day is seconds away from that of the command's
host is found by the time that the shared storage gives to the rank's file.
"""

from __future__ import annotations

import struct
import time
from pathlib import Path
from typing import Any

from nanoray.machine.mapped import MappedFile

# The account of each phase
_OF_PHASE = {
    "data": "data",
    "forward": "compute",
    "backward": "compute",
    "optimizer": "compute",
    "idle": "idle",
    "log": "log",
    "eval": "evaluation",
    "checkpoint": "checkpoint",
    "done": "closing",
}
# The accounts that a process keeps; accounts.py derives the others
KEPT = (
    "start",
    "recovery",
    "data",
    "compute",
    "idle",
    "log",
    "evaluation",
    "checkpoint",
    "closing",
)
# The file: started, created (Unix s), steps, closed, the seconds of each account; the first and the
# newest step, and the number of steps that were repeated
FORMAT = struct.Struct(f"<ddq?{len(KEPT)}d3q")


class Ledger:
    """One process' seconds per account, in a mapped file: a change of phase is a few writes."""

    def __init__(self, path: Path, started: float, takes_over: bool, clock: Any = time) -> None:
        """Create the file.

        `started`: Unix seconds of the command. `takes_over`: this process replaces a lost rank.
        Until the first step, time counts as `start`, or as `recovery` if the process takes over.
        """
        self._clock = clock
        self._seconds = dict.fromkeys(KEPT, 0.0)
        self._started = started
        self._created = clock.time()
        self._open = "recovery" if takes_over else "start"
        self._since = clock.monotonic()
        self._closed = False

        # Steps whose update is done
        self._steps = 0
        self._first = 0
        self._newest = 0
        self._repeated = 0
        self._updating = 0  # the step whose update has begun; 0: none

        # If the file cannot be created, the seconds stay in memory, and the reader reports the
        # time of this process as recovery. Training goes on.
        self._file = MappedFile(path, bytes(FORMAT.size))

        # The file must be readable before the first phase begins.
        self._change(self._open)

    def phase(self, step: int, phase: str) -> None:
        """Close the open account and open that of a phase.

        A phase without an account of its own, as set-up and regrouping, continues the open one.
        """
        # A step is done when the phase after its update begins.
        if self._updating:
            if self._updating <= self._newest:
                self._repeated += 1
            self._first = self._first or self._updating
            self._newest = max(self._newest, self._updating)
            self._updating = 0

        self._change(_OF_PHASE.get(phase, self._open))
        if phase == "optimizer":
            self._updating = step
            self._steps += 1

    def group_lost(self) -> None:
        """Charge the time since the last change of phase, and what follows, to recovery."""
        self._open = "recovery"
        self._updating = 0  # an update that was interrupted does not count
        self._change("recovery")

    def close(self) -> None:
        """Charge the rest."""
        self._closed = True
        self._change("closing")

    def _change(self, account: str) -> None:
        """Charge the time since the last change to the open account, open another; write the file."""
        # Monotonic, because a change of the host's time would make a phase negative.
        now = self._clock.monotonic()
        self._seconds[self._open] += now - self._since
        self._open = account
        self._since = now

        # Writing to the mapped file is a copy in memory. The file stays when the process is killed.
        FORMAT.pack_into(
            self._file.memory,
            0,
            self._started,
            self._created,
            self._steps,
            self._closed,
            *self._seconds.values(),
            self._first,
            self._newest,
            self._repeated,
        )

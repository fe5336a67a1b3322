"""Write a rank's step and phase to a mapped file that outlives the process.

position (by the rank) │ how the process ended (JSON, by the one beside it)

exit_record.py has the layout, because that process runs it as a file by itself.
"""

from __future__ import annotations

import struct
import time
from pathlib import Path

from nanoray.faults.exit_record import POSITION
from nanoray.machine.mapped import MappedFile, content_of

PHASES = (
    "init",
    "data",
    "forward",
    "backward",
    "optimizer",
    "log",
    "eval",
    "checkpoint",
    "done",
    "regroup",
    "idle",
    "out_of_memory",
    "script",
)
# The phase of a rank that is in a script's function, before its engine trains or in a loop of its own.
# It holds no state that another rank could take over.
SCRIPT = "script"
# Phases of a rank that has left its group and waits; the second one asks for a smaller micro batch
LEFT = ("regroup", "out_of_memory")
# Phases of a step that follow its weight update
AFTER_UPDATE = ("log", "eval", "checkpoint", "done", SCRIPT)
OUTSIDE = ("init", *AFTER_UPDATE)  # phases that are no part of a step's computation
UNKNOWN = -1  # as a base: the group has not been built yet
NOT_BEGUN = (0, "init", UNKNOWN, 0.0)  # the place of a rank of which nothing is known


class ProgressFile:
    """A rank's position, in the first bytes of a file. They survive SIGKILL. A write goes to memory."""

    def __init__(self, path: Path) -> None:
        self.base = UNKNOWN
        start = POSITION.pack(0, PHASES.index("init"), UNKNOWN, 0.0)
        self._file = MappedFile(path, start)

    def set(self, step: int, phase: str) -> None:
        """Write the step being computed and its phase."""
        memory = self._file.memory
        POSITION.pack_into(memory, 0, step, PHASES.index(phase), self.base, time.monotonic())

    phase = set  # the name by which the loop calls it (observe/watch/instruments.py)

    @classmethod
    def read_all(cls, path: Path) -> tuple[int, str, int, float] | None:
        """Return (step, phase, base, the writer's monotonic seconds); None without a valid file."""
        try:
            return cls._unpack(path.read_bytes())
        except OSError:
            return None

    @classmethod
    def read_own(cls, path: Path) -> tuple[int, str, int, float]:
        """Return the same, but from memory where this process writes the file: it may be gone.

        Without any, it is the place of a rank that has not begun.
        """
        content = content_of(path)
        position = cls.read_all(path) if content is None else cls._unpack(content)
        return position or NOT_BEGUN

    @classmethod
    def _unpack(cls, content: bytes) -> tuple[int, str, int, float] | None:
        try:
            step, phase, base, seconds = POSITION.unpack_from(content)
            return step, PHASES[phase], base, seconds
        except (struct.error, IndexError):
            return None

"""What a rank's actor reports of its program: memory, GPUs, and the notes of its collectives.

The actor imports it before it starts the program, so it needs little: observed.py beside it does
the rest in the driver.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from nanoray.launch.gauges import RayMetrics
from nanoray.launch.program.counts import Counts, read_counts
from nanoray.machine.gpus import gpu_usage
from nanoray.machine.host import resident_bytes

MOST_BYTES = 4 << 20  # of notes in one answer
GIB = 1 << 30


class RankObserver:
    """What a rank's actor reports of its program."""

    def __init__(self, log: Path) -> None:
        """log: the file of the rank's output; its other files lie beside it."""
        self._rank = int(log.stem.removeprefix("rank"))
        self._notes = log.with_suffix(".notes.jsonl")
        self._counts = log.with_suffix(".counts")
        self._gauges = RayMetrics(log.parent.parent.name, self._rank)

    def begin(self) -> None:
        """Forget the program before: the files of the next one are not there yet."""
        self._notes.unlink(missing_ok=True)
        self._counts.unlink(missing_ok=True)

    def counts(self) -> Counts:
        """Return the collectives that the program has begun and ended."""
        return read_counts(self._counts)

    def observe(self, pids: Iterable[int], devices: Sequence[str], offset: int) -> dict[str, Any]:
        """Return memory and GPUs, and the notes from `offset` on."""
        resident = sum(resident_bytes("VmRSS", pid) for pid in pids)
        usage = gpu_usage(devices)
        if resident:  # else the program has ended
            usage["mem/rss_gib"] = resident / GIB
        self._gauges.set(usage)
        notes = b""
        with suppress(OSError), self._notes.open("rb") as file:
            file.seek(offset)
            notes = file.read(MOST_BYTES)
        return {"usage": usage, "notes": notes, "steps": self.counts().steps}

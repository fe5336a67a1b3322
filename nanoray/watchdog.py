"""Find the rank that everybody waits for: Ray shows a hung actor as alive for ever.

Every rank stamps where it is (step and phase) into a mapped file. The driver reads the stamps, and when none of them
has changed for `hang_timeout` seconds, the rank that is behind is the one that hangs. Only changes count, seen by the
driver's own clock: clocks of other hosts do not matter.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from nanoray.faults import ProgressStamp

_ORDER = ("forward", "data", "backward", "optimizer", "log", "eval", "checkpoint", "done")  # within a step
_PATIENT = {"checkpoint": 10.0}  # phases in which one rank may write files while the others wait: so many times longer


class Position(NamedTuple):
    """Where a rank is: the step being computed and the phase."""

    step: int
    phase: str


class Watchdog:
    """Watches the stamps of all ranks; `check` costs a small file per rank."""

    def __init__(self, stamps: Sequence[Path], timeout_s: float) -> None:
        self._stamps, self._timeout_s = stamps, timeout_s
        self._seen: list[tuple[int, str, float] | None] = []
        self._since = time.monotonic()
        self.silent_s = 0.0

    def check(self) -> list[Position] | None:
        """Return where each rank is when none of them has moved for too long, else None. Before step 1 never."""
        now = time.monotonic()
        seen = [ProgressStamp.read_all(path) for path in self._stamps]
        if seen != self._seen:
            self._seen, self._since = seen, now
        places = [Position(*s[:2]) for s in seen if s is not None]
        if not self._timeout_s or len(places) < len(seen) or any(p.phase == "init" for p in places):
            return None
        if all(p.phase == "done" for p in places):
            return None
        self.silent_s = now - self._since
        limit_s = self._timeout_s * max(_PATIENT.get(p.phase, 1.0) for p in places)
        return places if self.silent_s > limit_s else None


def behind(places: Sequence[Position]) -> list[int]:
    """Return the ranks that are furthest behind; all of them when nobody is ahead, which says nothing."""
    keys = [(place.step, _ORDER.index(place.phase) if place.phase in _ORDER else -1) for place in places]
    return [rank for rank, key in enumerate(keys) if key == min(keys)]

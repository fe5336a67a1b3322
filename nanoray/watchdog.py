"""Find the rank that everybody waits for: Ray shows a hung actor as alive for ever.

Every rank stamps where it is (step and phase) and says so when the driver asks (`Worker.beat`). When nobody has moved
for `hang_timeout` seconds, the rank that is behind is the one that hangs. Only changes count, seen by the driver's own
clock: clocks of other hosts do not matter. Who sets up may take longer, but says so: a rank without any answer for
twice as long is frozen, whatever it was doing, and may hold up the others where no timeout of theirs counts.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple

_ORDER = ("forward", "data", "backward", "optimizer", "log", "eval", "checkpoint", "done")  # within a step
_PATIENT = {"checkpoint": 10.0}  # phases in which one rank may write files while the others wait: so many times longer


class Position(NamedTuple):
    """Where a rank is: the step being computed, or just completed, and the phase."""

    step: int
    phase: str


class Watchdog:
    """Hears where ranks are, and knows when nobody moves any more. Hearing costs O(1), and so does asking."""

    def __init__(self, ranks: Iterable[int], timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._seen: dict[int, tuple[Position, float]] = {}  # and the writer's own seconds, which tell a long evaluation
        self._since = time.monotonic()
        self._heard = dict.fromkeys(ranks, self._since)  # of those who are not over: when each answered last
        self._unseen = set(self._heard)
        self.silent_s = 0.0

    def see(self, rank: int, place: Position, stamped: float) -> None:
        """Hear where a rank is."""
        self._heard[rank] = time.monotonic()
        self._take(rank, place, stamped)

    def _take(self, rank: int, place: Position, stamped: float) -> None:
        if self._seen.get(rank) != (place, stamped):
            self._seen[rank] = place, stamped
            self._since = time.monotonic()
            self._unseen.discard(rank)

    def reread(self, rank: int, place: Position, stamped: float) -> None:
        """Read a rank's stamp from the disk: one that froze cannot say any more where it came to."""
        if rank in self._seen and stamped > self._seen[rank][1]:
            self._take(rank, place, stamped)

    @property
    def quiet(self) -> bool:
        """Whether it is time to look at the stamps: nobody has said anything new for a while."""
        return 0 < self._timeout_s / 4 < time.monotonic() - self._since

    def over(self, rank: int) -> None:
        """Expect no more answers of a rank: it is done, or has failed."""
        self._heard.pop(rank, None)

    def hangs(self) -> bool:
        """Whether nobody has moved for too long; before everybody has begun step 1 only, whether a rank is mute."""
        self.silent_s = time.monotonic() - self._since
        if not self._timeout_s or self.silent_s <= self._timeout_s:
            return False
        if any(time.monotonic() - at > 2 * self._timeout_s for at in self._heard.values()):
            return True
        if self._unseen:
            return False
        phases = {place.phase for place, _ in self._seen.values()}
        limit_s = self._timeout_s * max(_PATIENT.get(phase, 1.0) for phase in phases)
        return "init" not in phases and phases != {"done"} and self.silent_s > limit_s

    def places(self) -> dict[int, Position]:
        """Return where every rank was seen last."""
        return {rank: place for rank, (place, _) in sorted(self._seen.items())}


def behind(places: Mapping[int, Position]) -> list[int]:
    """Return the ranks that are furthest behind; all of them when nobody is ahead, which says nothing."""
    keys = {r: (p.step, _ORDER.index(p.phase) if p.phase in _ORDER else -1) for r, p in places.items()}
    last = min(keys.values())
    return [rank for rank, key in keys.items() if key == last]

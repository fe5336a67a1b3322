"""Find the rank that all others wait for. Ray shows a hung actor as alive for ever.

Every rank writes its position (step and phase) to a file and answers the driver's
`Worker.heartbeat` with it. If no rank has moved for `hang_timeout` seconds, the rank furthest
behind is the one that hangs. Only changes count, timed by the driver's clock, so the clocks of
other hosts do not matter. Set-up may take longer than the timeout, but a rank that answers no
heartbeat for twice the timeout is frozen, whatever its phase. Where all ranks are in the same
forward, and after a long one, the limit is longer: a step may honestly take more time than the
timeout.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

# Within a step. In a pipeline a rank computes forwards and backwards by turns, and is idle while it
# waits for another.
_ORDER = ("data", "forward", "backward", "idle", "optimizer", "log", "eval", "checkpoint", "done")
_PATIENT = 10.0  # factor on the timeout while one rank may write files, or all ranks compute
_ALONE = ("data", "forward")  # in these phases no rank waits for another one
_SLOW = 4.0  # factor on the longest forward so far: a backward takes twice as long


class Position(NamedTuple):
    """Where a rank is: the step being computed, or just completed, and its phase."""

    step: int
    phase: str


class Watchdog:
    """Takes the ranks' positions and knows when no rank moves any more. An update and a check cost
    O(1) each.
    """

    def __init__(
        self, ranks: Iterable[int], timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._timeout_s, self._clock = timeout_s, clock
        # With the rank's own clock: a long evaluation moves it
        self._seen: dict[int, tuple[Position, float]] = {}
        self._moved_at = clock()
        self._heard_at = dict.fromkeys(ranks, self._moved_at)  # of running ranks: the newest answer
        self._setting_up = set(self._heard_at)  # not seen in any step yet
        self._longest_s = 0.0  # without a move, until a rank ended its forward
        self.silent_s = 0.0

    def update(self, rank: int, position: Position, written_at: float) -> None:
        """Take a rank's heartbeat. `written_at`: when it wrote this position, in its own monotonic
        seconds.
        """
        self._heard_at[rank] = self._clock()
        self._take(rank, position, written_at)

    def update_from_file(self, rank: int, position: Position, written_at: float) -> None:
        """Take a position read from a rank's progress file: a frozen rank cannot send its last one."""
        if rank in self._seen and written_at > self._seen[rank][1]:
            self._take(rank, position, written_at)

    def _take(self, rank: int, position: Position, written_at: float) -> None:
        if self._seen.get(rank) != (position, written_at):
            now, before = self._clock(), self._seen.get(rank)
            if before and before[0].phase in _ALONE:
                self._longest_s = max(self._longest_s, now - self._moved_at)
            self._seen[rank] = position, written_at
            self._moved_at = now
            if position.phase not in ("init", "regroup"):
                self._setting_up.discard(rank)

    def ended(self, rank: int) -> None:
        """Expect no more answers from this rank."""
        self._heard_at.pop(rank, None)

    @property
    def quiet(self) -> bool:
        """Whether no rank has moved for so long that the progress files are worth reading."""
        return 0 < self._timeout_s / 4 < self._clock() - self._moved_at

    def hangs(self) -> bool:
        """Whether no rank has moved for too long. Until all ranks train: whether one does not
        answer.
        """
        now = self._clock()
        self.silent_s = now - self._moved_at
        if not self._timeout_s or self.silent_s <= self._timeout_s:
            return False
        if any(now - at > 2 * self._timeout_s for at in self._heard_at.values()):
            return True
        if self._setting_up:
            return False
        places = {position for position, _ in self._seen.values()}
        phases = {phase for _, phase in places}
        together = len(places) == 1 and phases <= {*_ALONE}
        factor = _PATIENT if together or "checkpoint" in phases else 1.0
        limit_s = max(self._timeout_s * factor, _SLOW * self._longest_s)
        return phases != {"done"} and self.silent_s > limit_s

    def positions(self) -> dict[int, Position]:
        """Return the last known position of every rank."""
        return {rank: position for rank, (position, _) in sorted(self._seen.items())}


def behind(positions: Mapping[int, Position], collectives: Mapping[int, int]) -> list[int]:
    """Return the ranks that are furthest behind: by step, phase, and the number of collectives that
    they have started.

    If all are at the same place that is all of them.
    """
    phases = {r: _ORDER.index(p.phase) if p.phase in _ORDER else -1 for r, p in positions.items()}
    keys = {r: (p.step, phases[r], collectives.get(r, 0)) for r, p in positions.items()}
    last = min(keys.values())
    return [rank for rank, key in keys.items() if key == last]

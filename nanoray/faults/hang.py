"""Find the rank that all others wait for: Ray reports a hung actor as alive.

Every rank writes its position (step and phase) to a file and answers the driver's
`Worker.heartbeat` with it. If no rank has moved for `hang_timeout` seconds, the rank furthest
behind is the one that hangs. Only changes count, timed by the driver's clock, so the clocks of
other hosts do not matter. Set-up, and a script's own loop, may take longer than the timeout, but a
rank that answers no heartbeat for twice the timeout is frozen, whatever its phase. While all ranks are in the same
forward, and after a long one, the limit is longer: a step may need more time than the timeout.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from nanoray.faults.progress import LEFT, SCRIPT

# The order within a step. In a pipeline a rank alternates forwards and backwards, and is idle while
# it waits for another stage.
_ORDER = ("data", "forward", "backward", "idle", "optimizer", "log", "eval", "checkpoint", "done")
PATIENT = 10.0  # factor on the timeout while one rank may write files, or all ranks compute
_ALONE = ("data", "forward")  # in these phases no rank waits for another one
_SLOW = 4.0  # factor on the longest forward so far: a backward takes twice as long


class Position(NamedTuple):
    """Where a rank is: the step being computed, or just completed, and its phase."""

    step: int
    phase: str


class Watchdog:
    """Reports when no rank moves any more. While ranks move, an update and a check cost O(1)."""

    def __init__(
        self, ranks: Iterable[int], timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Watch `ranks`. `timeout_s`: seconds without a move; 0 never reports a hang."""
        self._timeout_s = timeout_s
        self._clock = clock
        # Each rank's position, and when it wrote it by its own clock. A long evaluation writes the
        # same position again.
        self._positions: dict[int, tuple[Position, float]] = {}
        self._moved_at = clock()
        self._answered_at = dict.fromkeys(ranks, self._moved_at)  # of running ranks
        self._setting_up = set(self._answered_at)  # ranks that have not begun a step
        self._longest_s = 0.0  # without a move, until a rank ended its forward
        self.silent_s = 0.0

    def update(self, rank: int, position: Position, written_at: float) -> None:
        """Process a heartbeat. `written_at`: when the rank wrote its position, by its own clock."""
        self._answered_at[rank] = self._clock()
        self._set_position(rank, position, written_at)

    def update_from_file(self, rank: int, position: Position, written_at: float) -> None:
        """Process a position from a progress file: a frozen rank cannot send its last one."""
        if rank in self._positions and written_at > self._positions[rank][1]:
            self._set_position(rank, position, written_at)

    def _set_position(self, rank: int, position: Position, written_at: float) -> None:
        before = self._positions.get(rank)
        if before == (position, written_at):
            return  # the rank has not moved
        now = self._clock()
        if before is not None and before[0].phase in _ALONE:
            self._longest_s = max(self._longest_s, now - self._moved_at)
        self._positions[rank] = (position, written_at)
        self._moved_at = now
        if position.phase not in ("init", SCRIPT, *LEFT):
            self._setting_up.discard(rank)

    def ended(self, rank: int) -> None:
        """Expect no more answers from this rank."""
        self._answered_at.pop(rank, None)

    @property
    def quiet(self) -> bool:
        """Whether to read the progress files: no rank has moved for a quarter of the timeout."""
        return 0 < self._timeout_s / 4 < self._clock() - self._moved_at

    def hangs(self) -> bool:
        """Whether no rank has moved for too long; during set-up, whether a rank does not answer."""
        now = self._clock()
        self.silent_s = now - self._moved_at
        if not self._timeout_s or self.silent_s <= self._timeout_s:
            return False
        # A frozen process does not answer, whatever its phase.
        if any(now - at > 2 * self._timeout_s for at in self._answered_at.values()):
            return True
        if self._setting_up:
            return False

        # Allow more time where a rank may write files, and where all ranks compute.
        positions = {position for position, _ in self._positions.values()}
        phases = {position.phase for position in positions}
        together = len(positions) == 1 and phases <= set(_ALONE)
        factor = PATIENT if together or "checkpoint" in phases else 1.0
        limit_s = max(self._timeout_s * factor, _SLOW * self._longest_s)
        return phases != {"done"} and self.silent_s > limit_s

    def positions(self) -> dict[int, Position]:
        """Return the last known position of every rank."""
        return {rank: position for rank, (position, _) in sorted(self._positions.items())}


def behind(positions: Mapping[int, Position], collectives: Mapping[int, int]) -> list[int]:
    """Return the ranks that are furthest behind: by step, phase, and number of started collectives.

    If all are at the same place, these are all ranks.
    """
    progress = {}
    for rank, position in positions.items():
        phase = -1  # set-up comes before all phases of a step
        if position.phase in _ORDER:
            phase = _ORDER.index(position.phase)
        progress[rank] = (position.step, phase, collectives.get(rank, 0))
    least = min(progress.values())
    return [rank for rank in progress if progress[rank] == least]

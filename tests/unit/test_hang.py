"""The watchdog: which rank is behind, and since when no rank has moved. Time is a number that the
test sets.
"""

from __future__ import annotations

import pytest

from nanoray.faults.hang import Position, Watchdog, behind


class Time:
    """A clock that moves only when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("positions", "collectives", "late"),
    [
        ([(5, "backward"), (5, "forward")], {}, [1]),
        ([(5, "backward"), (4, "log"), (5, "forward")], {}, [1]),
        ([(5, "eval"), (5, "log"), (5, "log")], {}, [1, 2]),
        ([(5, "backward"), (5, "backward")], {}, [0, 1]),
        ([(5, "optimizer"), (6, "forward")], {}, [0]),
        ([(5, "data"), (5, "forward")], {}, [0]),
        # It left one out
        ([(5, "backward"), (5, "backward"), (5, "backward")], {0: 813, 1: 812, 2: 813}, [1]),
        ([(5, "backward"), (5, "forward")], {0: 812, 1: 813}, [1]),
    ],
)
def test_which_ranks_are_behind(
    positions: list[tuple[int, str]], collectives: dict[int, int], late: list[int]
) -> None:
    assert (
        behind({rank: Position(*position) for rank, position in enumerate(positions)}, collectives)
        == late
    )


def update(watchdog: Watchdog, *positions: tuple[int, str], written_at: float = 0.0) -> None:
    for rank, position in enumerate(positions):
        watchdog.update(rank, Position(*position), written_at)


def test_silence_is_counted_from_the_last_change() -> None:
    time = Time()
    watchdog = Watchdog(range(2), 30.0, time)
    update(watchdog, (7, "backward"), (7, "forward"))
    assert not watchdog.hangs()
    time.now += 20
    # Same position, written again: progress
    update(watchdog, (7, "backward"), (7, "forward"), written_at=1.0)
    time.now += 20
    update(watchdog, (7, "backward"), (7, "forward"), written_at=1.0)
    assert not watchdog.hangs(), "20 s since the last change"
    time.now += 15
    update(watchdog, (7, "backward"), (7, "forward"), written_at=1.0)  # an answer without a change
    assert watchdog.hangs()
    assert watchdog.positions() == {0: (7, "backward"), 1: (7, "forward")}
    assert watchdog.silent_s == 35
    update(watchdog, (7, "backward"), (7, "data"))
    assert not watchdog.hangs()


@pytest.mark.parametrize("phases", [("init", "forward"), ("done", "done"), ("checkpoint", "log")])
def test_phases_that_may_take_longer(phases: tuple[str, str]) -> None:
    """Start-up has its own timeout, a finished rank does not move, and a checkpoint may take ten
    times as long.
    """
    time = Time()
    watchdog = Watchdog(range(2), 5.0, time)
    for _ in range(3):
        update(watchdog, *((3, phase) for phase in phases))  # answers without a change
        time.now += 6
    assert not watchdog.hangs()


@pytest.mark.parametrize("phase", ["checkpoint", "forward"])
def test_even_those_may_not_take_for_ever(phase: str) -> None:
    time = Time()
    watchdog = Watchdog(range(2), 5.0, time)
    for _ in range(9):
        update(watchdog, (3, phase), (3, phase))
        time.now += 6
    assert watchdog.hangs()


def test_an_honest_forward_may_be_longer_than_the_timeout() -> None:
    """Nobody waits for anybody where all are in one forward; and the backward that follows takes
    twice as long.
    """
    time = Time()
    watchdog = Watchdog(range(2), 5.0, time)
    for position in ((1, "forward"), (1, "backward"), (1, "backward"), (1, "backward")):
        update(watchdog, position, position)
        time.now += 9
        assert not watchdog.hangs(), position
    update(watchdog, (2, "forward"), (1, "backward"))
    time.now += 37
    update(watchdog, (2, "forward"), (1, "backward"))
    assert watchdog.hangs(), "four times 9 s"


def test_a_rank_that_is_behind_in_its_forward_hangs() -> None:
    time = Time()
    watchdog = Watchdog(range(2), 5.0, time)
    update(watchdog, (1, "backward"), (1, "forward"))
    time.now += 6
    update(watchdog, (1, "backward"), (1, "forward"))
    assert watchdog.hangs()


def test_a_position_in_a_file_counts_if_it_is_newer() -> None:
    """A rank that froze in step 15 reported `init` last."""
    time = Time()
    watchdog = Watchdog(range(2), 20.0, time)
    update(watchdog, (0, "init"), (15, "backward"), written_at=5.0)
    assert not watchdog.quiet
    time.now += 6
    assert watchdog.quiet
    watchdog.update_from_file(0, Position(9, "forward"), 4.0)
    assert watchdog.positions()[0] == (0, "init"), "older than what the rank reported itself"
    watchdog.update_from_file(0, Position(15, "forward"), 6.0)
    assert watchdog.positions()[0] == (15, "forward")
    assert not watchdog.quiet, "a newer position in a file is progress"
    time.now += 21
    assert watchdog.hangs()


def test_off_and_before_all_ranks_were_seen() -> None:
    time = Time()
    off, half = Watchdog(range(2), 0.0, time), Watchdog(range(3), 4.0, time)
    for watchdog in (off, half):
        update(watchdog, (3, "forward"), (3, "forward"))
    time.now += 5
    assert not off.hangs()
    assert not half.hangs()


def test_a_loop_of_its_own_may_take_any_time_between_its_steps() -> None:
    time = Time()
    watchdog = Watchdog(range(2), 5.0, time)
    for _ in range(20):
        time.now += 4
        update(watchdog, (7, "script"), (0, "script"))
        assert not watchdog.hangs()


def test_a_rank_that_does_not_answer_is_frozen_in_any_phase() -> None:
    """A rank may set up for long as long as it answers; one that has ended need not answer."""
    time = Time()
    watchdog = Watchdog(range(3), 10.0, time)
    update(watchdog, (0, "init"), (0, "init"))
    watchdog.ended(2)
    for _ in range(5):
        time.now += 6
        update(watchdog, (0, "init"), (0, "init"))
        assert not watchdog.hangs()
    for _ in range(4):
        time.now += 6
        watchdog.update(1, Position(0, "init"), 0.0)
    assert watchdog.hangs()

"""Who is behind, and since when nobody moves."""

from __future__ import annotations

import time

import pytest

from nanoray.watchdog import Position, Watchdog, behind


@pytest.mark.parametrize(
    ("places", "late"),
    [
        ([(5, "backward"), (5, "forward")], [1]),
        ([(5, "backward"), (4, "log"), (5, "forward")], [1]),
        ([(5, "eval"), (5, "log"), (5, "log")], [1, 2]),
        ([(5, "backward"), (5, "backward")], [0, 1]),
        ([(5, "optimizer"), (6, "forward")], [0]),
        ([(5, "data"), (5, "forward")], [1]),
    ],
)
def test_who_is_behind(places: list[tuple[int, str]], late: list[int]) -> None:
    assert behind({rank: Position(*place) for rank, place in enumerate(places)}) == late


def see(dog: Watchdog, *places: tuple[int, str], stamped: float = 0.0) -> None:
    for rank, place in enumerate(places):
        dog.see(rank, Position(*place), stamped)


def test_silence_is_counted_from_the_last_change() -> None:
    dog = Watchdog(range(2), 0.3)
    see(dog, (7, "backward"), (7, "forward"))
    assert not dog.hangs()
    time.sleep(0.2)
    see(dog, (7, "backward"), (7, "forward"), stamped=1.0)  # the same place, stamped again: it lives
    time.sleep(0.2)
    see(dog, (7, "backward"), (7, "forward"), stamped=1.0)
    assert not dog.hangs(), "0.2 s since the last change"
    time.sleep(0.15)
    see(dog, (7, "backward"), (7, "forward"), stamped=1.0)  # an answer, but no news
    assert dog.hangs()
    assert dog.places() == {0: (7, "backward"), 1: (7, "forward")}
    assert dog.silent_s > 0.3
    see(dog, (7, "backward"), (7, "data"))
    assert not dog.hangs()


@pytest.mark.parametrize("phases", [("init", "forward"), ("done", "done"), ("checkpoint", "log")])
def test_phases_in_which_waiting_is_right(phases: tuple[str, str]) -> None:
    """Start-up has a timeout of its own, the end is the end, and writing a checkpoint may take ten times longer."""
    dog = Watchdog(range(2), 0.05)
    for _ in range(3):
        see(dog, *((3, phase) for phase in phases))  # answers, but no news
        time.sleep(0.06)
    assert not dog.hangs()


def test_a_slow_checkpoint_ends_some_time() -> None:
    dog = Watchdog(range(2), 0.02)
    see(dog, (3, "checkpoint"), (3, "checkpoint"))
    time.sleep(0.25)
    assert dog.hangs()


def test_a_stamp_on_the_disk_counts_when_it_is_newer() -> None:
    """A rank that froze in step 15 said last that it was in init."""
    dog = Watchdog(range(2), 0.2)
    see(dog, (0, "init"), (15, "backward"), stamped=5.0)
    assert not dog.quiet
    time.sleep(0.1)
    assert dog.quiet
    dog.reread(0, Position(9, "forward"), 4.0)
    assert dog.places()[0] == (0, "init"), "older than what the rank said itself"
    dog.reread(0, Position(15, "forward"), 6.0)
    assert dog.places()[0] == (15, "forward")
    time.sleep(0.25)
    assert dog.hangs()


def test_off_and_before_all_were_seen() -> None:
    off, half = Watchdog(range(2), 0.0), Watchdog(range(3), 0.04)
    for dog in (off, half):
        see(dog, (3, "forward"), (3, "forward"))
    time.sleep(0.05)
    assert not off.hangs()
    assert not half.hangs()


def test_who_answers_no_more_is_frozen_in_any_phase() -> None:
    """A rank may set up for long as long as it answers; one that is over is not waited for."""
    dog = Watchdog(range(3), 0.1)
    see(dog, (0, "init"), (0, "init"))
    dog.over(2)
    for _ in range(5):
        time.sleep(0.06)
        see(dog, (0, "init"), (0, "init"))
        assert not dog.hangs()
    for _ in range(4):
        time.sleep(0.06)
        dog.see(1, Position(0, "init"), 0.0)
    assert dog.hangs()

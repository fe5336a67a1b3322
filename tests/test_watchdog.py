"""Who is behind, and since when nobody moves."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from nanoray.faults import ProgressStamp
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
    assert behind([Position(*p) for p in places]) == late


@pytest.fixture
def stamps(tmp_path: Path) -> list[ProgressStamp]:
    return [ProgressStamp(tmp_path / f"{rank}.stamp") for rank in (0, 1)]


def watch(tmp_path: Path, timeout_s: float) -> Watchdog:
    return Watchdog([tmp_path / "0.stamp", tmp_path / "1.stamp"], timeout_s)


def test_silence_is_counted_from_the_last_change(tmp_path: Path, stamps: list[ProgressStamp]) -> None:
    dog = watch(tmp_path, 0.3)
    stamps[0].set(7, "backward")
    stamps[1].set(7, "forward")
    assert dog.check() is None
    time.sleep(0.2)
    stamps[0].set(7, "backward")  # the same place, stamped again: it lives
    assert dog.check() is None
    time.sleep(0.2)
    assert dog.check() is None, "0.2 s since the last change"
    time.sleep(0.15)
    assert dog.check() == [(7, "backward"), (7, "forward")]
    assert dog.silent_s > 0.3
    stamps[1].set(7, "data")
    assert dog.check() is None


@pytest.mark.parametrize("phases", [("init", "forward"), ("done", "done"), ("checkpoint", "log")])
def test_phases_in_which_waiting_is_right(tmp_path: Path, stamps: list[ProgressStamp], phases: tuple[str, str]) -> None:
    """Start-up has a timeout of its own, the end is the end, and writing a checkpoint may take ten times longer."""
    dog = watch(tmp_path, 0.05)
    for stamp, phase in zip(stamps, phases, strict=True):
        stamp.set(3, phase)
    dog.check()
    time.sleep(0.15)
    assert dog.check() is None


def test_a_slow_checkpoint_ends_some_time(tmp_path: Path, stamps: list[ProgressStamp]) -> None:
    dog = watch(tmp_path, 0.02)
    stamps[0].set(3, "checkpoint")
    stamps[1].set(3, "checkpoint")
    dog.check()
    time.sleep(0.25)
    assert dog.check() is not None


def test_off_and_without_stamps(tmp_path: Path, stamps: list[ProgressStamp]) -> None:
    for dog in (watch(tmp_path, 0.0), Watchdog([tmp_path / "absent"], 0.01)):
        dog.check()
        time.sleep(0.05)
        assert dog.check() is None

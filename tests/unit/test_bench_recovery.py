"""bench recovery: its arithmetic on made-up records, and which processes it kills."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanoray.bench import recovery
from nanoray.bench.harness.processes import ChildFailed
from nanoray.bench.harness.report import Report
from nanoray.bench.harness.trainings import BenchPlan
from nanoray.bench.killed import (
    Goodput,
    MeasuredFault,
    Standstill,
    TrainingProcess,
    arrivals,
    goodput,
    outage,
    wrong_losses,
)
from nanoray.bench.recovery import REPEATED, STANDSTILL
from nanoray.machine.slots import Slots


def steps(
    attempt: int, first: int, last: int, start: float, each: float = 1.0
) -> dict[tuple[int, int], float]:
    """Records of steps `first` to `last` of an attempt, the first one done at `start`."""
    return {(attempt, step): start + each * (step - first) for step in range(first, last + 1)}


# What records say


def test_a_restart_repeats_what_came_after_its_checkpoint() -> None:
    # Step 27 at 127, step 28 at 142
    done = steps(0, 1, 27, start=101) | steps(1, 21, 40, start=135)
    assert outage(done, killed=127.4) == Standstill(
        pytest.approx(14.6), step=27, repeated=7, end=142
    )
    assert outage(steps(0, 1, 27, start=101) | steps(1, 21, 27, start=135), 127.4) is None, (
        "nothing new yet"
    )
    assert outage(steps(0, 1, 27, start=101), 127.4) is None


def test_a_step_that_survivors_complete_is_no_recovery() -> None:
    """The dead rank's gradients for step 28 had arrived: its record comes after the kill, and then
    nothing does.
    """
    done = steps(0, 1, 28, start=101)
    assert outage(done, killed=127.9) is None
    assert outage(done | steps(1, 29, 40, start=131), killed=127.9) == Standstill(
        pytest.approx(3.1), 28, 0, 131
    )


def test_growing_back_is_another_attempt() -> None:
    done = steps(0, 1, 27, start=101) | steps(1, 28, 30, start=128) | steps(2, 31, 40, start=140)
    assert outage(done, killed=127.5) == Standstill(pytest.approx(0.5), 27, 0, 128)


def test_goodput_counts_the_first_time_only() -> None:
    """10 steps/s without kills; then 40 new steps in 8 s, 10 old ones again (5 of them from
    before), one too late.
    """
    done = steps(0, 1, 20, start=100.05, each=0.1)  # until 102
    done |= steps(0, 21, 25, start=102.05, each=0.1) | steps(1, 16, 60, start=105, each=0.1)
    done |= steps(1, 61, 61, start=110.5)
    found = goodput(done, start=100, begin=102, end=110)
    assert found == Goodput(
        pytest.approx(50.0), useful=40, repeated=10, clean_per_s=pytest.approx(10.0)
    )
    assert goodput(steps(0, 1, 5, start=103), 100, 102, 110) is None, (
        "no step without kills: no yardstick"
    )


def test_losses_are_compared_bit_for_bit_or_nearly() -> None:
    reference = {1: 4.0, 2: 3.0, 3: 2.0}
    assert wrong_losses(reference, reference, 0.0) == 0
    near = reference | {2: 3.0000000001}
    assert (wrong_losses(near, reference, 0.0), wrong_losses(near, reference, 0.02)) == (1, 0)
    assert wrong_losses({1: 4.0, 2: 3.2, 4: 1.0}, reference, 0.02) == 3, (
        "one off, one missing, one too many"
    )


def test_a_plan_of_kills_follows_from_its_seed() -> None:
    plan = arrivals(7, mean_s=10, window_s=10_000, ranks=3)
    assert plan == arrivals(7, 10, 10_000, 3)
    assert plan != arrivals(8, 10, 10_000, 3)
    assert plan[:50] == arrivals(7, 10, plan[50][0], 3), (
        "a longer time has the same kills, and more"
    )
    gaps = [b - a for (a, _), (b, _) in itertools.pairwise(plan)]
    assert len(plan) == pytest.approx(1000, abs=130), "4 standard deviations of a Poisson process"
    assert sum(gap < 10 for gap in gaps) / len(gaps) == pytest.approx(0.632, abs=0.06), "1 - 1/e"
    assert {rank for _, rank in plan} == {0, 1, 2}
    assert all(0 < at < 10_000 for at, _ in plan)


# A run in the making


@pytest.fixture
def run(tmp_path: Path) -> Iterator[TrainingProcess]:
    """A run whose command does nothing; the tests write its files."""
    with TrainingProcess(
        [sys.executable, "-c", "import time; time.sleep(60)"], os.environ, tmp_path / "out", None
    ) as idle:
        (idle.folder / "r" / "logs").mkdir(parents=True)
        yield idle


def test_records_are_followed_over_a_rewrite(run: TrainingProcess) -> None:
    """A restart drops the records after its checkpoint by replacing the file: they were seen, and
    stay known.
    """

    def line(attempt: int, step: int) -> str:
        return (
            json.dumps({"attempt": attempt, "step": step, "time": 100.0 + 10 * attempt + step})
            + "\n"
        )

    path = run.folder / "r" / "metrics.jsonl"
    run.read()
    assert run.step == 0
    old = path.open("w", buffering=1)
    old.write(line(0, 1) + line(0, 2) + line(0, 3)[:9])
    run.read()
    assert run.done == {(0, 1): 101.0, (0, 2): 102.0}, "half a line is not there yet"
    old.write(line(0, 3)[9:] + line(0, 4)[:5])  # killed in the middle of a line
    aside = path.with_suffix(".tmp")
    aside.write_text(line(0, 1) + line(0, 2) + line(1, 3))
    os.replace(aside, path)
    run.read()
    assert run.done == {(0, 1): 101.0, (0, 2): 102.0, (0, 3): 103.0, (1, 3): 113.0}
    old.close()


def test_only_processes_of_the_run_are_killed(run: TrainingProcess) -> None:
    """A log that names a stranger, here the one that runs this test, kills nobody; the run's own
    process it does.
    """
    log = run.folder / "r" / "logs" / "rank0.log"
    assert run.kill(0) is None
    log.write_text(f"INFO attempt 0, pid {os.getpid()}, nice 0\n")
    assert run.kill(0) is None
    log.write_text(
        f"INFO attempt 0, pid {os.getpid()}\nINFO attempt 1, pid {run.child.process.pid}, nice 0\n"
    )
    assert run.kill(0) == pytest.approx(time.time(), abs=5)
    assert run.child.process.wait(5) == -signal.SIGKILL
    assert run.kill(0) is None, "it is dead already"


def test_when_a_launcher_noticed(run: TrainingProcess) -> None:
    killed = time.mktime((2026, 11, 21, 19, 44, 34, 0, 0, -1)) + 0.25
    assert [run.noticed_s(arm, killed) for arm in ("in_place", "torchtrainer", "torchrun")] == [
        None
    ] * 3
    year = time.localtime(killed).tm_year
    assert year == 2026
    run.child.log.write_text(
        "W1121 19:44:30.000000 11 torch/distributed/run.py:1] closing signal of somebody, earlier\n"
        "W1121 19:44:34.506000 11 torch/api.py:1028] Sending process 14109 closing signal SIGTERM\n"
        "E1121 19:44:34.540000 11 torch/api.py:1002] failed (exitcode: -9) local_rank: 1\n"
    )
    assert run.noticed_s("torchrun", killed) == pytest.approx(0.256, abs=1e-3)
    logs = run.folder / "session_2026" / "logs" / "train"
    logs.mkdir(parents=True)
    (logs / "ray-train-app-controller-1.log").write_text(
        '{"asctime": "2026-11-21 19:44:30,000", "message": "Started"}\n'
        '{"asctime": "2026-11-21 19:44:37,250", "message": "[FailurePolicy] RETRY"}\n'
    )
    assert run.noticed_s("torchtrainer", killed) == pytest.approx(3.0, abs=1e-3)
    events = [{"event": "injected", "time": 1.0}, {"event": "fault", "detect_s": 0.02}]
    (run.folder / "r" / "faults.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    assert run.noticed_s("spare", killed) == 0.02


# The command line, and what is printed


def test_the_default_plan_of_kills_has_some() -> None:
    assert 3 <= len(arrivals(1337, 10.0, 45.0, 2)) <= 6


def test_an_interrupted_benchmark_keeps_the_kills_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An arm that has failed reports its error, and none of the kills that it survived."""
    slots = Slots("cpu", (), 2, "ranks on CPUs")
    report = Report("recovery", {"command": "c"})
    plan = BenchPlan(
        argparse.Namespace(kills=5, seed=1), report, ["in_place", "restart"], slots, tmp_path, {}
    )

    def kill_once(plan: BenchPlan, arm: str, turn: int, *_: object) -> MeasuredFault:
        if turn == 2:
            raise KeyboardInterrupt
        if (arm, turn) == ("restart", 1):
            raise ChildFailed("exit code 3")
        return MeasuredFault(turn, 0, 10, 2.0 + turn, 0, 0)

    monkeypatch.setattr(recovery, "_kill_once", kill_once)
    monkeypatch.setattr(recovery, "_train_reference", lambda plan, arms: {})
    with pytest.raises(KeyboardInterrupt):
        recovery._measure_standstills(plan, (10, 20))
    in_place, restart = (report.row(arm, STANDSTILL) for arm in plan.arms)
    assert in_place is not None
    assert in_place.values == (2.0, 3.0)
    assert [kill["round"] for kill in in_place.extra["kills"]] == [0, 1]
    assert restart is not None
    assert (restart.values, restart.error) == ((), "see FAILED below")
    assert restart.extra == {"kills": []}
    assert report.row("restart", REPEATED) is None
    assert report.failures == ["restart: exit code 3"]

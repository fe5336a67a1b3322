"""The driver's decisions on a scripted Ray: which failure is the cause, what is ordered, what
faults.jsonl says.

No process is started and no time passes: see tests/harness/scripted_ray.py. Every order of two
faults is tried.
"""

from __future__ import annotations

import itertools
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from nanoray.errors import ConfigError, PlacementError
from nanoray.faults import exit_record
from nanoray.launch.recovery.cluster_watch import LEAVE_S
from tests.harness.scripted_ray import (
    NOTICE_S,
    RUN_S,
    Actor,
    Ref,
    Run,
    node_id,
)

IN_PLACE_OF_1 = [
    "start 1",
    "go_on 0 as 0/3 attempt 1",
    "run 1 as 1/3 attempt 1",
    "go_on 2 as 2/3 attempt 1",
]
RESTART = [f"start {slot}" for slot in range(3)] + [
    f"run {slot} as {slot}/3 attempt 1" for slot in range(3)
]
WHAT = ("rank", "cause", "recovery", "steps_repeated")


def what(run: Run) -> list[tuple[Any, ...]]:
    return [tuple(report[key] for key in WHAT) for report in run.reports]


def ended_well(outcome: dict[str, Any], reason: str = "finished", world_size: int = 3) -> bool:
    return (outcome["ok"], outcome["exit_reason"], outcome["world_size"]) == (
        True,
        reason,
        world_size,
    )


# One fault.


def test_a_run_without_faults(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert ended_well(run())
    assert run.ray.orders[:3] == ["start 0", "start 1", "start 2"]
    assert run.ray.orders[3:6] == [f"run {slot} as {slot}/3 attempt 0" for slot in range(3)]
    assert (run.causes, run.reports, run.orders) == ([], [], [])


def return_later(run: Run, slot: int, after_s: float | None, result: Any = None) -> None:
    """Let a rank's function go on after `fit` when the others return; with None it never returns."""

    def finish(attempt: int, reason: str) -> None:
        members = run.ray.members
        if not members or members[0].attempt != attempt or not run.ray.healthy:
            return
        for member in members:
            member.write_progress()
            member.phase, member.trains_since = "done", None
            member.write_progress()
            run.ray.saved = member.step
        outcome = {"ok": True, "exit_reason": reason, "world_size": len(members)}
        outcome |= {"step": run.ray.saved}
        for member in members:
            if member.slot != slot:
                member.runs[-1].set(outcome)
            elif after_s is not None:
                run.ray.time.after(after_s, partial(member.runs[-1].set, result or outcome))

    run.ray._finish = finish  # type: ignore[method-assign]


def took_s(run: Run) -> float:
    return run.ray.time.now - run.ray.time.began


@pytest.mark.parametrize("slot", [1, 2])
def test_a_script_of_another_rank_may_go_on_after_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], slot: int
) -> None:
    """It writes results of its own, as under torchrun: no actor is ended before it returns."""
    run = Run(tmp_path, model="own")
    return_later(run, slot, 300.0)
    assert ended_well(run())
    assert took_s(run) > RUN_S + 300
    assert (run.causes, run.reports) == ([], [])
    assert "warning" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "limit_s"), [({}, 600.0), ({"hang_timeout": 5.0}, 50.0), ({"model": "gpt"}, 3.0)]
)
def test_a_script_that_never_returns_holds_the_run_for_a_while_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: dict[str, Any], limit_s: float
) -> None:
    run = Run(tmp_path, **({"model": "own"} | more))
    return_later(run, 1, None)
    assert ended_well(run())
    assert limit_s <= took_s(run) - RUN_S < limit_s + 15
    said = "rank 1 had not returned from the script's function" in capsys.readouterr().out
    assert said is ("model" not in more)


def test_a_killed_rank_is_replaced_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path)
    run.ray.at(10.3, run.ray.die, 1)
    assert ended_well(run())
    assert run.orders == IN_PLACE_OF_1
    assert what(run) == [(1, "killed", "in_place", 0)]
    (report,) = run.reports
    assert (report["step"], report["phase"], report["signal"]) == (11, "backward", "SIGKILL")
    assert (report["attempt"], report["world_size"], report["pid"]) == (0, 3, 1001)
    assert report["detect_s"] == pytest.approx(0.01, abs=0.001)
    assert report["consequences"] == []
    output = capsys.readouterr().out
    assert (
        "failure  rank 1 (pid 1001, node 10.0.0.1) died in backward of step 11: killed by SIGKILL\n"
        in output
    )
    assert "replace  1/3 rank 1 (pid 1003) joins in 2.0 s; no step is repeated\n" in output
    assert "recover  detected in 0.01 s, training again after" in output


def test_a_new_actor_for_which_ray_starts_no_process_is_created_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first time after 20 s, then after 40 s more: a slow process has the time that it needs."""
    run = Run(tmp_path, replace_timeout=300.0)
    run.ray.at(10.2, run.ray.lost_requests.update, {1: 2})
    run.ray.at(10.3, run.ray.die, 1)
    assert ended_well(run())
    again = ["kill 1", "start 1"]
    assert run.orders == ["start 1", *again, *again, *IN_PLACE_OF_1[1:]]
    assert what(run) == [(1, "killed", "in_place", 0)]
    output = capsys.readouterr().out
    assert output.count("room for rank 1 and starts no process there; asking again\n") == 2
    assert re.search(r"rank 1 \(pid 1005\) joins in 6\d\.\d s", output)


@pytest.mark.parametrize(
    ("how", "cause", "title"),
    [
        ("memory", "out_of_memory", "died in backward of step 11: ended by Ray's memory monitor"),
        ("node", "node_lost", "is out of reach in backward of step 11: its node is lost or busy"),
        (
            "dead node",
            "node_lost",
            "is lost in backward of step 11: Ray has lost its node: terminated unexpectedly: "
            "health check failed due to missing too many heartbeats",
        ),
    ],
)
def test_deaths_are_told_apart(tmp_path: Path, how: str, cause: str, title: str) -> None:
    run = Run(tmp_path)
    run.ray.at(10.3, run.ray.die, 1, how=how)
    assert ended_well(run())
    assert what(run) == [(1, cause, "in_place", 0)]
    assert run.reports[0]["title"].endswith(title)


@pytest.mark.parametrize(("frozen", "why"), [(False, "is behind"), (True, "does not answer")])
def test_a_hung_rank_is_ended_and_replaced(tmp_path: Path, frozen: bool, why: str) -> None:
    run = Run(tmp_path)
    run.ray.at(10.3, run.ray.hang, 1, frozen)
    assert ended_well(run())
    assert run.orders == ["kill 1", *IN_PLACE_OF_1]
    assert run.ray.ended_for_certain == [1001], "`ray.kill` alone may leave a frozen process"
    assert what(run) == [(1, "hung", "in_place", 0)]
    (report,) = run.reports
    assert (
        f"made no progress for 60 s in forward of step 11 and {why} (rank 0 in backward of step 11"
        in report["title"]
    )
    assert report["detect_s"] == pytest.approx(60, abs=1.5)


# A driver that was frozen.


def test_ranks_that_ended_while_the_driver_was_frozen_are_no_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They saved before they ended. All start again from there, and nothing is charged."""

    def leave() -> None:
        for slot in run.ray.actors:
            run.ray.die(slot, notice_s=None, how="orphan")

    run = Run(tmp_path, max_failures=0)
    run.ray.at(10.3, leave)
    assert ended_well(run())
    output = capsys.readouterr().out
    assert run.causes == [(0, "driver_silent")]
    assert "no call of this driver reached it for 20 s" in output
    assert "restart  0/0 from the newest checkpoint" in output


def test_refused_is_not_tried_again_and_keeps_its_exit_code(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.ray.at(10.3, run.ray.fail, 1, "refused", "TrainingDiverged: the loss is nan")
    outcome = run()
    assert (outcome["ok"], outcome["exit_code"]) == (False, 5)
    assert "Gave up: restarting cannot cure this. Saved at step 11." in outcome["message"], (
        "by the other ranks"
    )
    assert what(run) == [(1, "refused", "none", None)]
    assert run.orders[-4:] == [
        "stop 0",
        "stop 2",
        "go_on 0 as 0/2 attempt 1",
        "go_on 2 as 1/2 attempt 1",
    ]


def test_a_run_that_cannot_start_ends_at_once(tmp_path: Path) -> None:
    """Nobody holds anything yet, so nobody is waited for."""
    run = Run(tmp_path)
    run.ray.at(0.001, lambda: setattr(run.ray.actors[1], "phase", "init"))
    run.ray.at(0.002, run.ray.fail, 1, "refused", "ConfigError: no such folder", notice_s=None)
    began = run.ray.time.now
    outcome = run()
    assert (outcome["ok"], outcome["exit_code"]) == (False, 5)
    assert "Saved" not in outcome["message"]
    assert run.ray.time.now - began < 3.0


KEPT = "the other ranks keep the state and wait for a new process"


@pytest.mark.parametrize("recovery", ["in_place", "restart"])
def test_ranks_that_keep_the_state_are_spoken_of_where_there_are_some(
    tmp_path: Path, recovery: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path, recovery=recovery)
    run.ray.at(10.3, run.ray.die, 1)
    assert ended_well(run())
    assert (KEPT in capsys.readouterr().out) == (recovery == "in_place")


def test_with_recovery_restart_all_ranks_start_again(tmp_path: Path) -> None:
    run = Run(tmp_path, recovery="restart")
    run.ray.at(10.3, run.ray.die, 1)
    assert ended_well(run())
    assert run.orders == ["kill 0", "kill 2", *RESTART]
    assert what(run) == [(1, "killed", "restart", 10)]
    assert len(run.reports[0]["consequences"]) == 2


def test_an_older_attempt_may_not_write_any_more(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.ray.at(10.3, run.ray.die, 1)
    run()
    assert (tmp_path / "attempt").read_text() == "1 0.0\n"


# Whoever is left saves before a run restarts or ends.


def saved(run: Run) -> bool:
    return run.ray.saved >= 10


@pytest.mark.parametrize("gap_s", [0.5, 30.0, 59.0])
def test_without_a_replacement_the_others_save_before_all_start_again(
    tmp_path: Path, gap_s: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """No capacity: nothing is repeated at the restart, or lost at a stop that comes meanwhile."""
    for stopped in (False, True):
        run = Run(tmp_path / str(stopped))
        run.ray.start_s = 1000.0
        run.ray.at(10.3, run.ray.die, 1)
        run.ray.at(200.0, lambda run=run: setattr(run.ray, "start_s", 2.0))
        asked = run.ray.time.now + 10.3 + gap_s
        if stopped:
            run.ray.at(10.3 + gap_s, run.sigterm)
        outcome = run()
        assert saved(run)
        if stopped:
            assert ended_well(outcome, "stopped", world_size=2)
            assert run.ray.time.now - asked < 3.0
        else:
            assert what(run)[0][2:] == ("restart", 0)
        late = "replace  1/3 no new actor within 60 s" in capsys.readouterr().out
        assert late is not stopped


def test_a_newcomer_that_cannot_work_is_tried_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its node has no shared folder: that says nothing about the run. The second node has one."""
    run = Run(tmp_path)
    run.ray.refusing_starts[1] = 1
    run.ray.at(10.3, run.ray.die, 1)
    assert ended_well(run())
    assert run.causes == [(1, "killed"), (1, "refused")]
    assert what(run)[-1] == (1, "refused", "in_place", 0)
    (_, first, second) = [a for a in run.ray.created if a.slot == 1]
    assert first.avoids == []
    assert second.avoids == [first.facts["node"]]


@pytest.mark.parametrize("recovery", ["in_place", "shrink"])
def test_a_newcomer_that_cannot_work_anywhere(tmp_path: Path, recovery: str) -> None:
    """After three nodes the others go on without it, or save and end with the newcomer's error and
    exit code.
    """
    run = Run(tmp_path, recovery=recovery, max_failures=9)
    run.ray.refusing_starts[1] = 9
    run.ray.at(10.3, run.ray.die, 1)
    outcome = run()
    assert run.causes == [(1, "killed"), *[(1, "refused")] * 3]
    if recovery == "shrink":
        assert ended_well(outcome, world_size=2)
        return
    assert saved(run)
    assert (outcome["ok"], outcome["exit_code"]) == (False, 5)
    assert (
        "no shared folder. Gave up: its replacement could not work on three nodes."
        in outcome["message"]
    )
    assert f"Saved at step {run.ray.saved}." in outcome["message"]


@pytest.mark.parametrize("victim", range(3))
def test_without_a_head_the_others_save(tmp_path: Path, victim: int) -> None:
    run = Run(tmp_path)
    run.ray.at(10.29, run.ray.head.close)
    run.ray.at(10.3, run.ray.die, victim)
    outcome = run()
    assert "Gave up: the cluster's head is gone" in outcome["message"]
    assert saved(run)
    assert not any(order.startswith("start") for order in run.orders)
    assert what(run) == [(victim, "killed", "none", None)]


@pytest.mark.parametrize("second", [0, 2])
@pytest.mark.parametrize("gap_s", [0.001, 0.3])
def test_a_rank_dies_while_the_others_save(tmp_path: Path, second: int, gap_s: float) -> None:
    """The last one saves alone."""
    run = Run(tmp_path)
    run.ray.armed.append(
        ("go_on 2 as 1/2 attempt 1", lambda: run.ray.at(gap_s, run.ray.die, second))
    )
    run.ray.at(10.3, run.ray.fail, 1, "refused", "TrainingDiverged: the loss is nan")
    outcome = run()
    assert saved(run)
    assert outcome["exit_code"] in (1, 5)
    assert "Gave up: restarting cannot cure this. Saved at step" in outcome["message"]


@pytest.mark.parametrize("frozen", [0, 2])
def test_a_rank_that_freezes_before_the_others_save_is_ended(tmp_path: Path, frozen: int) -> None:
    """They would wait for it in their meeting until that times out, and then it is too late."""
    run = Run(tmp_path)
    order = "go_on 2 as 1/2 attempt 1"
    if frozen == 2:
        order = "go_on 0 as 0/2 attempt 1"
    run.ray.armed.append((order, lambda: run.ray.freeze(frozen)))
    run.ray.at(10.3, run.ray.fail, 1, "refused", "TrainingDiverged: the loss is nan")
    began = run.ray.time.now
    outcome = run()
    assert saved(run)
    assert "Gave up: restarting cannot cure this. Saved at step" in outcome["message"]
    assert run.ray.ended_for_certain == [1000 + frozen], "`ray.kill` alone may not end it"
    assert f"rank {frozen} (pid 100{frozen}, node 10.0.0.{frozen}) did not answer for 10 s" in str(
        run.reports
    )
    assert run.ray.time.now - began < 10.3 + 20.0


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_rank_that_was_left_out_saves_for_one_of_its_share(tmp_path: Path, frozen: int) -> None:
    """Slots 0 and 2 hold one half of each layer, 1 and 3 the other: 2 can stand in for 0 only."""
    run = Run(tmp_path, workers=4, tp=2)
    asked = []

    def freeze() -> None:
        run.ray.freeze(frozen)
        run.ray.at(5.0, lambda: asked.append(bool(run.ray.actors[2].sleepers)))

    run.ray.armed.append(("go_on 0 as 0/2 attempt 1", freeze))
    run.ray.at(10.3, run.ray.fail, 3, "refused", "TrainingDiverged: the loss is nan")
    run()
    assert asked == [True], "a rank that is not called for long ends"
    assert saved(run) == (frozen == 0)
    orders_of_2 = [order for order in run.orders if order.startswith("go_on 2 ")]
    assert orders_of_2 == (["go_on 2 as 1/2 attempt 2"] if frozen == 0 else [])


# Two faults, in every order.

PAIRS = list(itertools.permutations(range(3), 2))


@pytest.mark.parametrize(("first", "second"), PAIRS)
@pytest.mark.parametrize(
    "gap_s", [0.0, 0.005, 0.015], ids=["at once", "before the report", "after the report"]
)
def test_two_ranks_die_together(tmp_path: Path, first: int, second: int, gap_s: float) -> None:
    """The first one reported is named, the second is a consequence, and one meeting takes in both."""
    run = Run(tmp_path)
    run.ray.at(10.3, run.ray.die, first)
    run.ray.at(10.3 + gap_s, run.ray.die, second)
    assert ended_well(run())
    left = ({0, 1, 2} - {first, second}).pop()
    assert what(run) == [(first, "killed", "in_place", 0)]
    (consequence,) = run.reports[0]["consequences"]
    assert consequence.startswith(f"rank {second} (pid ")
    assert sorted(run.orders[:2]) == sorted([f"start {first}", f"start {second}"])
    assert run.orders[2:] == [
        f"{'go_on' if slot == left else 'run'} {slot} as {slot}/3 attempt 1" for slot in range(3)
    ]


@pytest.mark.parametrize("recovery", ["in_place", "restart"])
@pytest.mark.parametrize(("victim", "echoes"), PAIRS)
@pytest.mark.parametrize("report_s", [0.001, 0.5], ids=["death first", "consequence first"])
def test_a_lost_peer_is_never_the_cause(
    tmp_path: Path, recovery: str, victim: int, echoes: int, report_s: float
) -> None:
    """A survivor's broken connection may be known before the death that broke it."""
    run = Run(tmp_path, recovery=recovery)
    run.ray.at(10.3, run.ray.die, victim, report_s=report_s)
    run.ray.at(10.32, run.ray.fail, echoes, "peer_lost", "RuntimeError: Connection closed by peer")
    assert ended_well(run())
    assert run.causes == [(victim, "killed")]
    (report,) = run.reports
    assert all("Connection closed by peer" in line for line in report["consequences"])
    assert len(report["consequences"]) == (2 if recovery == "restart" else 1)
    assert report["recovery"] == recovery


@pytest.mark.parametrize("order", [("die", "fail"), ("fail", "die")])
def test_a_death_outranks_an_exception(tmp_path: Path, order: tuple[str, str]) -> None:
    run = Run(tmp_path)
    events = {
        "die": lambda: run.ray.die(2, None),
        "fail": lambda: run.ray.fail(1, "exception", "ValueError: x"),
    }
    for i, name in enumerate(order):
        run.ray.at(10.3 + 0.005 * i, events[name])
    assert ended_well(run())
    assert what(run) == [(2, "killed", "in_place", 0)]
    assert "ValueError: x" in run.reports[0]["consequences"][0]


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_a_newcomer_dies_while_it_is_awaited(tmp_path: Path, first: int, second: int) -> None:
    """Two ranks are lost; one new actor dies twice while it starts. It is started again, and
    nothing is lost.
    """
    run = Run(tmp_path)
    run.ray.failing_starts[second] = 2
    run.ray.at(10.3, run.ray.die, first)
    run.ray.at(10.305, run.ray.die, second)
    assert ended_well(run())
    assert what(run) == [(first, "killed", "in_place", 0)]
    assert run.orders.count(f"start {second}") == 3
    assert run.orders.count(f"start {first}") == 1


@pytest.mark.parametrize(
    ("recovery", "notice_s"), [("in_place", NOTICE_S), ("in_place", 20.0), ("shrink", NOTICE_S)]
)
def test_a_newcomer_that_always_dies(
    tmp_path: Path, recovery: str, notice_s: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """The three tries are used up, also before the others have noticed: a restart, or a smaller
    group.
    """
    run = Run(tmp_path, recovery=recovery)
    run.ray.failing_starts[1] = 6
    if notice_s > NOTICE_S:
        run.ray.on_abort = lambda *_: None  # type: ignore[method-assign]
    run.ray.at(10.3, run.ray.die, 1, notice_s)
    # The newcomers leave records, as processes do that the kernel ends.
    record = {"pid": 1, "signal": "SIGKILL", "oom": True}
    run.ray.at(10.35, lambda: exit_record.write(run.spec.progress(1), record))
    outcome = run()
    output = capsys.readouterr().out
    assert "no new actor within" not in output, "the time for one was not over"
    given_up = (
        "replace  3 new actors for rank 1 died while starting, and no more are started: killed by "
        "the kernel, which was out of memory"
    )
    assert output.count("died while starting") == output.count(given_up) == 1
    if recovery == "in_place":
        assert ended_well(outcome)
        assert run.reports[0]["recovery"] == "restart"
        assert run.orders.count("start 1") == 4, "three tries, and at the restart"
        assert run.reports[0]["steps_repeated"] == 0, "the others had saved"
        return
    assert ended_well(outcome, world_size=2)
    assert what(run) == [(1, "killed", "shrink", 0)]
    assert "shrink   1/3 3 -> 2 rank(s) with the same global batch, until rank 1 is back" in output


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_a_survivor_dies_while_a_replacement_is_awaited(
    tmp_path: Path, first: int, second: int
) -> None:
    """The third rank still holds the state: nothing is repeated, and both deaths are reported."""
    run = Run(tmp_path)
    run.ray.at(10.3, run.ray.die, first)
    run.ray.at(11.3, run.ray.die, second)
    assert ended_well(run())
    assert run.causes == [(first, "killed"), (second, "killed")]
    assert what(run) == [(first, "killed", "", None), (second, "killed", "in_place", 0)]


def test_a_rank_dies_after_another_had_finished(tmp_path: Path) -> None:
    """One rank has ended, so the others cannot form a group of three: all start again."""
    run = Run(tmp_path)
    run.ray.at(
        10.3, lambda: run.ray.actors[2].runs[-1].set({"ok": True, "exit_reason": "finished"})
    )
    run.ray.at(10.4, run.ray.die, 1)
    assert ended_well(run())
    assert [report["recovery"] for report in run.reports] == ["restart"]
    assert not [order for order in run.orders if order.startswith("go_on")]


def test_all_ranks_die(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for slot in (2, 0, 1):
        run.ray.at(10.3, run.ray.die, slot)
    assert ended_well(run())
    assert what(run)[0][2] == "restart"
    assert len(run.reports[0]["consequences"]) == 2


# Orders to abort, where no connection closes.


@pytest.mark.parametrize("victim", range(3))
def test_ranks_that_see_no_error_are_ordered_to_leave_their_group(
    tmp_path: Path, victim: int
) -> None:
    """A node that is cut off: the others wait for the lost rank for ever, and would be ended as
    silent.
    """
    run = Run(tmp_path)
    run.ray.at(10.3, run.ray.die, victim, None)
    assert ended_well(run())
    assert what(run) == [(victim, "killed", "in_place", 0)]
    assert sorted(run.ray.aborts) == [(slot, 0) for slot in range(3) if slot != victim]
    assert run.reports[0]["consequences"] == []
    assert run.reports[0]["recover_s"] < 5.0


@pytest.mark.parametrize(("first", "second"), PAIRS)
@pytest.mark.parametrize(
    "gap_s", [0.0, 0.2, 8.0], ids=["at once", "after the order", "in the next group"]
)
def test_two_ranks_are_cut_off(tmp_path: Path, first: int, second: int, gap_s: float) -> None:
    run = Run(tmp_path)
    run.ray.at(10.3, run.ray.die, first, None)
    run.ray.at(10.3 + gap_s, run.ray.die, second, None)
    assert ended_well(run())
    left = ({0, 1, 2} - {first, second}).pop()
    assert (left, 0) in run.ray.aborts
    assert [report["recovery"] for report in run.reports][-1] == "in_place"
    assert [order for order in run.orders if order.startswith("run")].count(
        f"run {left} as {left}/3 attempt 1"
    ) == 0


def test_an_order_is_repeated_until_it_is_obeyed(tmp_path: Path) -> None:
    """It may come while a rank forms its groups, before there is something to abort."""
    run = Run(tmp_path)
    obey, calls = run.ray.on_abort, list[int]()

    def on_abort(actor: Actor, ref: Ref, attempt: int) -> None:
        calls.append(attempt)
        if len(calls) > 2:
            obey(actor, ref, attempt)

    run.ray.on_abort = on_abort  # type: ignore[method-assign]
    run.ray.at(10.3, run.ray.die, 1, None)
    assert ended_well(run())
    assert what(run) == [(1, "killed", "in_place", 0)]
    assert len(calls) == 4


def test_with_recovery_restart_nobody_is_ordered(tmp_path: Path) -> None:
    run = Run(tmp_path, recovery="restart")
    run.ray.at(10.3, run.ray.die, 1, None)
    assert ended_well(run())
    assert run.ray.aborts == []


# A stop, and a fault.


def test_a_stop_ends_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.ray.at(10.3, run.sigterm)
    outcome = run()
    assert ended_well(outcome, "stopped")
    assert outcome["exit_code"] == 143
    assert run.orders == ["stop 0", "stop 1", "stop 2"]


@pytest.mark.parametrize("victim", range(3))
def test_during_a_stop_no_rank_is_replaced(
    tmp_path: Path, victim: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The ranks that are left form a group of their own and save."""
    run = Run(tmp_path)
    run.ray.at(10.3, run.sigterm)
    run.ray.at(10.6, run.ray.die, victim)
    outcome = run()
    assert ended_well(outcome, "stopped", world_size=2)
    assert outcome["exit_code"] == 143
    assert not any(order.startswith("start") for order in run.orders)
    assert what(run) == [(victim, "killed", "none", 0)]
    assert "save     2 rank(s) are left and hold the run's state" in capsys.readouterr().out


def test_a_stop_while_a_replacement_is_awaited(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.ray.at(10.3, run.ray.die, 1)
    run.ray.at(11.3, run.sigterm)
    outcome = run()
    assert ended_well(outcome, "stopped", world_size=2)
    assert outcome["exit_code"] == 143
    assert run.orders[:3] == ["start 1", "stop 0", "stop 2"], (
        "at once: the new actor is not waited for"
    )


# Drained nodes.


def in_place_of(slot: int, *before: str, attempt: int = 1) -> list[str]:
    """The orders by which a rank leaves with its node, and another one comes."""
    meet = [f"{'run' if s == slot else 'go_on'} {s} as {s}/3 attempt {attempt}" for s in range(3)]
    return [*(f"pause {s}" for s in range(3)), *before, f"kill {slot}", f"start {slot}", *meet]


@pytest.mark.parametrize("slot", range(3))
def test_a_drained_rank_moves_where_there_is_room(
    tmp_path: Path, slot: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """At once: all complete the step, and its replacement goes to another node, without a fault's
    costs.
    """
    run = Run(tmp_path, max_failures=0)
    run.ray.room = 1
    run.ray.at(10.3, run.ray.drain, run.driver, slot)
    assert ended_well(run())
    assert run.orders == in_place_of(slot)
    assert what(run) == [(slot, "drained", "in_place", 0)]
    assert run.ray.actors[slot].avoids == [node_id(slot)]
    output = capsys.readouterr().out
    assert (
        f"drain    node 0000000{slot} (10.0.0.{slot}) with rank {slot} is being drained\n" in output
    )
    assert f"drain    rank {slot} (pid {1000 + slot}, node 10.0.0.{slot}) left after step" in output
    assert "training again after" in output
    assert ", no steps repeated" in output


def test_without_room_a_drained_rank_stays_until_its_node_is_almost_gone(tmp_path: Path) -> None:
    """A new node comes only after the old one: nobody is gained by waiting for it in idleness."""
    run = Run(tmp_path, replace_timeout=5.0)
    run.ray.at(10.3, run.ray.drain, run.driver, 1, 25.0)
    moments: dict[str, float] = {}
    for order in ("pause 1", "run 1 as 1/3 attempt 1"):
        note = partial(lambda order: moments.update({order: took_s(run)}), order)
        run.ray.armed.append((order, note))
    assert ended_well(run())
    assert run.orders == in_place_of(1)
    assert 10.3 + 25.0 - LEAVE_S <= moments["pause 1"] < 10.3 + 25.0 - LEAVE_S + 2.0
    assert moments["run 1 as 1/3 attempt 1"] > 10.3 + 25.0, (
        "in its bundle, which Ray moves when the node is gone"
    )
    assert run.ray.actors[1].avoids == []
    assert what(run) == [(1, "drained", "in_place", 0)]


def test_a_drained_node_that_dies_early_is_a_lost_node(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.ray.at(10.3, run.ray.drain, run.driver, 1, 100.0)
    run.ray.at(20.3, run.ray._take_away, run.driver, node_id(1))
    run.ray.armed.append(("start 1", run.ray.draining.clear))
    assert ended_well(run())
    assert run.orders == IN_PLACE_OF_1
    assert what(run) == [(1, "node_lost", "in_place", 0)]


def test_with_shrink_the_others_train_until_a_drained_ranks_node_is_replaced(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path, recovery="shrink", replace_timeout=0)
    run.ray.at(10.3, run.ray.drain, run.driver, 0, 15.0)
    assert ended_well(run())
    assert run.orders == [
        *("pause 0", "pause 1", "pause 2", "kill 0", "start 0"),
        *("go_on 1 as 0/2 attempt 1", "go_on 2 as 1/2 attempt 1"),
        *("pause 1", "pause 2"),
        *("run 0 as 0/3 attempt 2", "go_on 1 as 1/3 attempt 2", "go_on 2 as 2/3 attempt 2"),
    ]
    assert what(run)[0][:3] == (0, "drained", "shrink")


@pytest.mark.parametrize("recovery", ["in_place", "restart"])
def test_where_no_rank_can_go_on_from_memory_all_save_and_start_again(
    tmp_path: Path, recovery: str
) -> None:
    """All ranks are on drained nodes, or a lost rank would restart all: a notice is time to save."""
    run = Run(tmp_path, recovery=recovery, max_failures=0)
    run.ray.room = 3
    for slot in range(3) if recovery == "in_place" else [2]:
        run.ray.at(10.3, run.ray.drain, run.driver, slot)
    assert ended_well(run())
    orders = [order for order in run.orders if not order.startswith("kill")]
    assert orders == [*(f"stop {slot}" for slot in range(3)), *RESTART]
    (report,) = run.reports
    assert (report["cause"], report["recovery"], report["steps_repeated"]) == (
        "drained",
        "restart",
        0,
    )
    assert run.ray.saved > 10


def test_a_stop_outranks_a_drain(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.ray.room = 3
    run.ray.at(10.3, run.ray.drain, run.driver, 2)
    run.ray.at(10.4, run.sigterm)
    assert ended_well(run(), "stopped")


# Shrink and grow, spares, budgets.


def test_the_group_shrinks_at_once_and_grows_when_the_new_actor_is_ready(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path, recovery="shrink", replace_timeout=0)
    run.ray.at(10.3, run.ray.die, 0)
    assert ended_well(run())
    assert run.orders == [
        "start 0",
        *("go_on 1 as 0/2 attempt 1", "go_on 2 as 1/2 attempt 1"),
        *("pause 1", "pause 2"),
        *("run 0 as 0/3 attempt 2", "go_on 1 as 1/3 attempt 2", "go_on 2 as 2/3 attempt 2"),
    ]
    assert what(run)[0][:3] == (0, "killed", "shrink")
    assert "grow     2 -> 3 ranks; no step is repeated" in capsys.readouterr().out


REPLICAS: dict[str, Any] = {
    "recovery": "shrink",
    "replace_timeout": 0,
    "tp": 2,
    "n_head": 2,
    "n_embd": 32,
}


def test_whole_replicas_shrink_and_grow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """dp 2 x tp 2: rank 1 is lost. Ranks 0 and 3 hold all; rank 2 is no replica and makes room for
    a new process.
    """
    run = Run(tmp_path, 4, **REPLICAS)
    run.ray.at(10.3, run.ray.die, 1)
    assert ended_well(run(), world_size=4)
    assert run.orders == [
        *(
            "start 1",
            "go_on 0 as 0/2 attempt 1",
            "go_on 3 as 1/2 attempt 1",
            "kill 2",
            "start 2",
            "pause 0",
            "pause 3",
        ),
        *(
            "go_on 0 as 0/4 attempt 2",
            "run 1 as 1/4 attempt 2",
            "run 2 as 2/4 attempt 2",
            "go_on 3 as 3/4 attempt 2",
        ),
    ]
    assert what(run) == [(1, "killed", "shrink", 0)]
    output = capsys.readouterr().out
    told = "shrink   1/3 4 -> 2 rank(s) = dp 1 × tp 2 with the same global batch, until rank 1, 2 is back; "
    assert f"{told}rank 2 has no part in that and ends\n" in output
    assert "grow     2 -> 4 ranks; no step is repeated" in output


def test_the_last_replica_is_not_divided(tmp_path: Path) -> None:
    """When one of its ranks is lost, too, its part is gone, and all start again from the newest
    checkpoint.
    """
    run = Run(tmp_path, 4, **REPLICAS)
    run.ray.at(10.3, run.ray.die, 1)
    run.ray.at(11.3, run.ray.die, 3)
    assert ended_well(run(), world_size=4)
    assert [report["recovery"] for report in run.reports] == ["shrink", "restart"]
    assert run.reports[1]["consequences"] == [
        "shares of the state are lost with all that held them: rank 3"
    ]


@pytest.mark.parametrize("config", [{}, {"tp": 3, "n_head": 3, "n_embd": 48}], ids=["ddp", "tp"])
@pytest.mark.parametrize("noticed_by", [(1, 2), (1,)])
def test_ranks_that_run_out_of_memory_meet_again_as_they_are(
    tmp_path: Path, config: dict[str, Any], noticed_by: tuple[int, ...]
) -> None:
    """No rank is lost, so none is replaced, and nothing counts against max_failures. One that does
    not notice is ordered to leave; no other rank needs to have its part of the state.
    """
    run = Run(tmp_path, max_failures=0, **config)
    run.ray.in_place = True
    run.ray.at(10.3, run.ray.run_out_of_memory, 0, noticed_by)
    assert ended_well(run())
    assert run.causes == []
    assert [order for order in run.orders if order.startswith("go_on")] == [
        f"go_on {slot} as {slot}/3 attempt 1" for slot in range(3)
    ]
    assert ((2, 0) in run.ray.aborts) == (2 not in noticed_by)


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_a_spare_takes_the_first_slot_and_a_new_actor_the_second(
    tmp_path: Path, first: int, second: int
) -> None:
    run = Run(tmp_path, spares=1)
    run.ray.at(10.3, run.ray.die, first)
    run.ray.at(10.305, run.ray.die, second)
    assert ended_well(run())
    assert f"spare takes {first}" in run.orders
    assert f"start {second}" in run.orders
    assert what(run) == [(first, "killed", "in_place", 0)], "not all who joined were spares"


def test_an_exception_at_the_same_place_twice_is_deterministic(tmp_path: Path) -> None:
    run = Run(tmp_path, max_failures=9)
    for at in (10.3, 13.3):
        run.ray.at(at, run.ray.fail, 1, "exception", "ValueError: x", step=11)
    outcome = run()
    assert outcome["exit_code"] == 1
    assert "deterministic: it failed 2 times in the same way at the same step" in outcome["message"]
    assert [report["recovery"] for report in run.reports] == ["in_place", "none"]


@pytest.mark.parametrize("gap_s", [8.0, 14.0])
def test_the_budget_of_failures(tmp_path: Path, gap_s: float) -> None:
    """Two at most without ten steps in between: with them it is not used up."""
    run = Run(tmp_path, max_failures=2)
    for n in range(3):
        run.ray.at(10.3 + n * gap_s, run.ray.die, 1)
    outcome = run()
    if gap_s < 10:
        assert "Gave up: max_failures = 2 is exceeded" in outcome["message"]
        assert [report["recovery"] for report in run.reports] == ["in_place", "in_place", "none"]
    else:
        assert ended_well(outcome)


def test_a_rank_that_waits_does_not_hang(tmp_path: Path) -> None:
    """Its phase comes before all others of a step, but it has left its group."""
    run = Run(tmp_path, hang_timeout=20.0)
    run.ray.at(10.3, run.ray.hang, 1)
    for slot in (0, 2):
        run.ray.at(10.4, lambda slot=slot: run.ray.lose_peer(run.ray.actors[slot]))
    assert ended_well(run())
    assert run.causes == [(1, "hung")]
    assert (
        "made no progress for 20 s in forward of step 11 and is behind" in run.reports[0]["title"]
    )
    assert what(run) == [(1, "hung", "in_place", 0)]
    assert run.ray.thrown_away == []


def test_a_fault_after_the_last_checkpoint_changes_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path)
    outcome = {"ok": True, "exit_reason": "finished", "world_size": 3}
    run.ray.at(10.3, lambda: run.ray.actors[0].runs[-1].set(outcome))
    run.ray.at(10.3001, run.ray.die, 1)
    assert ended_well(run())
    assert (run.causes, run.reports) == ([], [])
    assert not [order for order in run.orders if order.startswith("run")]


@pytest.mark.parametrize("slot", range(3))
def test_a_rank_that_dies_in_its_imports_is_named(
    tmp_path: Path, slot: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """All import at once, and the others still do when one of them is killed."""
    run = Run(tmp_path)
    run.ray.imports_s = 4.0
    run.ray.at(1.3, run.ray.die, slot)
    assert ended_well(run())
    # Rank 0 has no store yet in which the others could meet another process.
    assert what(run) == [(slot, "killed", "in_place" if slot else "restart", 0)]
    killed = f"rank {slot} (pid {1000 + slot}, node 10.0.0.{slot}) died in init of step 0"
    assert f"{killed}: killed by SIGKILL" in capsys.readouterr().out


@pytest.mark.parametrize("slot", range(3))
def test_a_rank_that_runs_out_of_memory_in_its_imports_is_named(tmp_path: Path, slot: int) -> None:
    run = Run(tmp_path)
    run.ray.imports_s = 4.0
    run.ray.at(1.3, run.ray.die, slot, how="memory")
    assert ended_well(run())
    assert run.causes == [(slot, "out_of_memory")]


def test_imports_may_take_as_long_as_a_start(tmp_path: Path) -> None:
    """A cold torch on a network's file system, and a limit that allows for it."""
    run = Run(tmp_path, placement_timeout_s=300.0)
    run.ray.imports_s = 200.0
    assert ended_well(run())
    assert run.causes == []


def test_a_stop_is_obeyed_while_ranks_import(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.ray.imports_s = 60.0
    run.ray.at(10.0, run.sigterm)
    outcome = run()
    assert (outcome["ok"], outcome["exit_reason"]) == (True, "stopped")
    assert run.ray.time.now - run.ray.time.began < 11.0


def test_a_rank_that_dies_before_its_imports_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its process has said nothing yet, not even its pid."""
    run = Run(tmp_path)
    starts = run.ray.on_describe

    def describe(actor: Actor, ref: Ref) -> None:
        if actor.slot == 1:
            run.ray.on_describe = starts  # type: ignore[method-assign]
            actor.fail_pending(ActorDiedError())
        else:
            starts(actor, ref)

    run.ray.on_describe = describe  # type: ignore[method-assign]
    assert ended_well(run())
    assert what(run) == [(1, "killed", "restart", 0)]
    assert "failure  rank 1 died while its process started: killed" in capsys.readouterr().out


def test_actors_that_do_not_start(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.ray.on_describe = lambda actor, ref: None  # type: ignore[method-assign]
    with pytest.raises(
        PlacementError, match="the actors did not start within 90 s; look at `ray logs`"
    ):
        run()


@pytest.mark.parametrize("tries", [1, 2, 9])
def test_actors_that_do_not_start_again_are_tried_again(tmp_path: Path, tries: int) -> None:
    """After a fault that nobody survived: what had worked before may work again."""
    run = Run(tmp_path)
    starts, asked = run.ray.on_describe, itertools.count()

    def describe(actor: Actor, ref: Ref) -> None:
        if next(asked) >= 3 * tries:
            starts(actor, ref)

    def lose_all() -> None:
        run.ray.on_describe = describe  # type: ignore[method-assign]
        for slot in range(3):
            run.ray.die(slot)

    run.ray.at(10.3, lose_all)
    outcome = run()
    if tries < 9:
        assert ended_well(outcome)
        assert len(run.reports) == 1 + tries
    else:
        assert not outcome["ok"]
        assert "the actors did not start within 90 s; look at `ray logs`" in outcome["message"]


def test_spares_that_could_never_be_used_are_refused(tmp_path: Path) -> None:
    run = Run(tmp_path, allreduce="ring", spares=1)
    with pytest.raises(
        ConfigError,
        match=r"spares = 1 would be ignored: .* a fault restarts all ranks; drop spares",
    ):
        run()


# A sharded state: each rank's share is in its own memory and in that of the next one.


@pytest.mark.parametrize(("also", "recovery"), [(0, "restart"), (2, "restart"), (3, "in_place")])
def test_a_share_is_lost_with_its_mirror_only(tmp_path: Path, also: int, recovery: str) -> None:
    """Of four ranks 1 and another one are lost together; where nobody holds a share any more,
    nobody waits.
    """
    run = Run(tmp_path, workers=4, dp_mode="zero1")
    for slot in (1, also):
        run.ray.at(10.3, run.ray.die, slot)
    assert ended_well(run(), world_size=4)
    assert [report["recovery"] for report in run.reports] == [recovery]
    said = [line for line in run.reports[0]["consequences"] if "each with its mirror" in line]
    owner, mirror = sorted((1, also))
    wanted = f"shares of the state are lost, each with its mirror: that of rank {owner} with rank {mirror}"
    assert said == ([wanted] if recovery == "restart" else [])


def test_without_mirrors_a_lost_rank_means_a_restart(tmp_path: Path) -> None:
    run = Run(tmp_path, dp_mode="zero1", mirror="off")
    run.ray.at(10.3, run.ray.die, 1)
    assert ended_well(run())
    assert what(run) == [(1, "killed", "restart", 10)]

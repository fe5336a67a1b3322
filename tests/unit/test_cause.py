"""Telling a cause from its consequences, knowing when enough is known, and when to give up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nanoray.faults.cause import (
    BY_KERNEL,
    CAUSES,
    MAX_CONSEQUENCES,
    Failure,
    FailureCollector,
    FaultReport,
    consequences_of,
    how_it_ended,
    read_reports,
    reason_to_give_up,
    without_progress,
)
from nanoray.observe.faults import main, story


def test_a_base_that_is_not_known_yet_says_nothing_of_repeated_steps() -> None:
    """Until its group is built a rank's base is that of another group, or none."""
    recovery = FaultReport(failure(0), [], 0, 1, completed=39)
    assert not recovery.update(40, -1, False)
    assert recovery.base is None
    assert recovery.update(41, 39, False)
    assert not recovery.update(40, -1, True)
    assert recovery.base == 39


def failure(
    rank: int, cause: str = "killed", step: int = 7, phase: str = "backward", **more: object
) -> Failure:
    return Failure(rank, cause, f"rank {rank} {cause}", step, phase, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arrived", "cause"),
    [
        (["peer_lost", "killed"], 1),
        (["peer_lost", "exception", "peer_lost"], 1),
        (["exception", "out_of_memory"], 1),
        (["peer_lost", "peer_lost"], 0),
        (["refused", "peer_lost"], 0),
        (["exception", "node_lost"], 1),
    ],
)
def test_the_cause_is_ranked_over_its_consequences(arrived: list[str], cause: int) -> None:
    collector = FailureCollector(range(len(arrived)), False, 9.0, 1.0)
    for rank, name in enumerate(arrived):
        collector.ended(rank, failure(rank, name), 0.0)
    assert collector.cause.rank == cause


@pytest.mark.parametrize(
    ("first", "second", "cause"),
    [
        # Each: what ended the rank, when, and the signal
        (("exception", 5.0, None), ("killed", 4.9, "SIGKILL"), 1),
        (("exception", 4.9, None), ("killed", 5.0, "SIGABRT"), 0),
        (("exception", 5.0, None), ("killed", 4.9, "SIGABRT"), 1),
        (("killed", 5.0, "SIGKILL"), ("killed", 4.9, "SIGSEGV"), 1),
        (("exception", 4.8, None), ("exception", 4.9, None), 0),
    ],
)
def test_of_equal_failures_the_earliest_is_the_cause(
    first: tuple[str, float, str | None], second: tuple[str, float, str | None], cause: int
) -> None:
    """C++ aborts a rank whose peer has raised an error, so an abort is no more than an exception."""
    collector = FailureCollector(range(2), False, 9.0, 1.0)
    for rank, (name, at, signum) in enumerate((first, second)):
        collector.ended(rank, failure(rank, name, at=at, exit_record={"signal": signum}), 9.0)
    assert collector.cause.rank == cause
    assert [other.rank for other in collector.others] == [1 - cause]


@pytest.mark.parametrize(
    ("record", "cause", "how"),
    [
        ({"signal": "SIGKILL", "oom": True}, "out_of_memory", BY_KERNEL),
        ({"signal": "SIGKILL", "oom": False}, "killed", "killed by SIGKILL"),
        ({"signal": "SIGSEGV"}, "killed", "killed by SIGSEGV, a segmentation fault"),
        ({"exit_code": 3}, "killed", "exited with code 3"),
        ({}, "killed", "killed, or crashed without a Python exception"),
    ],
)
def test_the_end_of_a_process_in_words(record: dict[str, object], cause: str, how: str) -> None:
    assert how_it_ended(record) == (cause, "died", how)


def test_a_program_whose_steps_are_not_known_fails_three_times_alike() -> None:
    alike = [failure(1, "exception", step=0, phase="", signature="KeyError: 'x'")] * 3
    assert reason_to_give_up(alike[1], alike[:2], 9) is None
    reason = "deterministic: it failed 3 times in the same way soon after the start"
    assert reason_to_give_up(alike[2], alike, 9) == reason
    # After a while without a failure it has no signature.
    later = [failure(1, "exception", step=0, phase="")] * 4
    assert reason_to_give_up(later[2], later[:3], 3) is None
    assert reason_to_give_up(later[3], later, 3) == "max_failures = 3 is exceeded"


def test_nothing_is_awaited_once_all_survivors_wait() -> None:
    collector = FailureCollector(range(3), True, 30.0, 1.0)
    collector.ended(1, failure(1), 10.0)
    collector.set_waiting(0, True, 10.0)
    assert not collector.complete(10.1)
    collector.set_waiting(2, True, 10.0)
    assert collector.complete(10.1)
    assert collector.all_waiting
    collector.set_waiting(0, False, 10.0)
    assert not collector.complete(39.9)
    assert collector.complete(40.1), "patience ends"
    assert not collector.all_waiting
    assert collector.first_failure_at == 10.0


def test_a_rank_that_does_not_follow_when_the_group_breaks_is_silent() -> None:
    """No rank failed, but some wait: one that does not wait in time hangs."""
    collector = FailureCollector(range(3), True, 30.0, 1.0)
    collector.set_waiting(0, True, 10.0)
    collector.set_waiting(2, True, 11.0)
    assert not collector.complete(39.0)
    assert collector.complete(40.1)
    assert collector.silent == [1]
    assert not collector.all_waiting
    collector.ended(1, failure(1, "hung"), 40.2)
    assert collector.all_waiting


@pytest.mark.parametrize("waits", [True, False])
def test_in_a_hurry_survivors_have_less_time_to_notice(waits: bool) -> None:
    """While the ranks save, and without a head: those that wait hold the state, so they are never
    given up.
    """
    collector = FailureCollector(range(2), True, 120.0, 1.5)
    collector.hurry(5.0, 9.0)
    assert not collector.complete(20.0), "nothing has happened yet"
    collector.ended(1, failure(1), 21.0)
    collector.hurry(5.0, 22.0)
    assert not collector.complete(25.9)
    if waits:
        collector.set_waiting(0, True, 25.0)
        assert collector.complete(25.1)
        assert collector.all_waiting
    else:
        assert collector.complete(26.1)
        assert collector.silent == [0]


def test_once_rank_0_has_finished_the_others_get_a_moment() -> None:
    collector = FailureCollector(range(2), True, 120.0, 1.5)
    collector.ended(0, None, 10.0)
    collector.rank_0_finished(10.0)
    assert not collector.complete(12.9)
    assert collector.complete(13.1)


def test_a_rank_that_had_finished_cannot_go_on() -> None:
    collector = FailureCollector(range(3), True, 30.0, 1.0)
    collector.ended(2, None, 9.0)
    collector.ended(1, failure(1), 10.0)
    collector.set_waiting(0, True, 10.0)
    assert collector.complete(10.0)
    assert not collector.all_waiting, "one rank has finished, so no group of three can be formed"


def test_without_recovery_in_place_only_consequences_are_awaited() -> None:
    collector = FailureCollector(range(2), False, 30.0, 1.5)
    collector.ended(1, failure(1), 10.0)
    assert not collector.complete(11.4)
    assert collector.complete(11.6)


def test_a_consequence_is_not_named_before_its_root_can_be_known() -> None:
    """A rank that lost its peer says so at once; Ray, on a busy machine, tells seconds later which
    one died.
    """
    collector = FailureCollector(range(3), False, 30.0, 1.5)
    collector.ended(0, failure(0, "peer_lost"), 10.0)
    assert not collector.complete(14.9)
    collector.ended(1, failure(1), 15.0)
    assert not collector.complete(16.4)
    assert collector.complete(16.6)
    assert collector.cause.rank == 1


@pytest.mark.parametrize("live", [False, True])
def test_a_rank_lost_in_a_loop_of_its_own_is_not_replaced(live: bool) -> None:
    """There no rank has a state to keep, unless one joins ranks that train."""
    collector = FailureCollector(range(2), True, 30.0, 1.5, live)
    collector.ended(1, failure(1, phase="script"), 10.0)
    assert collector.complete(11.6) == (not live)
    assert collector.in_place == live


@pytest.mark.parametrize(("phase", "live"), [("init", False), ("init", True), ("forward", False)])
def test_a_refusal_ends_the_wait_only_if_nobody_holds_a_state(phase: str, live: bool) -> None:
    """A run that cannot start ends at once. Later the ranks that are left have something to save."""
    refused = FailureCollector(range(2), True, 30.0, 1.5, live)
    refused.ended(0, failure(0, "refused", retry=False, phase=phase), 10.0)
    assert refused.complete(11.6) == (phase == "init" and not live)
    assert refused.in_place != refused.complete(11.6)


def test_all_ranks_finished_is_the_end() -> None:
    collector = FailureCollector(range(2), True, 30.0, 1.5)
    collector.ended(0, None, 1.0)
    assert not collector.complete(99.0)
    collector.ended(1, None, 2.0)
    assert collector.complete(2.0)
    assert not collector.failures
    assert not collector.all_waiting


def test_completed_steps_follow_from_the_phase() -> None:
    assert failure(0, phase="backward", step=7).completed == 6
    assert failure(0, phase="eval", step=7).completed == 7
    assert failure(0, phase="init", step=0).completed == 0


def test_a_failure_that_repeats_is_deterministic() -> None:
    error = {"signature": "ValueError: x"}
    twice = [failure(1, "exception", **error)] * 2
    assert "deterministic: it failed 2 times" in reason_to_give_up(twice[-1], twice, 9)
    elsewhere = [failure(1, "exception", step=6, **error), failure(1, "exception", **error)]
    assert reason_to_give_up(elsewhere[-1], elsewhere, 9) is None
    killed = [failure(1, signature="killed by SIGSEGV")] * 3
    assert reason_to_give_up(killed[1], killed[:2], 9) is None, (
        "two kills at one place may be chance"
    )
    assert "3 times" in reason_to_give_up(killed[2], killed, 9)
    unknown = [failure(1, "node_lost")] * 5
    assert reason_to_give_up(unknown[-1], unknown, 9) is None, (
        "a lost node says nothing about the program"
    )


def test_other_reasons_to_give_up() -> None:
    one = failure(0)
    assert reason_to_give_up(one, [one], 0).startswith("max_failures = 0 is exceeded")
    assert reason_to_give_up(one, [one], 1) is None
    assert reason_to_give_up(failure(0, retry=False), [one], 9) == "restarting cannot cure this"


def test_the_budget_counts_failures_without_progress() -> None:
    """Four kills in 3,000 steps, each overcome, are no reason to end a run; four within ten steps
    are.
    """
    far = [failure(0, step=step, phase="backward") for step in (100, 700, 1500, 2900)]
    assert without_progress(far) == 1
    assert reason_to_give_up(far[-1], far, 3) is None
    near = [failure(0, step=step, phase="backward") for step in (100, 102, 109, 110)]
    assert without_progress(near) == 4
    reason = reason_to_give_up(near[-1], near, 3)
    assert "max_failures = 3 is exceeded" in reason
    assert "10 steps" in reason
    assert without_progress([*near, failure(0, step=120, phase="backward")]) == 1
    assert without_progress([]) == 0


def test_a_report_is_a_line_and_a_story(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.json").write_text("{}")
    cause = failure(
        1,
        facts={"pid": 42, "node": "n1", "ip": "10.0.0.1", "devices": []},
        exit_record={"signal": "SIGKILL"},
    )
    report = FaultReport(cause, consequences_of([failure(0, "peer_lost")]), attempt=0, world_size=2)
    report.recovery, report.detect_s, report.recover_s, report.steps_repeated = (
        "in_place",
        0.02,
        1.5,
        0,
    )
    report.write(tmp_path)
    (event,) = read_reports(tmp_path)
    assert event["event"] == "fault"
    wanted = {
        "rank": 1,
        "step": 7,
        "phase": "backward",
        "cause": "killed",
        "signal": "SIGKILL",
        "device": "cpu",
    }
    assert {key: event[key] for key in wanted} == wanted
    assert event["consequences"] == ["rank 0 peer_lost"]
    assert main([str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "in_place  detected in 0.02 s, training again after 1.50 s, no steps repeated" in output
    assert "1 fault(s): 1 x in_place; 1.5 s without training, 0 steps repeated" in output
    assert json.loads((tmp_path / "faults.jsonl").read_text())["pid"] == 42


def test_a_run_without_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert story(tmp_path)[-1] == "no rank failed"
    assert main([str(tmp_path)]) == 2
    assert "no run in" in capsys.readouterr().err


def test_every_cause_has_its_rank() -> None:
    assert min(CAUSES, key=lambda cause: -CAUSES[cause]) == "peer_lost"


def test_thousands_of_consequences_are_counted() -> None:
    others = [failure(rank, "peer_lost") for rank in range(1, 4000)]
    lines = consequences_of(others)
    assert lines == [
        *(f"rank {rank} peer_lost" for rank in range(1, MAX_CONSEQUENCES + 1)),
        "and 3,991 more ranks",
    ]
    assert consequences_of(others[:MAX_CONSEQUENCES]) == lines[:MAX_CONSEQUENCES]


def test_a_drain_is_not_charged() -> None:
    """Nodes may be taken away any number of times without a change of the budget."""
    drains = [failure(1, "drained", signature="same") for _ in range(70)]
    assert without_progress(drains) == 0
    assert reason_to_give_up(drains[-1], drains, max_failures=0) is None
    kill = failure(0)
    assert without_progress([*drains, kill]) == 1
    assert reason_to_give_up(kill, [*drains, kill], max_failures=1) is None
    collector = FailureCollector(range(2), False, 9.0, 1.0)
    for rank, cause in enumerate(("drained", "killed")):
        collector.ended(rank, failure(rank, cause), 0.0)
    assert collector.cause.rank == 1

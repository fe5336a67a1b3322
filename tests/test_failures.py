"""The driver's judgement: who failed first, when enough is known, when to give up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nanoray.failures import (
    CAUSES,
    ECHO,
    Failure,
    FaultReport,
    Inquest,
    back_off_s,
    echo_of,
    read_reports,
    why_not,
)
from nanoray.faults_cli import main, story


def failure(rank: int, cause: str = "killed", step: int = 7, phase: str = "backward", **more: object) -> Failure:
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
    inquest = Inquest(range(len(arrived)), False, 9.0, 1.0)
    for rank, name in enumerate(arrived):
        inquest.ended(rank, failure(rank, name), 0.0)
    assert inquest.cause.rank == cause


def test_survivors_that_wait_close_an_inquest() -> None:
    inquest = Inquest(range(3), True, 30.0, 1.0)
    inquest.ended(1, failure(1), 10.0)
    inquest.waits(0, True, 10.0)
    assert not inquest.closed(10.1)
    inquest.waits(2, True, 10.0)
    assert inquest.closed(10.1)
    assert inquest.all_wait
    inquest.waits(0, False, 10.0)
    assert not inquest.closed(39.9)
    assert inquest.closed(40.1), "patience ends"
    assert not inquest.all_wait
    assert inquest.first_news == 10.0


def test_a_rank_that_does_not_follow_when_the_group_breaks_is_silent() -> None:
    """Nobody has failed, and yet ranks wait: whoever does not, hangs."""
    inquest = Inquest(range(3), True, 30.0, 1.0)
    inquest.waits(0, True, 10.0)
    inquest.waits(2, True, 11.0)
    assert not inquest.closed(39.0)
    assert inquest.closed(40.1)
    assert inquest.silent == [1]
    assert not inquest.all_wait
    inquest.ended(1, failure(1, "hung"), 40.2)
    assert inquest.all_wait


def test_with_a_stop_under_way_survivors_are_not_waited_for() -> None:
    inquest = Inquest(range(2), True, 120.0, 1.5)
    inquest.ended(1, failure(1), 10.0)
    inquest.nobody_is_replaced(10.0)
    inquest.waits(0, True, 10.1)
    assert not inquest.closed(11.0)
    assert inquest.closed(11.6)


def test_once_rank_0_is_done_the_others_get_a_moment() -> None:
    inquest = Inquest(range(2), True, 120.0, 1.5)
    inquest.ended(0, None, 10.0)
    inquest.rank_0_is_done(10.0)
    assert not inquest.closed(12.9)
    assert inquest.closed(13.1)


def test_a_rank_that_was_done_cannot_go_on() -> None:
    inquest = Inquest(range(3), True, 30.0, 1.0)
    inquest.ended(2, None, 9.0)
    inquest.ended(1, failure(1), 10.0)
    inquest.waits(0, True, 10.0)
    assert inquest.closed(10.0)
    assert not inquest.all_wait, "with one rank done there is no group of three any more"


def test_without_recovery_in_place_the_echo_is_waited_for_and_no_longer() -> None:
    inquest = Inquest(range(2), False, 30.0, 1.5)
    inquest.ended(1, failure(1), 10.0)
    assert not inquest.closed(11.4)
    assert inquest.closed(11.6)
    refused = Inquest(range(2), True, 30.0, 1.5)
    refused.ended(0, failure(0, "refused", retry=False), 10.0)
    assert refused.closed(11.6), "nobody waits for a replacement of what cannot be cured"


def test_everybody_done_is_the_end() -> None:
    inquest = Inquest(range(2), True, 30.0, 1.5)
    inquest.ended(0, None, 1.0)
    assert not inquest.closed(99.0)
    inquest.ended(1, None, 2.0)
    assert inquest.closed(2.0)
    assert not inquest.failures
    assert not inquest.all_wait


def test_completed_steps_follow_from_the_phase() -> None:
    assert failure(0, phase="backward", step=7).completed == 6
    assert failure(0, phase="eval", step=7).completed == 7
    assert failure(0, phase="init", step=0).completed == 0


def test_what_repeats_itself_is_deterministic() -> None:
    error = {"signature": "ValueError: x"}
    twice = [failure(1, "exception", **error)] * 2
    assert "deterministic: it failed 2 times" in why_not(twice[-1], twice, 9, False)
    elsewhere = [failure(1, "exception", step=6, **error), failure(1, "exception", **error)]
    assert why_not(elsewhere[-1], elsewhere, 9, False) == ""
    killed = [failure(1, signature="killed by SIGSEGV")] * 3
    assert why_not(killed[1], killed[:2], 9, False) == "", "two kills at one place may be chance"
    assert "3 times" in why_not(killed[2], killed, 9, False)
    unknown = [failure(1, "node_lost")] * 5
    assert why_not(unknown[-1], unknown, 9, False) == "", "a lost node says nothing of the program"


def test_other_reasons_to_give_up() -> None:
    one = failure(0)
    assert why_not(one, [one], 0, False) == "max_failures = 0 are used up"
    assert why_not(one, [one], 1, False) == ""
    assert why_not(one, [one], 1, True) == "a stop was asked for"
    assert why_not(failure(0, retry=False), [one], 9, False) == "a restart cannot cure that"


def test_back_off_grows_until_there_is_progress() -> None:
    stuck = [failure(0, step=5)] * 7
    assert [back_off_s(stuck[:n]) for n in range(1, 8)] == [0, 1, 2, 4, 8, 16, 30]
    assert back_off_s([*stuck, failure(0, step=6)]) == 0


def test_a_report_is_a_line_and_a_story(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.json").write_text("{}")
    cause = failure(1, fact={"pid": 42, "node": "n1", "ip": "10.0.0.1", "devices": []}, death={"signal": "SIGKILL"})
    report = FaultReport.of(cause, [failure(0, "peer_lost")], attempt=0, world_size=2)
    report.recovery, report.detect_s, report.recover_s, report.steps_repeated = "in_place", 0.02, 1.5, 0
    report.write(tmp_path)
    (event,) = read_reports(tmp_path)
    assert event["event"] == "fault"
    wanted = {"rank": 1, "step": 7, "phase": "backward", "cause": "killed", "signal": "SIGKILL", "device": "cpu"}
    assert {key: event[key] for key in wanted} == wanted
    assert event["echo"] == ["rank 0 peer_lost"]
    assert main([str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "in_place  detected in 0.02 s, training again after 1.50 s, no steps repeated" in told
    assert "1 fault(s): 1 x in_place; 1.5 s without training, 0 steps repeated" in told
    assert json.loads((tmp_path / "faults.jsonl").read_text())["pid"] == 42


def test_a_run_without_faults_has_no_story(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert story(tmp_path)[-1] == "no rank failed"
    assert main([str(tmp_path)]) == 2
    assert "no run in" in capsys.readouterr().err


def test_every_cause_has_its_rank() -> None:
    assert min(CAUSES, key=lambda cause: -CAUSES[cause]) == "peer_lost"


def test_thousands_of_consequences_are_counted() -> None:
    others = [failure(rank, "peer_lost") for rank in range(1, 4000)]
    echo = FaultReport.of(failure(0), others, attempt=0, world_size=4000).echo
    assert echo == [*(f"rank {rank} peer_lost" for rank in range(1, ECHO + 1)), "and 3,991 more ranks"]
    assert echo_of(others[:ECHO]) == echo[:ECHO]

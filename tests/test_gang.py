"""The benchmarks' ranks: real processes, actors and torchrun; deaths, exceptions and interruptions of each."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from nanoray.bench.gang import Gang, RankFailed, Where, describe
from nanoray.bench.processes import session_members
from nanoray.bench.report import Report

ROOT = Path(__file__).resolve().parent.parent
HERE = "tests.test_gang"


# What the ranks run


def add_up(mesh: Any, order: dict[str, Any], emit: Any) -> None:
    """Emit the sum of ranks + 1 as often as asked; ranks that emit besides rank 0 must not be heard."""
    import torch

    for i in range(order["times"]):
        total = mesh.all_reduce(torch.tensor([mesh.rank + 1.0]))
        emit({"i": i, "rank": mesh.rank, "sum": total.item(), "threads": torch.get_num_threads()})
    print("this goes to the log, not between the answers")


def break_down(mesh: Any, order: dict[str, Any], emit: Any) -> None:
    """Let one rank end in the way asked for, while the others wait for it in a collective."""
    import torch

    mesh.all_reduce(torch.ones(1))
    emit({"before": True})
    if mesh.rank == order["rank"]:
        print("the last words of this rank", file=sys.stderr, flush=True)
        if order["how"] == "raise":
            raise ValueError("a value that is wrong")
        os._exit(7) if order["how"] == "exit" else os.kill(os.getpid(), signal.SIGKILL)
    mesh.all_reduce(torch.ones(1))


def hang(mesh: Any, order: dict[str, Any], emit: Any) -> None:
    emit({"pids": mesh.gather(os.getpid())})
    time.sleep(600)


def no_such_op(mesh: Any, order: dict[str, Any], emit: Any) -> None:
    """Fail alike on all ranks, as a peer's death does."""
    raise RuntimeError("Connection closed by peer [127.0.0.1]:1234")


# Processes


def test_a_gang_lives_over_several_calls() -> None:
    with Gang(Where(2, device="cpu")) as gang:
        first = list(gang.run(f"{HERE}:add_up", {"times": 3}))
        second = list(gang.run(f"{HERE}:add_up", {"times": 1}))
        facts, report = gang.facts, Report("b", {})
        describe(report, gang)
        pids = [f["pid"] for f in facts]
    assert [(e["i"], e["rank"], e["sum"]) for e in first] == [(0, 0, 3.0), (1, 0, 3.0), (2, 0, 3.0)]
    assert len(second) == 1
    assert first[0]["threads"] == facts[0]["threads"]
    assert [f["rank"] for f in facts] == [0, 1]
    assert {"rank", "host", "pid", "device", "name", "uuid", "threads"} == facts[0].keys()
    assert (gang.backend, gang.backend_reason, gang.nccl) == ("gloo", "CPU ranks", None)
    assert report.conditions["ranks"]["world size"] == 2
    assert report.conditions["ranks"]["on hosts"] == "1 (2)"
    assert report.conditions["backend"] == "gloo (CPU ranks)"
    assert not any(session_members(pid) for pid in pids)


def test_one_rank_needs_no_group() -> None:
    with Gang(Where(1, device="cpu")) as gang:
        assert [e["sum"] for e in gang.run(f"{HERE}:add_up", {"times": 1})] == [1.0]
        assert gang.backend == "none"


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("kill", "it was ended by SIGKILL\n"),
        ("exit", "it ended with exit code 7\n"),
        ("raise", "ValueError: a value that is wrong\n"),
    ],
)
def test_the_rank_that_broke_is_named_and_not_its_peers(how: str, words: str) -> None:
    events = []
    with Gang(Where(2, device="cpu", timeout_s=30)) as gang:
        pids = [f["pid"] for f in gang.facts]
        with pytest.raises(RankFailed) as caught:
            events += gang.run(f"{HERE}:break_down", {"rank": 1, "how": how})
    message = str(caught.value)
    assert caught.value.rank == 1
    assert message.startswith(f"rank 1 (pid {pids[1]}, cpu) in {HERE}:break_down: {words}")
    assert how == "raise" or "the last words of this rank" in message
    assert not any(session_members(pid) for pid in pids)


def test_events_before_the_failure_arrive() -> None:
    seen = []
    with Gang(Where(2, device="cpu", timeout_s=30)) as gang, pytest.raises(RankFailed):
        for event in gang.run(f"{HERE}:break_down", {"rank": 1, "how": "kill"}):
            seen.append(event)
    assert seen == [{"before": True}]

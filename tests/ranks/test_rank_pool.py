"""The benchmarks' ranks as processes: deaths, exceptions and interrupts."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nanoray.bench.harness.rank_pool import (
    RankFailed,
    RankPool,
    Where,
    add_where_flags,
    describe,
    where_from,
)
from nanoray.bench.harness.report import Report
from nanoray.errors import ConfigError, PlacementError
from nanoray.machine.proc import session_members
from tests.harness.commands import Command, wait_for

ROOT = Path(__file__).resolve().parents[2]
HERE = "tests.ranks.test_rank_pool"


# What the ranks run


def add_up(mesh: Any, order: dict[str, Any], emit: Any) -> None:
    """Emit the sum of ranks + 1 as often as asked; ranks that emit besides rank 0 must not be
    heard.
    """
    import torch

    for i in range(order["times"]):
        total = mesh.all_reduce(torch.tensor([mesh.rank + 1.0]), "test")
        emit({"i": i, "rank": mesh.rank, "sum": total.item(), "threads": torch.get_num_threads()})
    print("this goes to the log, not between the answers")


def break_down(mesh: Any, order: dict[str, Any], emit: Any) -> None:
    """Let one rank end in the way asked for, while the others wait for it in a collective."""
    import torch

    emit({"before": True})
    mesh.all_reduce(torch.ones(1), "test")  # rank 0 has said it before another rank ends
    if mesh.rank == order["rank"]:
        print("the last words of this rank", file=sys.stderr, flush=True)
        if order["how"] == "raise":
            raise ValueError("a value that is wrong")
        os.kill(os.getpid(), signal.SIGKILL)
    mesh.all_reduce(torch.ones(1), "test")


def hang(mesh: Any, order: dict[str, Any], emit: Any) -> None:
    time.sleep(600)


def lose_a_peer(mesh: Any, order: dict[str, Any], emit: Any) -> None:
    raise RuntimeError("Connection closed by peer [127.0.0.1]:1234")


def counting(mesh: Any, order: dict[str, Any]) -> Any:
    """Return a function that counts on from a number."""
    count = order["from"]

    def add(mesh: Any, order: dict[str, Any], emit: Any) -> None:
        nonlocal count
        count += order["by"]
        emit({"count": count})

    return add


# Processes


def test_a_pool_lives_over_several_calls_until_a_rank_raises() -> None:
    with RankPool(Where(2, device="cpu", timeout_s=30)) as pool:
        first = list(pool.run(f"{HERE}:add_up", {"times": 3}))
        second = list(pool.run(f"{HERE}:add_up", {"times": 1}))
        facts, report = pool.facts, Report("b", {})
        describe(report, pool)
        pids = [f["pid"] for f in facts]
        with pytest.raises(RankFailed) as caught:
            list(pool.run(f"{HERE}:break_down", {"rank": 1, "how": "raise"}))
    assert [(e["i"], e["rank"], e["sum"]) for e in first] == [(0, 0, 3.0), (1, 0, 3.0), (2, 0, 3.0)]
    assert len(second) == 1
    assert first[0]["threads"] == facts[0]["threads"]
    assert [f["rank"] for f in facts] == [0, 1]
    assert {"rank", "host", "pid", "device", "name", "uuid", "sms", "threads"} == facts[0].keys()
    assert (pool.backend, pool.backend_reason, pool.nccl) == ("gloo", "CPU ranks", None)
    assert report.conditions["ranks"]["world size"] == 2
    assert report.conditions["ranks"]["on hosts"] == "1 (2)"
    assert report.conditions["backend"] == "gloo (CPU ranks)"
    assert caught.value.rank == 1
    told = f"rank 1 (pid {pids[1]}, cpu) in {HERE}:break_down: ValueError: a value that is wrong\n"
    assert str(caught.value).startswith(told)
    assert not any(session_members(pid) for pid in pids)


def test_the_rank_that_was_killed_is_named_and_not_its_peer() -> None:
    events = []
    with RankPool(Where(2, device="cpu", timeout_s=30)) as pool:
        pids = [f["pid"] for f in pool.facts]
        with pytest.raises(RankFailed) as caught:
            events.extend(pool.run(f"{HERE}:break_down", {"rank": 1, "how": "kill"}))
    message = str(caught.value)
    assert events == [{"before": True}]  # what came before the failure is not lost
    assert caught.value.rank == 1
    assert message.startswith(
        f"rank 1 (pid {pids[1]}, cpu) in {HERE}:break_down: it was ended by SIGKILL\n"
    )
    assert "the last words of this rank" in message
    assert not any(session_members(pid) for pid in pids)


def test_one_rank_needs_no_group(pools: Any) -> None:
    assert [e["sum"] for e in pools(1).run(f"{HERE}:add_up", {"times": 1})] == [1.0]
    assert pools(1).backend == "none"


def test_ranks_keep_a_function_between_two_calls(pools: Any) -> None:
    pools(1).keep(f"{HERE}:counting", {"from": 3})
    counts = [event["count"] for by in (1, 10) for event in pools(1).run_kept({"by": by})]
    assert counts == [4, 14]


def test_a_broken_collective_without_a_better_cause_is_told_as_it_is(pools: Any) -> None:
    with pytest.raises(RankFailed, match="RuntimeError: Connection closed by peer"):
        list(pools(1).run(f"{HERE}:lose_a_peer", {}))


def test_silence_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanoray.bench.harness.rank_pool.GRACE_S", 0.5)
    with RankPool(Where(1, device="cpu", timeout_s=0.5)) as pool:
        with pytest.raises(
            RankFailed, match=r"no sign of rank 0 for 1 s in .*:hang; raise --timeout_s"
        ):
            list(pool.run(f"{HERE}:hang", {}))
        with pytest.raises(RuntimeError, match=r"still busy with .*:hang"):
            list(pool.run(f"{HERE}:add_up", {"times": 1}))


# What is refused before anything starts


def parse(*argv: str, least: int = 1) -> Where:
    parser = argparse.ArgumentParser()
    add_where_flags(parser, cpu_workers=3)
    return where_from(parser.parse_args(list(argv)), least)


def test_flags_become_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanoray.bench.harness.rank_pool.discover_gpus", lambda: [])
    assert parse() == Where(3)
    assert parse("--workers", "2", "--backend", "gloo", "--timeout_s", "9") == Where(
        2, backend="gloo", timeout_s=9.0
    )
    assert parse("--ray_address", "local") == Where(3, "ray", ray_address="local")
    assert parse("--share_devices").shared


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--workers", "0"), r"workers = 0, timeout_s = 600; both must be above 0"),
        (("--timeout_s", "0"), r"workers = None, timeout_s = 0; both must be above 0"),
        (
            ("--ray_address", "local", "--share_devices"),
            r"share_devices, but ray starts the ranks; only those of this command",
        ),
        (("--workers", "1"), r"workers = 1; 2 or more are needed, which communicate"),
        (
            ("--ray_address", "10.0.0.1:6379"),
            r"how many ranks\? .* give --workers N",
        ),
    ],
)
def test_wrong_flags(argv: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(*argv, least=2)


def test_what_cannot_be_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="backend = nccl, but ranks run on CPU"):
        RankPool(Where(2, device="cpu", backend="nccl"))
    with pytest.raises(PlacementError, match="asked: 100000 ranks on CPU"):
        RankPool(Where(100_000, device="cpu"))


# From the command line: Ctrl-C


def children_of(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rsplit(") ", 1)[1].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return found


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    env = os.environ | {"TMPDIR": str(tmp_path)}
    flags = ("communication", "collectives", "--device", "cpu", "--workers", "2")
    with Command("nanoray.bench", *flags, env=env, apart=True) as process:
        wait_for(lambda: "\n" in process.errors, process=process)
        assert "all_reduce float32 1024 B in place  ok" in process.errors.splitlines()[0]
        ranks = children_of(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.wait(200) == 128 + signal.SIGINT, process.errors
    assert len(ranks) == 2
    assert not any(session_members(rank) for rank in ranks)
    assert not list(tmp_path.glob("nanoray-pool-*"))


def test_what_is_told_of_ranks_on_two_hosts() -> None:
    facts = [
        {"host": host, "device": "cpu", "name": "x", "uuid": "", "threads": 1} for host in "aab"
    ]
    shown = Report("b", {})
    pool: Any = SimpleNamespace(
        facts=facts, where=Where(3, "ray"), backend="gloo", backend_reason="", nccl=None
    )
    describe(shown, pool)
    assert (shown.conditions["ranks"]["started by"], shown.conditions["ranks"]["on hosts"]) == (
        "ray",
        "2 (2 + 1)",
    )

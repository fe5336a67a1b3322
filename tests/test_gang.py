"""The benchmarks' ranks: real processes, actors and torchrun; deaths, exceptions and interruptions of each."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from nanoray.bench.gang import Gang, RankFailed, Where, add_where_flags, describe, where_from
from nanoray.bench.processes import session_members
from nanoray.bench.report import Report
from nanoray.errors import ConfigError, PlacementError
from tests.cluster import end_session, free_port, in_driver, no_actors_left, ray_head, wait_for

ROOT = Path(__file__).resolve().parent.parent
HERE = "tests.test_gang"


# What the ranks run


def add_up(mesh: Any, order: dict[str, Any], emit: Any) -> None:
    """Emit the sum of ranks + 1 as often as asked; ranks that emit besides rank 0 must not be heard."""
    import torch

    for i in range(order["times"]):
        total = mesh.all_reduce(torch.tensor([mesh.rank + 1.0]), "test")
        emit({"i": i, "rank": mesh.rank, "sum": total.item(), "threads": torch.get_num_threads()})
    print("this goes to the log, not between the answers")


def break_down(mesh: Any, order: dict[str, Any], emit: Any) -> None:
    """Let one rank end in the way asked for, while the others wait for it in a collective."""
    import torch

    mesh.all_reduce(torch.ones(1), "test")
    emit({"before": True})
    if mesh.rank == order["rank"]:
        print("the last words of this rank", file=sys.stderr, flush=True)
        if order["how"] == "raise":
            raise ValueError("a value that is wrong")
        os._exit(7) if order["how"] == "exit" else os.kill(os.getpid(), signal.SIGKILL)
    mesh.all_reduce(torch.ones(1), "test")


def hang(mesh: Any, order: dict[str, Any], emit: Any) -> None:
    time.sleep(600)


def lose_a_peer(mesh: Any, order: dict[str, Any], emit: Any) -> None:
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
            events.extend(gang.run(f"{HERE}:break_down", {"rank": 1, "how": how}))
    message = str(caught.value)
    assert events == [{"before": True}]  # what came before the failure is not lost
    assert caught.value.rank == 1
    assert message.startswith(f"rank 1 (pid {pids[1]}, cpu) in {HERE}:break_down: {words}")
    assert how == "raise" or "the last words of this rank" in message
    assert not any(session_members(pid) for pid in pids)


def test_a_broken_collective_without_a_better_cause_is_told_as_it_is() -> None:
    with (
        Gang(Where(1, device="cpu")) as gang,
        pytest.raises(RankFailed, match="RuntimeError: Connection closed by peer"),
    ):
        list(gang.run(f"{HERE}:lose_a_peer", {}))


def test_silence_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanoray.bench.gang.GRACE_S", 0.5)
    with Gang(Where(1, device="cpu", timeout_s=0.5)) as gang:
        with pytest.raises(RankFailed, match=r"no sign of rank 0 for 1 s in .*:hang; raise --timeout_s"):
            list(gang.run(f"{HERE}:hang", {}))
        with pytest.raises(RuntimeError, match=r"still busy with .*:hang"):
            list(gang.run(f"{HERE}:add_up", {"times": 1}))


# What is refused before anything starts


def parse(*argv: str) -> Where:
    parser = argparse.ArgumentParser()
    add_where_flags(parser, cpu_workers=3)
    return where_from(parser.parse_args(list(argv)))


def test_flags_become_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanoray.bench.gang.discover_gpus", lambda: [])
    assert parse() == Where(3)
    assert parse("--workers", "2", "--backend", "gloo", "--timeout_s", "9") == Where(2, backend="gloo", timeout_s=9.0)
    assert parse("--launcher", "ray", "--ray_address", "local").workers == 3
    torchrun = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for key, value in torchrun.items():
        monkeypatch.setenv(key, value)
    assert parse() == parse("--workers", "4") == Where(4, "torchrun")
    for argv, message in (
        (("--workers", "2"), "workers = 2, but torchrun started 4; drop --workers"),
        (("--launcher", "processes"), "launcher = processes, RANK = 1; every rank of torchrun would start ranks"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse(*argv)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--workers", "0"), r"workers = 0, timeout_s = 600; both must be above 0"),
        (("--timeout_s", "0"), r"workers = None, timeout_s = 0; both must be above 0"),
        (("--launcher", "torchrun"), r"launcher = torchrun, RANK = not set; start it as `torchrun --nproc-per-node N"),
        (("--launcher", "ray", "--ray_address", "10.0.0.1:6379"), r"how many ranks\? .* give --workers N"),
    ],
)
def test_wrong_flags(argv: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(*argv)


def test_what_cannot_be_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="backend = nccl, but ranks run on CPU"):
        Gang(Where(2, device="cpu", backend="nccl"))
    with pytest.raises(PlacementError, match="asked: 100000 ranks on CPU"):
        Gang(Where(100_000, device="cpu"))


# From the command line: Ctrl-C, torchrun, Ray


def bench(*flags: str, launcher: tuple[str, ...] = ()) -> list[str]:
    return [sys.executable, *launcher, "-m", "nanoray.bench", "collectives", "--device", "cpu", *flags]


def children_of(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rsplit(") ", 1)[1].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return found


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    env = os.environ | {"TMPDIR": str(tmp_path)}
    process = subprocess.Popen(bench("--workers", "2"), cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert "all_reduce float32 1024 B in place  ok" in process.stderr.readline()
    ranks = children_of(process.pid)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGINT, err
    assert len(ranks) == 2
    assert not any(session_members(rank) for rank in ranks)
    assert not list(tmp_path.glob("nanoray-gang-*"))


TINY = ("--quick", "--max_bytes", "1024", "--ops", "all_reduce,broadcast", "--dtypes", "float32")


def checked(path: Path, ranks: int) -> dict[str, Any]:
    """Return the conditions of a tiny run in which everything came out right."""
    report = json.loads(path.read_text())
    rows = [r for r in report["rows"] if "op" in r]
    assert [(r["op"], r["ranks"], r["wrong"]) for r in rows] == [("all_reduce", ranks, 0), ("broadcast", ranks, 0)]
    assert report["ok"]
    return report["conditions"]


def test_under_torchrun_every_process_is_a_rank_and_one_speaks(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}")
    command = bench(*TINY, "--json", str(tmp_path / "c.json"), launcher=torchrun)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("# all_reduce") == 1
    assert checked(tmp_path / "c.json", 2)["ranks"]["started by"] == "torchrun"


BREAKS = """
import sys
from nanoray.bench import collectives
from nanoray.bench.__main__ import main
collectives.ENTRY = "tests.test_gang:break_rank_1"
sys.exit(main(sys.argv[1:]))
"""


def break_rank_1(mesh: Any, order: dict[str, Any], emit: Any) -> None:
    """Raise on rank 1 only, when nobody waits for it: rank 0 never learns."""
    if mesh.rank == 1:
        raise ValueError("a value that is wrong")


def test_under_torchrun_a_rank_that_broke_says_so(tmp_path: Path) -> None:
    (tmp_path / "breaks.py").write_text(BREAKS)
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    command = [sys.executable, *torchrun, str(tmp_path / "breaks.py"), "collectives", "--device", "cpu", *TINY]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    told = rf"^rank 1: rank 1 \(pid \d+, cpu\) in {HERE}:break_rank_1: ValueError: a value that is wrong$"
    assert re.search(told, done.stderr, re.MULTILINE), done.stderr


def test_on_two_nodes_of_a_ray_cluster(tmp_path: Path) -> None:
    """One CPU each: the two ranks are on different nodes."""
    with ray_head("--num-cpus=1") as cluster:
        join = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={cluster.address}", "--block"]
        node = subprocess.Popen(
            [*join, "--num-cpus=1"], env=cluster.env, stdout=subprocess.DEVNULL, start_new_session=True
        )
        try:
            wait_for(lambda: len(in_driver(cluster, "print(json.dumps(list(ray.nodes())))")) == 2, 30)
            flags = ["--launcher", "ray", "--workers", "2", "--json", str(tmp_path / "c.json")]
            done = subprocess.run(
                bench(*TINY, *flags), cwd=ROOT, env=cluster.env, capture_output=True, text=True, timeout=120
            )
            assert done.returncode == 0, done.stderr
            told = checked(tmp_path / "c.json", 2)
            assert (told["ranks"]["started by"], told["ranks"]["on hosts"]) == ("ray", "2 (1 + 1)")
            assert done.stdout.splitlines()[-1].startswith("OK  3 rows")
            death = in_driver(cluster, RAY_DEATH)
            assert death[0] == [{"before": True}]
            assert death[1] == 1
            assert "break_down: its actor is gone: " in death[2]
            assert no_actors_left(cluster)
        finally:
            end_session(node)


RAY_DEATH = """
from nanoray.bench.gang import Gang, RankFailed, Where
ray.shutdown()
events = []
with Gang(Where(2, "ray", "cpu", timeout_s=60)) as gang:
    try:
        for event in gang.run("tests.test_gang:break_down", {"rank": 1, "how": "kill"}):
            events.append(event)
    except RankFailed as failed:
        found = [events, failed.rank, str(failed)]
print(json.dumps(found))
"""


def test_a_local_ray_leaves_nothing(tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | {"HOME": str(tmp_path)}
    flags = ["--launcher", "ray", "--ray_address", "local", "--workers", "2", "--json", str(tmp_path / "c.json")]
    before = set(Path("/tmp").glob("nanoray-*"))
    done = subprocess.run(bench(*TINY, *flags), cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not done.stdout.startswith("ray ")  # stdout is the report's
    assert checked(tmp_path / "c.json", 2)["ranks"]["on hosts"] == "1 (2)"
    assert not {p for p in Path("/tmp").glob("nanoray-*") if p not in before and "gang" not in p.name}

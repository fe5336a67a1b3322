"""All ranks' notes together: hand-worked steps, a planted straggler, and their picture."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanoray.bench.harness.rank_pool import RankPool, Where
from nanoray.checkpoint.run_folder import RunSpec
from nanoray.observe.trace.__main__ import main, read_steps
from nanoray.observe.trace.comm_log import LATE_TIMES, CommLog, Totals, merge
from nanoray.observe.trace.costs import ClockOffset
from nanoray.observe.trace.recorder import CommRecorder
from nanoray.observe.trace.timeline import newest_window
from nanoray.observe.watch.tracing import Tracing
from nanoray.parallel.mesh import Mesh
from nanoray.train.report import comm_lines
from tests.harness.ranks import make_spec, run_ranks, series


def notes(shift: float, ready: float, **more: Any) -> dict[str, Any]:
    """One rank's step: forward to 10 ms, backward to 20, optimizer to 22; a bucket and a loss."""

    def at(ms: float) -> float:
        return 100.0 + (shift + ms) / 1e3

    bucket = {
        "op": "all_reduce",
        "what": "gradients",
        "group": "default",
        "phase": "backward",
        "dtype": "float32",
    }
    bucket |= {"size_bytes": 3_000_000, "timing": "queue", "bucket": 0, "last": True}
    bucket |= {"enqueue": at(ready), "start": at(ready), "end": at(20)}
    loss = bucket | {
        "what": "loss",
        "phase": "log",
        "size_bytes": 4,
        "bucket": None,
        "last": False,
        "timing": "call",
    }
    loss |= {"enqueue": at(22), "start": at(22), "end": at(23)}
    marks = [
        ("forward", 0.0, 10.0),
        ("backward", 10.0, 20.0),
        ("optimizer", 20.0, 22.0),
        ("log", 22.0, 24.0),
    ]
    phases = [[name, at(start), at(end)] for name, start, end in marks]
    return {
        "step": 7,
        "phases": phases,
        "collectives": [bucket, loss],
        "profiled": False,
    } | more


def test_a_step_worked_out_by_hand() -> None:
    """Rank 0 has its bucket ready at 12 ms, rank 1 at 16; both end at 20. Rank 1's clock is 5 s
    ahead.
    """
    late = notes(5000.0, 16.0)
    step = merge([notes(0.0, 12.0), late], [ClockOffset(0, 0), ClockOffset(5.0, 1e-5)])
    bucket, loss = step["collectives"]
    assert bucket["enqueue_ms"] == pytest.approx([12, 16])
    assert bucket["skew_us"] == pytest.approx(4000)
    assert bucket["late_rank"] == 1
    assert bucket["latency_us"] == pytest.approx(8000)
    assert bucket["time_us"] == pytest.approx(4000)  # from the moment when rank 1 had begun, too
    # N = 2: the factor is 1
    assert bucket["algbw_gbps"] == bucket["busbw_gbps"] == pytest.approx(0.75)
    assert loss["bytes"] == 4
    figures = step["figures"]
    assert figures["step_ms"] == pytest.approx(24)
    assert figures["exposed_ms"] == pytest.approx((8 + 4) / 2 + 1)
    assert figures["hidden_ms"] == pytest.approx(0)
    assert (figures["late_rank"], figures["late_phase"]) == (1, "backward")
    assert figures["late_ms"] == pytest.approx(4)  # own work: 10 + 2 + 2 against 10 + 6 + 2


def test_means_of_steps() -> None:
    steps = [
        merge([notes(0.0, r), notes(0.0, 16.0)], [ClockOffset(0, 0)] * 2)["figures"]
        for r in (12.0, 14.0, 18.0)
    ]
    total = Totals()
    for step in steps:
        total.add(step)
    mean = total.means()
    assert mean["step_ms"] == pytest.approx(24)
    assert mean["late_rank"] == 1
    assert mean["busbw_gbps"] == pytest.approx(3 * 3e6 / (0.004 + 0.004 + 0.002) / 1e9)


def one_late(late: bool, step: int) -> list[list[dict[str, Any]]]:
    """Notes of two ranks; rank 1's backward takes twice as long when it is `late`."""
    return [[notes(0.0, 12.0, step=step)], [notes(0.0, 20.0 if late else 12.0, step=step)]]


def test_a_straggler_is_named_once_and_again_when_it_relapses(tmp_path: Path) -> None:
    log, said = CommLog(tmp_path, 0, 0), {}
    for step in range(1, 61):
        _, lines = log.add(one_late(step <= 10 or step > 40, step), [ClockOffset(0, 0)] * 2, {})
        for line in lines:
            said[step] = line
    assert list(said) == [LATE_TIMES, 16, 46]
    assert (
        "rank 1: 8.0 ms a step behind the others (15.0 ms of own work), most of it in backward"
        in said[LATE_TIMES]
    )
    assert "rank 1 keeps up again" in said[16]
    summary = log.finish([ClockOffset(0, 0)] * 2)
    assert (summary["straggler"]["since"], summary["straggler"]["until"]) == (46, None)


def test_equal_ranks_have_no_straggler(tmp_path: Path) -> None:
    log = CommLog(tmp_path, 0, 0)
    for step in range(1, 31):
        assert log.add(one_late(False, step), [ClockOffset(0, 0)] * 2, {})[1] == []
    assert log.finish([ClockOffset(0, 0)] * 2)["straggler"] is None


def test_each_group_names_its_buckets(tmp_path: Path) -> None:
    for at, started, buckets in ((1, 7.0, {0: ["a", "b"]}), (2, 9.0, {0: ["b"], 1: ["a"]})):
        log = CommLog(tmp_path / "comm", at - 1, 0, started=started)
        log.add(one_late(False, at), [ClockOffset(0, 0)] * 2, buckets)
    assert json.loads((tmp_path / "comm" / "buckets.json").read_text()) == {"0": ["b"], "1": ["a"]}
    assert [(s["started"], s["attempt"]) for s in read_steps(tmp_path)] == [(7.0, 0), (9.0, 0)]


# Real ranks.


def two_hosts_rank(mesh: Mesh, order: dict[str, Any], emit: Any) -> None:
    """Trace three steps of one all-reduce each, on ranks that take themselves for different hosts."""
    import nanoray.observe.trace.recorder as module

    module.clock_domain = lambda: f"host{mesh.rank}"
    recorder = CommRecorder(mesh, every=1)
    log = CommLog(Path(order["folder"]) / "comm", 0, 0) if mesh.rank == 0 else None
    plan: Any = SimpleNamespace(trace=lambda on: None)
    trace = Tracing(recorder, dict, log, plan, mesh, print)
    trace.begin_run()
    for step in (1, 2, 3):
        trace.begin_step(step)
        trace.phase(step, "log")
        mesh.all_reduce(torch.ones(4), "loss")
        trace.measured()
        trace.end_step()
    emit(trace.summary())


def test_ranks_on_two_hosts(tmp_path: Path) -> None:
    """Their clocks are compared while steps are read; that, and the reading, is no part of what is
    read.
    """
    with RankPool(Where(workers=2, device="cpu")) as pool:
        (event,) = pool.run("tests.ranks.test_timeline:two_hosts_rank", {"folder": str(tmp_path)})
    assert event["comm"]["clock"].startswith("hosts compared to ±")
    assert "3 steps traced" in comm_lines(event["comm"], "x")[0]
    steps = read_steps(tmp_path)
    assert [[c["what"] for c in step["collectives"]] for step in steps] == [["loss"]] * 3


# Real runs.


@pytest.fixture(scope="module")
def spec(text: Path, tmp_path_factory: pytest.TempPathFactory) -> RunSpec:
    """Rank 1 sleeps 700 ms in the forward pass of steps 3 to 10; the first part of a run that is
    resumed.
    """
    plan = ";".join(f"slow@rank=1,step={s},phase=forward,seconds=0.7" for s in range(3, 11))
    folder = tmp_path_factory.mktemp("slow")
    spec = make_spec(
        text,
        folder,
        comm_trace="always",
        max_steps=14,
        faults=plan,
        bucket_mb=0.03,
        checkpoint_every=12,
    )
    assert all("error" not in r for r in run_ranks(spec, 2))
    return spec


@pytest.mark.full
def test_a_straggler_is_named_with_its_phase(spec: RunSpec) -> None:
    lines = [
        line
        for line in (spec.folder / "logs" / "rank0.log").read_text().splitlines()
        if "straggler" in line
    ]
    assert len(lines) == 1
    found = re.search(r"rank 1: ([\d.]+) ms a step behind the others", lines[0])
    assert found, lines
    assert float(found[1]) > 150, "about 700; less by what a busy machine delays rank 0"
    assert "most of it in forward" in lines[0]
    assert len((spec.folder / "faults.jsonl").read_text().splitlines()) == 8  # it did sleep
    late = series(spec, "comm/late_rank")
    assert [late[s] for s in range(5, 11)] == [1.0] * 6
    assert all(ms > 100 for s, ms in series(spec, "comm/skew_ms").items() if 5 <= s <= 10)


def test_the_newest_steps_are_drawn(spec: RunSpec, capsys: pytest.CaptureFixture[str]) -> None:
    path = spec.folder / "comm" / "timeline.svg"
    assert main([str(spec.folder)]) == 0
    assert capsys.readouterr().out == f"{path}\n"
    newest = path.read_text()
    assert newest.startswith("<?xml")
    for text in ("step 11", "step 14", "rank 1"):
        assert f"<!--  {text} -->" in newest or f"<!-- {text} -->" in newest
    assert main([str(spec.folder), "--step", "12"]) == 0
    assert "step 14" not in path.read_text()


def test_a_resumed_run_has_each_step_once(spec: RunSpec) -> None:
    """Resumed from step 12: steps 13 and 14 are traced again, and stand in the file once."""
    from nanoray.cli.open_folder import open_run

    config = spec.config.model_copy(
        update={"resume": str(spec.folder), "max_steps": 16, "faults": "", "checkpoint_every": 0}
    )
    again = open_run(config, spec.dataset, spec.started)
    for step in (again.checkpoints / "step_00000014",):
        for file in step.iterdir():
            file.unlink()
        step.rmdir()
    assert all("error" not in r for r in run_ranks(again, 2))
    assert [s["step"] for s in read_steps(again.folder)] == list(range(1, 17))
    assert len(newest_window(read_steps(again.folder))) == 4

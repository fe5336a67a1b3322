"""All ranks' notes together: hand-worked steps, a planted straggler, files that Perfetto and people can read."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from nanoray.comm import ClockOffset
from nanoray.run import RunSpec
from nanoray.timeline import chrome_trace, main, mean_figures, merge, newest_window, read_steps
from tests.ranks import make_spec, run_ranks, series


def notes(shift: float, ready: float, **more: Any) -> dict[str, Any]:
    """One rank's step: forward to 10 ms, backward to 20, optimizer to 22; a bucket and a loss."""

    def at(ms: float) -> float:
        return 100.0 + (shift + ms) / 1e3

    bucket = {"op": "all_reduce", "what": "gradients", "group": "default", "phase": "backward", "dtype": "float32"}
    bucket |= {"size_bytes": 3_000_000, "timing": "queue", "bucket": 0, "last": True}
    bucket |= {"enqueue": at(ready), "start": at(ready), "end": at(20)}
    loss = bucket | {"what": "loss", "phase": "log", "size_bytes": 4, "bucket": None, "last": False, "timing": "call"}
    loss |= {"enqueue": at(22), "start": at(22), "end": at(23)}
    marks = [("forward", 0.0, 10.0), ("backward", 10.0, 20.0), ("optimizer", 20.0, 22.0), ("log", 22.0, 24.0)]
    phases = [[name, at(start), at(end)] for name, start, end in marks]
    return {"step": 7, "phases": phases, "collectives": [bucket, loss], "no_sync_s": None} | more


def test_a_step_worked_out_by_hand() -> None:
    """Rank 0 has its bucket ready at 12 ms, rank 1 at 16; both end at 20. Rank 1's clock is 5 s ahead."""
    late = notes(5000.0, 16.0, no_sync_s=0.015)
    step = merge([notes(0.0, 12.0, no_sync_s=0.017), late], [ClockOffset(0, 0), ClockOffset(5.0, 1e-5)])
    bucket, loss = step["collectives"]
    assert bucket["enqueue_ms"] == pytest.approx([12, 16])
    assert bucket["skew_us"] == pytest.approx(4000)
    assert bucket["late_rank"] == 1
    assert bucket["latency_us"] == pytest.approx(8000)
    assert bucket["time_us"] == pytest.approx(4000)  # from the moment when rank 1 had begun, too
    assert bucket["algbw_gbps"] == bucket["busbw_gbps"] == pytest.approx(0.75)  # n = 2: the factor is 1
    assert loss["bytes"] == 4
    figures = step["figures"]
    assert figures["step_ms"] == pytest.approx(24)
    assert figures["exposed_ms"] == pytest.approx((8 + 4) / 2 + 1)
    assert figures["hidden_ms"] == pytest.approx(0)
    assert figures["ab_ms"] == pytest.approx(((20 - 17) + (20 - 15)) / 2)
    assert (figures["late_rank"], figures["late_phase"]) == (1, "backward")
    assert figures["late_ms"] == pytest.approx(4)  # own work: 10 + 2 + 2 against 10 + 6 + 2


def test_pauses_are_no_part_of_a_step() -> None:
    ours = notes(0.0, 12.0)
    ours["phases"].append(["eval", 100.024, 100.124])
    ours["collectives"].append(ours["collectives"][1] | {"what": "eval", "phase": "eval", "end": 100.1})
    figures = merge([ours, ours], [ClockOffset(0, 0)] * 2)["figures"]
    assert figures["step_ms"] == pytest.approx(24)
    assert figures["exposed_ms"] == pytest.approx(9)


def test_means_of_steps() -> None:
    steps = [merge([notes(0.0, r), notes(0.0, 16.0)], [ClockOffset(0, 0)] * 2)["figures"] for r in (12.0, 14.0, 18.0)]
    mean = mean_figures(steps)
    assert mean["step_ms"] == pytest.approx(24)
    assert mean["late_rank"] == 1
    assert "ab_ms" not in mean
    assert mean["busbw_gbps"] == pytest.approx(3 * 3e6 / (0.004 + 0.004 + 0.002) / 1e9)


def test_the_newest_window_holds_neighbours_only() -> None:
    steps = [{"step": s} for s in (9, 10, 19, 20)]
    assert [s["step"] for s in newest_window(steps)] == [19, 20]
    assert [s["step"] for s in newest_window([{"step": s} for s in range(1, 9)])] == [5, 6, 7, 8]


# Real runs.


@pytest.fixture(scope="module")
def spec(text: Path, tmp_path_factory: pytest.TempPathFactory) -> RunSpec:
    """Rank 1 sleeps 60 ms in the forward pass of every step from 3 on; the first part of a run that is resumed."""
    plan = ";".join(f"slow:rank=1,step={s},phase=forward,seconds=0.06" for s in range(3, 13))
    folder = tmp_path_factory.mktemp("slow")
    spec = make_spec(text, folder, comm_trace="always", max_steps=14, fault=plan, bucket_mb=0.03, checkpoint_every=12)
    assert all("error" not in r for r in run_ranks(spec, 2))
    return spec


def test_a_straggler_is_named_with_its_phase(spec: RunSpec) -> None:
    lines = [line for line in (spec.folder / "logs" / "rank0.log").read_text().splitlines() if "straggler" in line]
    assert len(lines) == 1
    assert "rank 1: 6" in lines[0] or "rank 1: 7" in lines[0] or "rank 1: 5" in lines[0], lines  # about 60 ms
    assert "most of it in forward" in lines[0]
    assert len((spec.folder / "faults.jsonl").read_text().splitlines()) == 10  # it did sleep
    late = series(spec, "comm/late_rank")
    assert [late[s] for s in range(5, 13)] == [1.0] * 8
    assert all(ms > 30 for s, ms in series(spec, "comm/skew_ms").items() if 5 <= s <= 12)


def test_a_trace_for_perfetto(spec: RunSpec) -> None:
    """Complete events with a length, named rows, and no two slices of a row that overlap: it would drop them."""
    trace = json.loads((spec.folder / "comm" / "timeline.json").read_text())
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    rows: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for e in slices:
        assert e["dur"] >= 0
        rows.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    assert {pid for pid, _ in rows} == {0, 1}
    for spans in rows.values():
        spans.sort()
        assert all(end <= start + 1e-6 for (_, end), (start, _) in pairwise(spans))
    named = {(e["pid"], e["tid"]) for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert set(rows) <= named
    assert {e["args"]["step"] for e in slices if e["cat"] == "phase"} == {11, 12, 13, 14}
    assert any(e["name"] == "bucket 0" and e["args"]["bytes"] > 0 for e in slices)


def test_the_picture_names_ranks_and_numbers(spec: RunSpec) -> None:
    picture = (spec.folder / "comm" / "timeline.svg").read_text()
    assert picture.startswith("<?xml")
    assert len(picture) > 10_000


def test_another_window_can_be_drawn(spec: RunSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(spec.folder), "--step", "6", "--figure", str(tmp_path / "t.png")]) == 0
    assert (tmp_path / "t.png").read_bytes()[:4] == b"\x89PNG"
    drawn = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {e["args"]["step"] for e in drawn if e["ph"] == "X" and e["cat"] == "phase"} == {3, 4, 5, 6}
    assert main([str(spec.folder), "--step", "99"]) == 2
    assert "step = 99 was not traced; the last traced ones are 7, 8" in capsys.readouterr().err


def test_a_run_without_traces_says_how_to_get_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "has no traced steps; start a run with --comm_trace every=50" in capsys.readouterr().err


def test_a_resumed_run_has_each_step_once(spec: RunSpec) -> None:
    """Resumed from step 12: steps 13 and 14 are traced again, and stand in the file once."""
    from nanoray.run import open_run

    config = spec.config.model_copy(update={"resume": str(spec.folder), "max_steps": 16, "fault": ""})
    again = open_run(config, spec.dataset, spec.started)
    for step in (again.checkpoints / "step_00000014",):
        for file in step.iterdir():
            file.unlink()
        step.rmdir()
    assert all("error" not in r for r in run_ranks(again, 2))
    assert [s["step"] for s in read_steps(again.folder)] == list(range(1, 17))
    assert chrome_trace(read_steps(again.folder)[-2:])["traceEvents"]

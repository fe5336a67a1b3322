"""Profiles: steps of real ranks on one clock, without a changed bit; and files by hand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from nanoray.observe.trace.__main__ import main
from nanoray.observe.trace.profiles import ALL, FOLDER, KEY, merge
from tests.harness.axes import equal, final
from tests.harness.ranks import make_spec, run_ranks, series

RECIPE: dict[str, Any] = {
    "max_steps": 6,
    "global_batch_size": 8,
    "dropout": 0.1,
    "precision": "fp32",
}


def test_two_ranks_on_one_clock(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = make_spec(text, tmp_path / "plain", **RECIPE)
    spec = make_spec(text, tmp_path / "profiled", **RECIPE, profile="3:5")
    for each in (plain, spec):
        assert [o["exit_reason"] for o in run_ranks(each, 2)] == ["finished"] * 2
    assert equal(final(plain), final(spec))
    assert series(plain) == series(spec)
    assert main([str(spec.folder), "--profile"]) == 0
    told = capsys.readouterr().out
    assert "2 rank(s), steps 3 to 4; their clocks agree to 0 us" in told
    events = json.loads(gzip.decompress((spec.folder / FOLDER / ALL).read_bytes()))["traceEvents"]
    names = {
        e["pid"]: e["args"]["name"].partition(":")[0] for e in events if e["name"] == "process_name"
    }
    seen: dict[tuple[str, str], tuple[float, float]] = {}
    for event in events:
        if event["ph"] == "X" and event["name"].startswith("step "):
            seen[names[event["pid"]], event["name"]] = event["ts"], event["ts"] + event["dur"]
    steps = {name.partition(":")[0] for _, name in seen}
    assert steps == {"step 3", "step 4"}
    for one, other in (("rank 0", "rank 1"), ("rank 1", "rank 0")):
        begun, ended = seen[one, "step 3: backward"][0], seen[other, "step 3: backward"][1]
        assert begun < ended, (
            "gradients are summed in backward, so no rank's ends before all have begun"
        )
        assert seen[one, "step 4: forward"][0] > begun
    for rank in ("rank 0", "rank 1"):
        begin, end = seen[rank, "step 3: backward"]
        inside = {
            e["name"]
            for e in events
            if e["ph"] == "X" and names.get(e["pid"]) == rank and begin <= e["ts"] <= end
        }
        assert any("allreduce" in name or "all_reduce" in name for name in inside), inside
        assert "aten::mm" in inside


def profile(rank: int, base_ns: int, ahead_s: float, ts: float) -> dict[str, Any]:
    events = [
        {"ph": "M", "name": "process_name", "pid": 77, "tid": 0, "args": {"name": "python"}},
        {"ph": "X", "name": "aten::mm", "pid": 77, "tid": 78, "ts": ts, "dur": 5.0},
        {"ph": "s", "name": "fwdbwd", "id": 1, "pid": 77, "tid": 78, "ts": ts},
    ]
    told = {"rank": rank, "steps": [3, 4], "ahead_s": ahead_s, "uncertainty_s": 2e-6}
    return {"baseTimeNanoseconds": base_ns, "traceEvents": events, KEY: told}


def test_clocks_are_set_to_rank_0s() -> None:
    # Rank 1's clock is 3 s ahead; 10 us after rank 0's event it noted one.
    base = 1_790_000_000_000_000_000
    events = merge(
        [profile(0, base, 0.0, 100.0), profile(1, base + 2_000_000_000, 3.0, 1_000_110.0)]
    )["traceEvents"]
    first, second = (e for e in events if e["ph"] == "X")
    assert second["ts"] - first["ts"] == pytest.approx(10.0)
    assert first["pid"] != second["pid"], "processes of two machines may have one pid"
    assert len({e["id"] for e in events if e["ph"] == "s"}) == 2
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == [
        "rank 0: python",
        "rank 1: python",
    ]

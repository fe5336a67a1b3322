"""Profiles of steps of real ranks, without a changed bit."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from tests.harness.axes import equal, final
from tests.harness.ranks import make_spec, run_ranks, series

RECIPE: dict[str, Any] = {
    "max_steps": 6,
    "global_batch_size": 8,
    "dropout": 0.1,
    "precision": "fp32",
}


def test_each_rank_writes_what_its_steps_did(text: Path, tmp_path: Path) -> None:
    plain = make_spec(text, tmp_path / "plain", **RECIPE)
    spec = make_spec(text, tmp_path / "profiled", **RECIPE, profile="3:5")
    for each in (plain, spec):
        assert [o["exit_reason"] for o in run_ranks(each, 2)] == ["finished"] * 2
    assert equal(final(plain), final(spec))
    assert series(plain) == series(spec)

    for rank in (0, 1):
        file = spec.folder / "profile" / f"rank{rank}.json.gz"
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
        spans = {e["name"]: e for e in events if e["ph"] == "X" and e["name"].startswith("step ")}
        assert {name.partition(":")[0] for name in spans} == {"step 3", "step 4"}
        backward = spans["step 3: backward"]
        begin, end = backward["ts"], backward["ts"] + backward["dur"]
        inside = {e["name"] for e in events if e["ph"] == "X" and begin <= e["ts"] <= end}
        assert any("allreduce" in name or "all_reduce" in name for name in inside), inside
        assert "aten::mm" in inside

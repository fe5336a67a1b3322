"""What rungs of a ladder lose beside their base, by records that are written here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nanoray.bench.harness.report import Report
from nanoray.bench.ladder import LOSS, Ladder
from nanoray.config import make_config

BASE = {"micro_batch_size": 2, "device": "cuda", "dropout": 0.0}


def climbed(folder: Path, rungs: dict[str, tuple[dict[str, Any], dict[int, float]]]) -> Ladder:
    """Return a ladder whose rungs have logged these losses by step."""
    anything: Any = None
    report = Report("gpu", {})
    ladder = Ladder(anything, report, "tiny", make_config(BASE), anything, folder, {}, "cuda")
    for rung, (settings, losses) in rungs.items():
        ladder.configs[rung] = make_config(BASE | settings)
        ladder.runs[rung] = folder / rung
        ladder.runs[rung].mkdir()
        records = [{"step": step, "train/loss": loss} for step, loss in losses.items()]
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (ladder.runs[rung] / "metrics.jsonl").write_text(lines)
    return ladder


def test_a_loss_that_is_not_the_bases_is_wrong_to_what_the_precision_allows(tmp_path: Path) -> None:
    rungs: dict[str, tuple[dict[str, Any], dict[int, float]]] = {
        "base": ({"precision": "fp32"}, {5: 3.0, 10: 2.0, 15: 1.5}),
        "far": ({"precision": "fp32"}, {5: 3.0, 10: 2.01}),
        "bf16": ({"precision": "bf16"}, {5: 3.0, 10: 2.01}),
        "fp8": ({"precision": "fp8", "fp8_scaling": "row"}, {5: 3.0, 10: 2.08}),
        "larger": ({"precision": "fp32"}, {5: 9.0}),
        "dropped": ({"precision": "fp32", "dropout": 0.1}, {5: 9.0}),
        "plain loop": ({"precision": "fp32"}, {}),
    }
    ladder = climbed(tmp_path, rungs)
    ladder.compare_losses("base", most=12, not_same=["larger"])
    report = ladder.report
    assert {row.arm: (row.median, row.note, row.wrong) for row in report.rows} == {
        "tiny: base": (2.0, "of step 10", 0),
        "tiny: far": (2.01, "of step 10", 1),
        "tiny: bf16": (2.01, "of step 10", 0),
        "tiny: fp8": (2.08, "of step 10", 0),
        "tiny: larger": (9.0, "of step 5", None),
        "tiny: dropped": (9.0, "of step 5", None),
    }
    assert {row.metric for row in report.rows} == {LOSS}
    assert report.failed


def test_without_a_base_nothing_is_compared(tmp_path: Path) -> None:
    ladder = climbed(tmp_path, {"bf16": ({}, {5: 3.0})})
    ladder.compare_losses("base")
    report = ladder.report
    assert not report.rows


@pytest.mark.parametrize("world", [1, 2])
def test_the_slowest_rank_decides_and_the_cpu_time_is_that_of_all(
    world: int, tmp_path: Path
) -> None:
    from nanoray.bench.ladder import RungProcesses

    class Answers:
        def __init__(self, ms: float) -> None:
            self.ms = ms

        def ask(self, line: str) -> None:
            assert line == "3"

        def answer(self, timeout_s: float) -> dict[str, float]:
            return {"step_ms": self.ms, "cpu_ms": 5.0, "peak_bytes": 7 * self.ms}

    ranks = RungProcesses.__new__(RungProcesses)
    children: Any = [Answers(10.0 * (rank + 1)) for rank in range(world)]
    ranks.children = children
    found = ranks.block(3, 1.0)
    assert found == {"step_ms": 10.0 * world, "cpu_ms": 5.0 * world, "peak_bytes": 70.0 * world}

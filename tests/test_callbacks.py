"""What observers write: the truth in JSONL, events for TensorBoard, a line for people; and the registry behind it."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from nanoray.callbacks import Console, JsonlWriter, TensorBoardWriter, clock, short
from nanoray.metrics import METRICS, check_record, mfu_percent, to_markdown

DOCS = Path(__file__).resolve().parent.parent / "docs"


def record(step: int, **more: float) -> dict[str, float]:
    return {
        "step": step,
        "time": 1000.0 + step,
        "train/loss": 0.1 + step / 3,
        "train/lr": 1e-3,
        "train/grad_norm": 1.0,
    } | more


def test_jsonl_keeps_every_bit_of_a_float(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path, 0)
    writer.on_record(record(1))
    writer.close()
    assert json.loads(path.read_text())["train/loss"] == 0.1 + 1 / 3


def test_resuming_drops_what_comes_after_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(record(s)) + "\n" for s in (1, 2, 3)) + '{"step": 4, "tra')
    writer = JsonlWriter(path, 2)
    writer.on_record(record(3, **{"val/loss": 2.0}))
    writer.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["step"] for r in lines] == [1, 2, 3]
    assert lines[-1]["val/loss"] == 2.0


def test_an_unregistered_metric_cannot_be_emitted(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="train/mystery"):
        JsonlWriter(tmp_path / "m.jsonl", 0).on_record(record(1, **{"train/mystery": 1.0}))


def test_tensorboard_gets_config_and_scalars(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path, '{"lr": 1}', 0)
    for step in (1, 2):
        writer.on_record(record(step))
    writer.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["train/grad_norm", "train/loss", "train/lr"]
    assert [e.step for e in events.Scalars("train/loss")] == [1, 2]
    assert any("config" in tag for tag in events.Tags()["tensors"])


def test_console_prints_one_line_per_record() -> None:
    out = io.StringIO()
    console = Console(2000, out)
    console.on_note("hello")
    console.on_record(record(1))
    console.on_record(record(200, **{"time/step_ms": 24.0, "perf/tok_per_sec": 32000.0, "val/loss": 2.5}))
    lines = out.getvalue().splitlines()
    assert lines[0] == "hello"
    assert lines[1] == "step    1/2000 | loss 0.4333 | lr 1.0e-03 | gnorm 1.00"
    assert lines[2].startswith(
        "step  200/2000 | loss 66.7667 | val 2.5000 | lr 1.0e-03 | gnorm 1.00 | 24 ms | 32k tok/s | eta 30:00"
    )


def test_numbers_for_people() -> None:
    assert [short(v) for v in (0.5, 32100, 4.5e6, 2e9)] == ["0.5", "32.1k", "4.5M", "2G"]
    assert [clock(s) for s in (4.4, 61.2, 3700)] == ["0:04", "1:01", "1:01:40"]


def test_registry_is_complete_small_and_documented() -> None:
    assert len(METRICS) <= 30
    assert all(m.unit and m.meaning and m.healthy for m in METRICS.values())
    check_record(dict.fromkeys(METRICS, 0.0))
    assert mfu_percent(tok_per_sec=1e6, flops_per_token=3e8, peak_flops=1e15) == 30.0


def test_docs_metrics_is_the_registry() -> None:
    assert (DOCS / "metrics.md").read_text(encoding="utf-8") == to_markdown() + "\n", "run: make docs"

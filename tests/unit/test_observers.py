"""What observers write: the truth in JSONL, events for TensorBoard, a line for people; and the
registry behind it.
"""

from __future__ import annotations

import json
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from nanoray.machine.atomic import read_json
from nanoray.machine.metrics import METRICS, check_record, mfu_percent, to_markdown
from nanoray.machine.text import aligned, clock, short
from nanoray.observe.track.observer import Observer
from nanoray.observe.watch.observers import (
    Console,
    Observers,
)
from nanoray.observe.watch.record_files import JsonlWriter, TensorBoardWriter
from tests.harness.ranks import make_spec

DOCS = Path(__file__).resolve().parents[2] / "docs"


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


@pytest.mark.parametrize("name", ["train/mystery", "mystery"])
def test_an_unregistered_metric_cannot_be_emitted(text: Path, tmp_path: Path, name: str) -> None:
    observers = Observers(make_spec(text, tmp_path), ())
    observers.open(0, 0)
    with pytest.raises(AssertionError, match=name):
        observers.record(record(1, **{name: 1.0}))
    observers.close()


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


@contextmanager
def no_room(path: Path, more: int) -> Iterator[None]:
    """A disk with room for so many more bytes in this file: as far as the process can see, it is
    full then.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_tensorboard_gets_no_value_of_a_variable(text: Path, tmp_path: Path) -> None:
    spec = make_spec(text, tmp_path, tensorboard=True, env={"TOKEN": "hunter2-do-not-store"})
    observers = Observers(spec, [])
    observers.open(0, 0)
    observers.record(record(1))
    observers.close()
    written = b"".join(path.read_bytes() for path in (spec.folder / "tb").iterdir())
    assert b"TOKEN" in written
    assert b"hunter2" not in written


@pytest.mark.parametrize("more", [0, 100, 300])
def test_records_wait_while_the_disk_is_full(text: Path, tmp_path: Path, more: int) -> None:
    """Every record is in metrics.jsonl afterwards; it was said once when it began and ended."""
    spec, told = make_spec(text, tmp_path), Told()
    observers = Observers(spec, [told])
    observers.open(0, 0)
    metrics = spec.folder / "metrics.jsonl"
    for step in range(1, 6):
        observers.record(record(step))
    with no_room(metrics, more):
        for step in range(6, 46):
            observers.record(record(step))
            with suppress(ValueError):
                assert all(json.loads(line) for line in metrics.read_text().splitlines()), (
                    "no part of a line"
                )
    for step in range(46, 70):
        observers.record(record(step))
    observers.close()
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [
        *range(1, 70)
    ]
    began, ended = told.notes
    # A limit that is reached, or met in the middle of a line
    full = "(File too large|No space left on device)"
    assert re.fullmatch(rf"warning  metrics.jsonl cannot be written \({full}\)", began)
    assert ended == "warning  metrics.jsonl is written again"


def test_a_full_disk_does_not_end_a_rewind(text: Path, tmp_path: Path) -> None:
    """Dropping records needs no room, and neither does taking over from a lost rank 0."""
    spec = make_spec(text, tmp_path)
    observers = Observers(spec, ())
    observers.open(0, 0)
    for step in range(1, 6):
        observers.record(record(step))
    metrics = spec.folder / "metrics.jsonl"
    with no_room(metrics, -metrics.stat().st_size):
        observers.rewind(3)
        observers.record(record(4))
        successor = Observers(spec, ())
        successor.open(0, 3)
    observers.record(record(5))
    observers.close()
    successor.close()
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [
        1,
        2,
        3,
        4,
        5,
    ]


class Told(Observer):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def on_note(self, text: str) -> None:
        self.notes.append(text)


def test_console_prints_one_line_per_record(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(2000)
    console.on_note("hello")
    console.on_record(record(1))
    console.on_record(
        record(200, **{"time/step_ms": 24.0, "perf/tok_per_sec": 32000.0, "val/loss": 2.5})
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "hello"
    assert lines[1] == "step    1/2000 | loss 0.4333 | lr 1.0e-03 | gnorm 1.00"
    assert lines[2].startswith(
        "step  200/2000 | loss 66.7667 | val 2.5000 | lr 1.0e-03 | gnorm 1.00 | 24 ms | 32k tok/s "
        "| eta 30:00"
    )


def test_a_file_that_is_missing_or_torn_has_no_values(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    assert read_json(path) == {}
    for text in ('{"steps": 3', "[3]", "", "[" * 100_000):
        path.write_text(text)
        assert read_json(path) == {}
    path.write_text('{"steps": 3}', encoding="utf-8-sig")
    assert read_json(path) == {"steps": 3}


def test_numbers_for_people() -> None:
    assert [short(v) for v in (0.5, 32100, 4.5e6, 2e9)] == ["0.5", "32.1k", "4.5M", "2G"]
    assert [clock(s) for s in (4.4, 61.2, 3700)] == ["0:04", "1:01", "1:01:40"]
    assert aligned([("name", "n"), ("x", "12")], right={1}) == ["name   n", "x     12"]
    assert aligned([("name", "n"), ("x", "12")]) == ["name  n", "x     12"]


def test_registry_is_complete_small_and_documented() -> None:
    assert len(METRICS) <= 46
    assert all(m.unit and m.meaning and m.healthy for m in METRICS.values())
    check_record(dict.fromkeys(METRICS, 0.0))
    assert mfu_percent(tok_per_sec=1e6, flops_per_token=3e8, peak_flops=1e15) == 30.0


def test_docs_metrics_is_the_registry() -> None:
    assert (DOCS / "metrics.md").read_text(encoding="utf-8") == to_markdown() + "\n", (
        "run: make docs"
    )

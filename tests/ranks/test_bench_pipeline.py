"""The benchmark of schedules: every arm for real, a schedule that computes something else,
refusals.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import nanoray.bench.__main__ as bench
from nanoray.bench import pipeline
from nanoray.bench.harness.report import Report
from nanoray.bench.pipeline import LOSS, STEP, THEORY, WAIT, _add_rows, arms_of

FLAGS = [
    "layouts",
    "pipeline",
    "--preset",
    "tiny",
    "--device",
    "cpu",
    "--rounds",
    "2",
    "--steps",
    "2",
    "--micro_batch_size",
    "2",
]


@pytest.mark.full
def test_every_schedule_for_real(
    tmp_path: Path,
    shared_ranks: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared_ranks(pipeline)
    arms = arms_of(2, [1, 4], 4)
    deep = {name: own | {"n_layer": 4} for name, own in arms.items()}
    monkeypatch.setattr(pipeline, "arms_of", lambda *_: deep)  # the preset has two layers only
    files = [
        f"--json={tmp_path / 'p.json'}",
        f"--figure={tmp_path / 'p.png'}",
    ]
    assert bench.main([*FLAGS, "--workers=2", "--micro=1,4", *files]) == 0
    assert "by the theory, %" in capsys.readouterr().out
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"
    found = Report.read(tmp_path / "p.json")
    assert {row.arm for row in found.rows if row.metric == THEORY} == set(arms)
    for name in arms:
        step, wait, loss = (found.row(name, metric) for metric in (STEP, WAIT, LOSS))
        assert step
        assert wait
        assert loss
        assert (step.n, loss.wrong) == (2, 0)
        assert all(0 < value < 100 for value in wait.values)
    theory = {name: round(found.row(name, THEORY).median, 1) for name in arms}  # type: ignore[union-attr]
    assert theory["1f1b, 4 micro"] == theory["gpipe, 4 micro"] == 20.0
    assert (theory["zero_bubble, 4 micro"], theory["interleaved, 4 micro"]) == (7.7, 11.1)


@pytest.mark.parametrize(
    ("kind", "loss", "digest", "wrong"),
    [
        ("zero_bubble", 2.0, "a", 0),
        ("zero_bubble", 2.0, "b", 5),
        ("interleaved", 2.0, "b", 0),
        ("interleaved", 2.1, "b", 5),
    ],
)
def test_other_weights_or_another_loss_fail_the_report(
    kind: str, loss: float, digest: str, wrong: int
) -> None:
    def event(step_ms: float, loss: float, digest: str) -> dict[str, Any]:
        return {
            "step_ms": step_ms,
            "wait": 20.0,
            "theory": 20.0,
            "losses": [loss],
            "digests": [digest, digest],
        }

    arms, report = arms_of(2, [4], 4), Report("pipeline", {})
    name = f"{kind}, 4 micro"
    found = {"1f1b, 4 micro": [event(10.0, 2.0, "a")] * 5, name: [event(9.0, loss, digest)] * 5}
    for arm, events in found.items():
        _add_rows(report, arm, arms[arm], events, found)
    row = report.row(name, LOSS)
    assert row
    assert row.wrong == wrong
    assert report.failed == bool(wrong)

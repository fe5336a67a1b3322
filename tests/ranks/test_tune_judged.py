"""`tests.stress tune` on a real rank: every part of it runs, and the report has its rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanoray.bench.harness.report import Report
from tests.stress import __main__ as stress


def test_a_subject_is_searched_walked_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "none")
    out = tmp_path / "tune.json"
    flags = ["--quick", "--subjects", "encoder", "--workers", "1", "--device", "cpu"]
    # In this process, which has its rank forked: a new one would import torch
    assert stress.main(["tune", *flags, "--json", str(out)]) == 0
    report = Report.read(out)
    for what in ("as it is", "tuned", "best of the grid"):
        row = report.row(f"encoder: {what}", "step")
        assert row
        assert row.n == 2
    loss = report.row("encoder: search", "loss")
    assert loss
    assert loss.wrong == 0
    assert report.row("encoder: grid", "settings").median == 4

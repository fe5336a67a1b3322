"""`bench tune` on a real rank: every part of it runs, and the report has its rows."""

from __future__ import annotations

import os
from pathlib import Path

from nanoray.bench.harness.report import Report
from tests.harness.commands import run


def test_a_subject_is_searched_walked_and_compared(tmp_path: Path) -> None:
    out = tmp_path / "tune.json"
    flags = ["--quick", "--subjects", "encoder", "--workers", "1", "--device", "cpu"]
    done = run(
        "nanoray.bench", "tune", *flags, "--json", str(out), env={**os.environ, "CXX": "none"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = Report.read(out)
    for what in ("as it is", "tuned", "best of the grid"):
        row = report.row(f"encoder: {what}", "step")
        assert row
        assert row.n == 2
    loss = report.row("encoder: search", "loss")
    assert loss
    assert loss.wrong == 0
    assert report.row("encoder: grid", "settings").median == 4

"""The benchmark of memory over sequence length: every arm for real, the figure, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import nanoray.bench.__main__ as bench
from nanoray.bench import context, strategies
from nanoray.bench.context import ContextBenchmark
from nanoray.bench.engine import MEMORY_STEPS
from nanoray.bench.harness import benchmark
from nanoray.bench.harness.report import Measurement, Report
from nanoray.bench.strategies import PEAK, PEAK_ERROR, PEAK_FORMULA, STATE

FLAGS = ["layouts", "context", "--device", "cpu"]


@pytest.mark.full
def test_every_length_for_real(
    tmp_path: Path, shared_ranks: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    shared_ranks(context)
    shared_ranks(strategies)  # whose memory is measured in the same way
    files = [f"--json={tmp_path / 'c.json'}", f"--figure={tmp_path / 'c.png'}"]
    # In ranks that stay, libraries and earlier tests decide over peaks as small as these.
    bench.main([*FLAGS, "--quick", "--cp", "2", "--lengths", "64,256", *files])
    found = Report.read(tmp_path / "c.json")
    assert found.failures == []
    for tokens in (64, 256):
        arm = f"cp 2, {tokens} tokens"
        peak = found.row(arm, PEAK)
        assert peak
        assert peak.n == MEMORY_STEPS
        assert (peak.extra["cp"], peak.extra["T"]) == (2, tokens)
        state = found.row(arm, STATE)
        assert state
        assert state.median > 0
    formulas = [found.row(f"cp 2, {tokens} tokens", PEAK_FORMULA) for tokens in (64, 256)]
    assert formulas[0]
    assert formulas[1]
    assert formulas[0].median < formulas[1].median
    assert "\n| 256 | 2 | " in capsys.readouterr().out
    assert (tmp_path / "c.png").read_bytes()[:4] == b"\x89PNG"


def test_the_formula_is_judged_by_the_worst_arm() -> None:
    report = Report("context", {"gpus": []})
    for arm, error in (("cp 1, 64 tokens", 4.0), ("cp 2, 64 tokens", -12.0)):
        report.rows.append(Measurement(arm, PEAK, "MiB", (10.0,) * 5, extra={"cp": 1, "T": 64}))
        report.rows.append(Measurement(arm, PEAK_ERROR, "%", (error,) * 5))
    context._add_target(report)
    (target,) = report.targets
    assert target.verdict == "MISSED"
    assert "cp 2, 64 tokens" in target.text
    assert len(ContextBenchmark().format_markdown(report)) == 4


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--cp", "1,two"], "cp = 1,two: not numbers above 0; write for example 1,2,4"),
        (["--cp", "0"], "cp = 0: not numbers above 0"),
        (["--lengths", "64,"], "lengths = 64,: not numbers above 0"),
        (["--lengths", "66", "--cp", "2"], "which does not divide block_size = 66"),
        (["--workers", "2"], "starts as many ranks as share a sequence: drop --workers"),
        (["--settings", "n_emd=3"], "n_emd; did you mean n_embd?"),
    ],
)
def test_what_makes_no_sense_is_refused(
    flags: list[str], text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "RankPool", lambda where: pytest.fail("it started ranks"))
    assert bench.main([*FLAGS, *flags]) == 2
    assert text in capsys.readouterr().err

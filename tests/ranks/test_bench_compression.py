"""The benchmark of compressed gradients: every arm for real, its bytes against their formula, and
what it says.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import nanoray.bench.__main__ as bench
from nanoray.bench import compression
from nanoray.bench.compression import (
    ARMS,
    LOSS,
    OFF,
    PAYS,
    PLAIN,
    STEP,
    WIRE,
    CompressionBenchmark,
    _add_rows,
)
from nanoray.bench.harness import benchmark
from nanoray.bench.harness.report import Report

FLAGS = [
    "communication",
    "compression",
    "--preset",
    "tiny",
    "--device",
    "cpu",
    "--rounds",
    "2",
    "--steps",
    "2",
]


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "mode"), [(2, "ddp"), (3, "ddp_by_hand")])
def test_every_arm_for_real(
    tmp_path: Path, shared_ranks: Any, capsys: pytest.CaptureFixture[str], ranks: int, mode: str
) -> None:
    shared_ranks(compression)
    files = [
        f"--json={tmp_path / 'c.json'}",
        f"--figure={tmp_path / 'c.png'}",
    ]
    assert bench.main([*FLAGS, f"--workers={ranks}", f"--dp_mode={mode}", *files]) == 0
    assert "no finding: n = 2, and fewer than 5 rounds" in capsys.readouterr().out
    found = Report.read(tmp_path / "c.json")
    assert (tmp_path / "c.png").read_bytes()[:4] == b"\x89PNG"
    count = int(found.conditions["recipe"].split("GPT of ")[1].split(" ")[0].replace(",", ""))
    carried = {}
    for name in ARMS:
        step, wire, loss = (found.row(name, metric) for metric in (STEP, WIRE, LOSS))
        assert step
        assert wire
        assert loss
        assert (step.n, step.wrong, loss.n) == (2, 0, 2)
        carried[name] = wire.median
        off = found.row(name, OFF)
        assert (off is None) == (name == PLAIN)
        assert off is None or abs(off.median) < 0.5
    # MB per byte of a number: once to the owner, once back
    both = 2 * (ranks - 1) / ranks * count / 1e6
    gaps = 1.2  # slices are whole blocks of 1024 numbers, and there are few of them here
    for name, size in {"fp32": 4, "bf16": 2, "fp16": 2}.items():
        assert size * both * 0.999 < carried[name] < size * both * gaps, name


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--workers", "1"], "workers = 1; 2 is the least: one rank sends nothing"),
        (["--rounds", "0"], "rounds = 0; give a number above 0"),
        (["--arms", "fp61"], "unknown arm fp61; did you mean fp16?"),
    ],
)
def test_what_makes_no_sense_is_refused(
    flags: list[str], text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "RankPool", lambda where: pytest.fail("it started ranks"))
    assert bench.main([*FLAGS, *flags]) == 2
    assert text in capsys.readouterr().err


def event(
    step_ms: float, sent: tuple[str, int], wrong: int = 0, loss: float = 2.0
) -> dict[str, Any]:
    """What a rank tells of one round."""
    bytes_sent = {sent[0]: (1, sent[1]), "all_reduce norm": (1, 4)}
    told = {
        "step_ms": step_ms,
        "busy_ms": 1.0,
        "exposed_ms": 1.0,
        "losses": [loss],
        "trained": 9,
        "kept": 0,
    }
    return told | {"collectives": bytes_sent, "digests": [0, wrong]}


def test_ranks_that_differ_fail_the_report_and_a_slow_arm_pays_on_slow_links_only() -> None:
    report = Report("compression", {})
    _add_rows(report, PLAIN, [event(10.0, ("all_reduce gradients", 8_000_000))] * 5, 2)
    assert not report.failed
    _add_rows(
        report,
        "bf16",
        [event(12.0, ("all_reduce gradients", 4_000_000), wrong=1, loss=2.25)] * 5,
        2,
    )
    assert report.failed
    pays, off = report.row("bf16", PAYS), report.row("bf16", OFF)
    assert pays
    assert off
    assert pays.median == pytest.approx(2000.0), "4 MB less in 2 ms more"
    assert off.median == 0.25
    told = "the fastest compressed arm, bf16, is slower than fp32 here: 1.2 x its step, the loss +0.2500 nat"
    assert CompressionBenchmark().finding(report) == [told]
    _add_rows(report, "fp16", [event(8.0, ("all_reduce gradients", 2_000_000))] * 5, 2)
    faster = report.row("fp16", PAYS)
    assert faster
    assert faster.skipped == "faster here already"
    assert "fp16, is faster than fp32 here: 0.8 x" in CompressionBenchmark().finding(report)[0]

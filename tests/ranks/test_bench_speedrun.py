"""bench speedrun: the command of every record, on a tiny model; when the clock starts and ends;
what is refused.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from examples.speedrun import benchmark as MODULE
from nanoray.bench.__main__ import exit_code_of, run_one
from nanoray.bench.harness import processes
from nanoray.bench.harness.report import Report
from nanoray.bench.to_loss import RunToLoss
from nanoray.config import load_config
from tests.harness.nanogpt import nanogpt

BENCHMARK = MODULE.SpeedrunBenchmark()
ARMS, RECORD_METRICS = MODULE.ARMS, MODULE.UNITS
SECONDS, CPU_TIME, STEPS, LOSS = RECORD_METRICS
FAST, FITTED, OWN, PEER = MODULE.FAST, MODULE.FITTED, MODULE.OWN, MODULE.PEER
TINY = "n_layer=1,n_head=2,n_embd=16,block_size=16,eval_samples=24,max_steps=20,eval_every=10,warmup_steps=2"
TINY += ",seq_warmup_steps=4"


@pytest.fixture(autouse=True)
def _started_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU time of a command is that of a child of this process."""
    monkeypatch.setattr(processes, "start_process", subprocess.Popen)


def run_speedrun(argv: list[str]) -> int:
    return exit_code_of(lambda: run_one("speedrun", MODULE.ENTRY, argv))


def ran(text: Path, tmp_path: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    out = tmp_path / "s.json"
    data = ["--dataset", str(text), "--data_dir", str(tmp_path / "cache")]
    code = run_speedrun(["--quick", *data, "--json", str(out), *flags])
    return code, json.loads(out.read_text())


def rows_of(report: dict[str, Any]) -> dict[tuple[str, str], Any]:
    return {(r["arm"], r["metric"]): r for r in report["rows"] if r["unit"] != "ratio"}


@pytest.mark.full
@pytest.mark.parametrize(
    "arms",
    [(PEER, FAST), tuple(ARMS)],
    ids=["two", "all"],
)
def test_every_record_runs_and_stops_at_its_loss(
    arms: tuple[str, ...], text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figure = tmp_path / "s.png"
    chosen = [
        "--arms",
        ",".join(arms),
        "--settings",
        f"{TINY},target_loss=9",
        "--figure",
        str(figure),
    ]
    chosen += ["--nanogpt", str(nanogpt(tmp_path / "nanogpt"))]
    code, report = ran(text, tmp_path, *chosen)
    assert code == 0, capsys.readouterr().out
    rows = rows_of(report)
    for arm in arms:
        assert rows[arm, STEPS]["values"] == [10], (
            "the first evaluation reaches the loss, so there is no step 11"
        )
        assert 1.5 < rows[arm, LOSS]["median"] < 9
        assert (
            (0.3 if arm != OWN else 0)
            < rows[arm, SECONDS]["median"]
            < report["conditions"]["seconds"]
        )
        assert rows[arm, CPU_TIME]["median"] > (0.3 if arm != OWN else 0)
    ratio = next(
        r for r in report["rows"] if (r["arm"], r["metric"]) == (f"{FAST} / {PEER}", SECONDS)
    )
    assert ratio["median"] == pytest.approx(
        rows[FAST, SECONDS]["median"] / rows[PEER, SECONDS]["median"]
    )
    assert figure.read_bytes()[:4] == b"\x89PNG"
    assert len(BENCHMARK.format_markdown(Report.read(tmp_path / "s.json"))) == 2 + len(arms)


def test_the_seconds_of_a_peer_that_misses_it_are_a_lower_bound() -> None:
    report = Report("speedrun", {})
    for arm, runs in ((PEER, [(90, 1.87), (96, 1.89)]), (FAST, [(30, 1.87), (24, 1.86)])):
        report.rows += MODULE._make_rows(
            arm, [RunToLoss(s, 2 * s, 300, loss) for s, loss in runs], 1.88, report, ""
        )
    MODULE._add_targets(report, [PEER, FAST])
    assert report.failures == []
    row = report.row(PEER, SECONDS)
    assert row
    assert "round 2 ended at 1.8900: seconds are a lower bound" in row.note
    peer, fast = BENCHMARK.format_markdown(report)[2:]
    assert peer.startswith(f"| {PEER} | 1.88 | ≥ 93.0 (90.0–96.0) |  | ")
    assert fast.startswith(
        f"| {FAST} | 1.88 | 27.0 (24.0–30.0) | 0.292 (0.250–0.333) | 54.0 (48.0–60.0) | "
    )
    (target,) = report.targets
    assert (target.relation, target.limit, target.row.median) == (
        "<=",
        1 / 3,
        pytest.approx(0.2917, abs=1e-4),
    )


def test_no_record_changes_what_the_rules_fix() -> None:
    """All are scored on the same validation tokens; the first one is nanoGPT's recipe."""
    for record in ARMS.values():
        config = load_config(preset=record.preset, overrides=dict(record.flags))
        assert (config.block_size, config.eval_samples, config.val_fraction) == (64, 240, 0.1)
    peer = load_config(preset=ARMS[PEER].preset, overrides=dict(ARMS[PEER].flags))
    assert (peer.n_layer, peer.n_head, peer.n_embd, peer.global_batch_size, peer.dropout) == (
        4,
        4,
        128,
        12,
        0.0,
    )
    assert (peer.max_steps, peer.eval_every, peer.lr, peer.min_lr, peer.warmup_steps) == (
        2000,
        250,
        1e-3,
        1e-4,
        100,
    )
    assert (peer.beta2, peer.weight_decay, peer.grad_clip, peer.schedule) == (
        0.99,
        0.1,
        1.0,
        "cosine",
    )
    assert (
        load_config(preset="shakespeare-cpu", overrides=dict(ARMS[FITTED].flags)).decay_fraction
        == 1.0
    )

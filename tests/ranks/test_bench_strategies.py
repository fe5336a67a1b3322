"""The benchmark of strategies: every arm for real, the memory formula by part, and the verdicts by
hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import nanoray.bench.__main__ as bench
from nanoray.bench import strategies
from nanoray.bench.engine import EXPOSED, MEMORY_ENTRY, MEMORY_STEPS, STEP, order_of
from nanoray.bench.harness.report import Measurement, Report
from nanoray.bench.harness.trainings import chosen
from nanoray.bench.strategies import (
    ARMS,
    DATA_ARMS,
    HYBRID,
    KEPT,
    LOSS,
    MODES,
    PEAK,
    STATE,
    STATE_ERROR,
    STATE_FORMULA,
    _add_time_rows,
    configuration,
)
from tests.ranks.conftest import Pools

FLAGS = ["layouts", "strategies", "--preset", "tiny", "--device", "cpu", "--quick"]


@pytest.mark.parametrize(("loss", "wrong"), [(3.0, 0), (3.1, 1)])
def test_after_an_interruption_losses_of_the_same_round_are_compared(
    loss: float, wrong: int
) -> None:
    """Ctrl-C in the third round: the first arm has done it, this one has not."""
    report = Report("strategies", {})
    first = [_event(loss=loss, steps=5 * n) for n, loss in enumerate((4.0, 3.0, 2.0), 1)]
    events = [_event(loss=4.0, steps=5), _event(loss=loss, steps=10)]
    _add_time_rows(report, "zero1", events, first)
    row = report.row("zero1", LOSS)
    assert row is not None
    assert (row.values, row.note, row.wrong) == ((loss,), "after 10 steps", wrong)


def _event(loss: float, steps: int) -> dict[str, Any]:
    """What the ranks say of an arm after a round."""
    rates = {"samples": 8, "tokens": 64, "busy_ms": 1.0, "exposed_ms": 0.5}
    return rates | {
        "step_ms": 2.0,
        "times_ms": [2.0, 2.0],
        "losses": [loss + 0.5, loss],
        "trained": steps,
        "collectives": {"all_reduce gradients": (1, 1000)},
    }


def test_arms_of_every_kind_run(
    tmp_path: Path, shared_ranks: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Times, communication, losses and memory, of a mode, a sharded one and a cut model."""
    shared_ranks(strategies)
    arms = ("ddp", "zero1", "tp 2")
    files = [f"--json={tmp_path / 's.json'}", f"--figure={tmp_path / 's.png'}"]
    flags = ["--workers", "2", "--arms", ",".join(arms), "--checkpointing", "none"]
    bench.main([*FLAGS, *flags, *files])
    out = capsys.readouterr().out
    found = Report.read(tmp_path / "s.json")
    assert found.failures == []
    for arm in arms:
        cells = [found.row(arm, metric) for metric in (STEP, EXPOSED, LOSS, STATE, PEAK)]
        assert all(row and row.median > 0 for row in cells), arm
        assert found.row(arm, LOSS).wrong == 0  # type: ignore[union-attr]
        assert f"\n{arm} " in out
    assert (tmp_path / "s.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.full
def test_every_arm_runs(
    tmp_path: Path, shared_ranks: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    shared_ranks(strategies)
    files = [f"--json={tmp_path / 's.json'}", f"--figure={tmp_path / 's.png'}"]
    bench.main([*FLAGS, "--workers", "2", "--settings", "n_embd=64,global_batch_size=8", *files])
    found = json.loads((tmp_path / "s.json").read_text())
    assert found["failures"] == []
    rows = {(r["arm"], r["metric"], r["unit"]): r for r in found["rows"]}
    at_four_ranks = [*HYBRID, "cp 4", "cp 2 tp 2", "cp 2 pp 2"]
    at_two_ranks = [arm for arm in ARMS if arm not in at_four_ranks]
    arms = [*at_two_ranks, *(f"{mode} + block" for mode in MODES)]
    left_out = f"{', '.join(at_four_ranks)}: they do not divide 2 ranks"
    assert found["conditions"]["left out"] == left_out
    for arm in arms:
        assert rows[arm, STEP, "ms"]["n"] == 2, "rounds"
        assert rows[arm, EXPOSED, "ms"]["median"] > 0, "a step communicates"
        assert rows[arm, LOSS, ""]["wrong"] == 0
        assert rows[arm, STATE, "MiB"]["median"] > 0
        assert rows[arm, PEAK, "MiB"]["n"] == MEMORY_STEPS
        assert abs(rows[arm, STATE_ERROR, "%"]["median"]) < 10, arm
    sent = {
        mode: {k: v["bytes"] for k, v in rows[mode, "bytes a step", "MB"]["collectives"].items()}
        for mode in at_two_ranks
    }
    stream = 4 * 8 * 32 * 64  # bytes of a step's tokens
    assert sent["tp 2"]["all_reduce activations"] == 10 * stream, (
        "4 sums in each of 2 blocks, embedding and head one"
    )
    # 2 blocks of one micro batch of 8 sequences: keys and values, 2·8·16·64 numbers
    assert sent["cp 2"]["send_recv keys_values"] == 2 * 2 * stream
    assert sent["cp 2"]["send_recv keys_values_grad"] == 2 * 2 * stream
    assert sent["cp 2"]["all_reduce gradients"] == sent["ddp"]["all_reduce gradients"]
    assert sent["cp 2 zero1"]["all_gather weights"] == sent["zero1"]["all_gather weights"]
    assert "all_reduce gradients" not in sent["pp 2"], "one replica"
    assert sent["pp 2"]["send_recv activations"] == stream
    assert sent["experts ep 2"]["all_to_all tokens"] > 0
    assert "all_to_all tokens" not in sent["experts"]
    size = rows["ddp", STATE, "MiB"]["held_bytes"]["parameters"]
    assert sent["ddp"]["all_reduce gradients"] == size
    assert sent["ddp_by_hand"]["reduce_scatter gradients"] == pytest.approx(size, rel=0.05)
    assert sent["zero2"]["all_gather weights"] == pytest.approx(size, rel=0.05)
    assert sent["zero1 mirrored"]["send_recv mirror"] == pytest.approx(size / 2, rel=0.05)
    assert sent["fsdp full mirrored"]["send_recv mirror"] == pytest.approx(size / 2, rel=0.05)
    assert "send_recv mirror" not in sent["zero1"]
    assert sent["fsdp full"]["all_gather weights"] > sent["fsdp grad_op"]["all_gather weights"]
    assert {t["target"].partition(",")[0] for t in found["targets"]} >= {
        "ddp_by_hand / ddp",
        "zero1 / ddp",
    }
    out = capsys.readouterr().out
    for arm in arms:
        assert f"\n{arm} " in out
    assert (tmp_path / "s.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_formula_says_what_each_rank_holds(pools: Pools, ranks: int, optimizer: str) -> None:
    """Weights, gradients and optimizer each for itself, by the storages that are alive at the end
    of a step.
    """
    overrides = {
        "n_embd": 96,
        "n_layer": 3,
        "global_batch_size": 12,
        "optimizer": optimizer,
        "bucket_mb": 0.25,
    }
    for mode, own in DATA_ARMS.items():
        config = configuration("tiny", overrides, own, ranks)
        order = order_of({mode: config}, mirrored=[mode] if "mirrored" in own else [])
        (found,) = pools(ranks).run(MEMORY_ENTRY, order)
        assert ("mirror" in found["formula"]) == ("mirrored" in mode)
        for part in (part for part in KEPT if part in found["formula"]):
            held, formula = found["held"][-1][part], found["formula"][part]
            if part == "optimizer" and optimizer == "sgd":
                assert held == formula == 0
            else:
                assert held == pytest.approx(formula, rel=0.02), (mode, part)


def report_of(**arms: tuple[float, float]) -> Report:
    """A report with (step in ms, state in MiB) of each arm, five rounds alike. The formula says 100
    MiB of each.
    """
    report = Report("strategies", {"gpus": []})
    for name, (ms, held) in arms.items():
        arm = name.replace("__", " + ")
        report.rows += [
            Measurement(arm, STEP, "ms", (ms,) * 5),
            Measurement(arm, LOSS, "", (1.0,), wrong=0),
        ]
        report.rows += [
            Measurement(arm, STATE, "MiB", (held,) * 5),
            Measurement(arm, STATE_FORMULA, "MiB", (100.0,)),
        ]
        report.rows.append(Measurement(arm, STATE_ERROR, "%", (held - 100,) * 5))
    strategies._add_targets(report, [name.replace("__", " + ") for name in arms])
    return report


def test_a_slow_mode_and_a_wrong_formula_are_missed_targets() -> None:
    report = report_of(ddp=(100.0, 99.0), ddp_by_hand=(106.0, 99.0), zero1=(109.0, 85.0))
    verdicts = {target.text: target.verdict for target in report.targets}
    assert verdicts == {
        "ddp_by_hand / ddp, step": "MISSED",
        "zero1 / ddp, step": "ok",
        "state memory, measured against the formula, worst arm, %": "MISSED",
    }
    assert report.failed


def test_each_arm_can_be_named() -> None:
    assert all(chosen(arm, list(ARMS)) == [arm] for arm in ARMS), (
        "a comma would be the end of a name"
    )

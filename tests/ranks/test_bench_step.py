"""bench step cpu: every rung of the ladder and every peer on a tiny model, what it refuses, the losses
it compares.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from nanoray.bench import __main__ as bench
from nanoray.bench.harness.report import Measurement, Report
from nanoray.bench.ladder import LOSS, MEMORY, PRODUCTS, TOKENS
from nanoray.bench.step import (
    BASE,
    BEST,
    EAGER,
    LADDERS,
    PEAK,
    PEER,
    READY,
    StepBenchmark,
    add_targets,
)
from tests.harness.nanogpt import nanogpt

CANNOT_COMPILE = any(letter.isspace() for letter in sys.prefix)
TINY = "n_layer=1,n_head=2,n_embd=16,block_size=16"


def climbed(text: Path, tmp_path: Path, *flags: str) -> dict[tuple[str, str, str], dict[str, Any]]:
    out = tmp_path / "s.json"
    argv = [
        "step",
        "cpu",
        "--quick",
        "--settings",
        TINY,
        "--dataset",
        str(text),
        "--data_dir",
        str(tmp_path / "cache"),
    ]
    assert bench.main([*argv, "--json", str(out), *flags]) == 0
    return {(r["arm"], r["metric"], r["unit"]): r for r in json.loads(out.read_text())["rows"]}


@pytest.mark.parametrize(
    "arms",
    [(BASE, "bf16", PEER), pytest.param(LADDERS["shakespeare-cpu"].rungs, marks=pytest.mark.full)],
    ids=["some", "all"],
)
def test_every_rung_and_every_peer(
    arms: tuple[str, ...], text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figure = tmp_path / "s.png"
    wanted = "all" if "compile" in arms else ",".join(arms)
    flags = [
        "--presets",
        "shakespeare-cpu",
        "--arms",
        wanted,
        "--nanogpt",
        str(nanogpt(tmp_path / "nanogpt")),
    ]
    rows = climbed(text, tmp_path, *flags, "--figure", str(figure))
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("OK  ")
    if CANNOT_COMPILE and "compile" in arms:
        skipped = rows["shakespeare-cpu: compile", TOKENS, "1/s"]["skipped"]
        assert skipped.startswith("compile = true cannot work on a CPU from")
        arms = tuple(arm for arm in arms if arm != "compile")
    for arm in arms:
        name = f"shakespeare-cpu: {arm}"
        assert rows[name, TOKENS, "1/s"]["n"] == rows[name, PEAK, "%"]["n"] == 2
        assert rows[name, TOKENS, "1/s"]["median"] > 0
        assert f"\n{name} " in out
        if arm != BASE:
            assert rows[f"{name} / shakespeare-cpu: {BASE}", TOKENS, "ratio"]["n"] == 2
        if arm != PEER:
            assert rows[name, MEMORY, "MiB"]["median"] > 50
            assert rows[name, READY, "s"]["median"] > 0
        assert ((name, LOSS, "") in rows) == (arm != PEER and "eager" not in arm)
    if "compile" in arms:
        compiled = rows["shakespeare-cpu: compile", READY, "s"]
        assert compiled["cached_s"] < compiled["median"], (
            "the second start finds what the first has compiled"
        )
    assert rows[f"shakespeare-cpu: {PEER}", TOKENS, "1/s"]["median"] == pytest.approx(
        12 * 16 / 20.5e-3, rel=0.03
    )
    for dtype in ("float32", "bfloat16"):
        assert rows[f"shakespeare-cpu: {PRODUCTS} {dtype}", PRODUCTS, "GFLOP/s"]["median"] > 0.1
    losses = [r["median"] for (_, metric, _), r in rows.items() if metric == LOSS]
    assert len(set(losses)) > 1, "bf16 rounds"
    assert all(r["wrong"] == 0 for (_, metric, _), r in rows.items() if metric == LOSS)
    assert figure.read_bytes()[:4] == b"\x89PNG"
    report = Report.read(tmp_path / "s.json")
    markdown = StepBenchmark().format_markdown(report)
    assert len([line for line in markdown if line.startswith("| shakespeare-cpu: ")]) == len(arms)


def test_without_nanogpt_the_loop_that_is_nearest_to_it_is_the_measure() -> None:
    report = Report("step", {})
    for arm, rate in ((BASE, 100.0), (BEST, 130.0), (EAGER, 100.0)):
        report.rows.append(Measurement(f"shakespeare-cpu: {arm}", TOKENS, "1/s", (rate,) * 5))
    report.rows.append(
        Measurement(
            f"shakespeare-cpu: {PEER}", TOKENS, "1/s", (), skipped="--nanogpt names no folder"
        )
    )
    add_targets(report, ["shakespeare-cpu"])
    (aim,) = (target for target in report.targets if f"{BEST} / " in target.text)
    assert aim.text == f"tokens/s, shakespeare-cpu: {BEST} / shakespeare-cpu: {EAGER}"
    assert aim.row.median == pytest.approx(1.3)

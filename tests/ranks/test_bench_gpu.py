"""bench step gpu: its rungs on a CPU and a tiny model, what it refuses, and its verdicts by hand."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from nanoray.bench import __main__ as bench
from nanoray.bench import gpu
from nanoray.bench.gpu import (
    BABY,
    BABY_GRAPHS,
    BASE,
    BEST,
    COMPILED,
    CUDNN,
    GRAPHS,
    LONG,
    MFU,
    PEAK,
    READY,
    RUNGS,
    SECONDS,
    TF32,
    settings_at,
)
from nanoray.bench.harness.report import Measurement, Report
from nanoray.bench.ladder import LOSS, PRODUCTS, TOKENS

TINY = "n_layer=1,n_head=2,n_embd=16,block_size=16,dropout=0.0,target_loss=9.0,max_steps=40,eval_every=20,compile=false"

ONLY_GPUS = {
    "(fp8)": "precision = fp8 is for GPUs",
    "(fp8 by row)": "precision = fp8 is for GPUs",
    "(cuDNN attention)": "attention = cudnn is for GPUs",
    "(CUDA graphs)": "compile = cuda_graphs is for GPUs",
}


@pytest.mark.full
@pytest.mark.parametrize(
    ("presets", "arms"),
    [
        ("shakespeare-char", (BASE, TF32, *ONLY_GPUS, "+ fused AdamW", BEST, BABY, BABY_GRAPHS)),
        pytest.param("shakespeare-char,gpt2-124m", (*RUNGS, BABY), marks=pytest.mark.full),
    ],
)
def test_rungs_and_the_baby_on_a_cpu(
    presets: str,
    arms: tuple[str, ...],
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, figure = tmp_path / "g.json", tmp_path / "g.png"
    flags = [
        "--device",
        "cpu",
        "--quick",
        "--settings",
        TINY,
        "--dataset",
        str(text),
        "--presets",
        presets,
    ]
    flags += ["--arms", ",".join(arms), "--data_dir", str(tmp_path / "cache")]
    assert bench.main(["step", "gpu", *flags, "--json", str(out), "--figure", str(figure)]) == 0
    rows: dict[tuple[str, str, str], dict[str, Any]] = {
        (r["arm"], r["metric"], r["unit"]): r for r in json.loads(out.read_text())["rows"]
    }
    for preset in presets.split(","):
        for rung in (arm for arm in arms if arm not in (TF32, BABY, BABY_GRAPHS)):
            name = f"{preset}: {rung}"
            if rung in ONLY_GPUS:
                assert rows[name, TOKENS, "1/s"]["skipped"] == ONLY_GPUS[rung]
                continue
            spaces = any(letter.isspace() for letter in sys.prefix)
            if rung in (BEST, LONG) and (COMPILED not in arms or spaces):
                assert rows[name, TOKENS, "1/s"]["skipped"] == "+ compile has no speed to choose by"
                continue
            if settings_at(rung)["compile"] and spaces:
                assert rows[name, TOKENS, "1/s"]["skipped"].startswith(
                    "compile = true cannot work on a CPU from"
                )
                continue
            assert rows[name, TOKENS, "1/s"]["n"] == rows[name, PEAK, "%"]["n"] == 2
            assert rows[name, TOKENS, "1/s"]["median"] > 0
            assert rows[name, READY, "s"]["median"] > 0
            assert (name, MFU, "%") not in rows, "no table has a CPU's peak"
            assert rows[name, LOSS, ""].get("wrong") == (
                None if "batch" in rung or rung in (BEST, LONG, "(larger heads)") else 0
            )
        assert rows[f"{preset}: {TF32}", TOKENS, "1/s"]["skipped"] == "precision = tf32 is for GPUs"
        assert rows[f"{preset}: {PRODUCTS} bf16", PRODUCTS, "TFLOP/s"]["median"] > 0
    other = "+ fused attention" if "+ fused attention" in arms else BASE
    assert (f"shakespeare-char: + fused AdamW / shakespeare-char: {other}", TOKENS, "ratio") in rows
    if BABY_GRAPHS in arms:
        skipped = rows[BABY_GRAPHS, SECONDS, "s"]["skipped"]
        assert skipped == "compile = cuda_graphs is for GPUs"
    assert rows[BABY, SECONDS, "s"]["n"] == 1
    assert rows[BABY, LOSS, ""]["median"] < 9
    assert figure.read_bytes()[:4] == b"\x89PNG"
    assert "\nshakespeare-char: + fused AdamW " in capsys.readouterr().out


def test_a_rung_keeps_what_those_before_it_have() -> None:
    assert settings_at(BASE) == RUNGS[BASE]
    last = settings_at("+ batch x 4")
    assert last == {
        "precision": "bf16",
        "attention": "flash",
        "compile": True,
        "loss_chunk": 0,
        "_unfused": False,
        "_batch": 4,
    }
    assert settings_at("+ bf16")["_unfused"]
    assert settings_at("(cuDNN attention)") == settings_at("+ compile") | {"attention": "cudnn"}
    assert settings_at("(CUDA graphs)") == settings_at("+ compile") | {"compile": "cuda_graphs"}
    others = gpu.before(list(RUNGS))
    assert others["+ fused AdamW"] == "+ fused attention"
    assert others["(cuDNN attention)"] == others["(CUDA graphs)"] == "+ compile"
    assert others["(chunked loss)"] == others["+ batch x 2"] == "+ compile"
    assert BASE not in others


@pytest.mark.parametrize(
    ("device", "text", "mfu", "baby"),
    [
        ("NVIDIA H100 80GB HBM3", "shakespeare", "ok", "MISSED"),
        (
            "NVIDIA H100 80GB HBM3",
            "stdlib",
            "ok",
            "does not apply: the loss is tiny Shakespeare's, and the text is stdlib",
        ),
        ("NVIDIA L4", "shakespeare", *["does not apply: the aim is for an H100 or H200"] * 2),
    ],
)
def test_verdicts_go_by_the_fastest_rung_and_the_slower_baby(
    device: str, text: str, mfu: str, baby: str
) -> None:
    """Float32 takes a larger share of its own, small peak, and is the slowest all the same."""
    report = Report("gpu", {"device": device})
    for rung, speed, share in (
        (BASE, 5.0, 65.0),
        ("+ bf16", 52.0, 52.0),
        ("+ compile", 49.0, 49.0),
    ):
        report.rows += [Measurement(f"gpt2-124m: {rung}", TOKENS, "1/s", (1e5 * speed,) * 5)]
        report.rows += [Measurement(f"gpt2-124m: {rung}", MFU, "%", (share,) * 5)]
    report.rows.append(
        Measurement(BABY, SECONDS, "s", (61.0,) * 5, extra={"missed": 0, "text": text})
    )
    gpu._add_targets(report, ["gpt2-124m"])
    assert [(t.text, t.verdict) for t in report.targets] == [
        ("MFU, gpt2-124m: + bf16, %", mfu),
        (f"{BABY}, s", baby),
    ]
    ratio = report.row("gpt2-124m: + bf16 / gpt2-124m: float32", TOKENS)
    assert ratio is not None
    assert ratio.median == pytest.approx(10.4)


def ladder_of(report: Report, budget_s: float = 1e9) -> gpu.GpuLadder:
    now = time.monotonic()
    args = argparse.Namespace(deadline=now + budget_s, budget_s=budget_s, json=None)
    anything: Any = None
    return gpu.GpuLadder(args, report, "gpt2-124m", anything, anything, Path(), {}, "cpu")


def test_the_best_rung_has_the_fastest_batch_and_what_gained() -> None:
    report = Report("gpu", {"device": "NVIDIA H100 80GB HBM3"})
    assert gpu._best_settings(ladder_of(report)) == {}
    speeds = {COMPILED: 100.0, CUDNN: 104.0, GRAPHS: 100.5, "+ batch x 2": 120.0}
    for rung, speed in speeds.items():
        report.rows.append(Measurement(f"gpt2-124m: {rung}", TOKENS, "1/s", (speed,) * 5))
    report.rows.append(
        Measurement("gpt2-124m: + batch x 4", TOKENS, "1/s", (), skipped="does not fit")
    )
    assert gpu._best_settings(ladder_of(report)) == {
        "_batch": 2,
        "attention": "cudnn",
        "_chosen": ["+ batch x 2", CUDNN],
    }

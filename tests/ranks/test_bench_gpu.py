"""bench gpu: its rungs on a CPU and a tiny model, what it refuses, and its verdicts by hand."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from nanoray.bench import __main__ as bench
from nanoray.bench import gpu
from nanoray.bench.gpu import (
    BABY,
    BASE,
    LOSS,
    MFU,
    PEAK,
    PRODUCTS,
    READY,
    RUNGS,
    SECONDS,
    TF32,
    TOKENS,
    settings_at,
)
from nanoray.bench.harness.report import Report, Row
from nanoray.errors import ConfigError

TINY = "n_layer=1,n_head=2,n_embd=16,block_size=16,dropout=0.0,target_loss=9.0,max_steps=40,eval_every=20,compile=false"

ONLY_GPUS = {
    "(cuDNN attention)": "attention = cudnn is for GPUs",
    "(CUDA graphs)": "compile = cuda_graphs is for GPUs",
}


@pytest.mark.parametrize(
    ("presets", "arms"),
    [
        ("shakespeare-char", (BASE, TF32, *ONLY_GPUS, "+ fused AdamW", BABY)),
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
    assert bench.main(["gpu", *flags, "--json", str(out), "--figure", str(figure)]) == 0
    rows: dict[tuple[str, str, str], dict[str, Any]] = {
        (r["arm"], r["metric"], r["unit"]): r for r in json.loads(out.read_text())["rows"]
    }
    for preset in presets.split(","):
        for rung in (arm for arm in arms if arm not in (TF32, BABY)):
            name = f"{preset}: {rung}"
            if rung in ONLY_GPUS:
                assert rows[name, TOKENS, "1/s"]["skipped"] == ONLY_GPUS[rung]
                continue
            if settings_at(rung)["compile"] and any(letter.isspace() for letter in sys.prefix):
                assert rows[name, TOKENS, "1/s"]["skipped"].startswith(
                    "compile = true cannot work on a CPU from"
                )
                continue
            assert rows[name, TOKENS, "1/s"]["n"] == rows[name, PEAK, "%"]["n"] == 2
            assert rows[name, TOKENS, "1/s"]["median"] > 0
            assert rows[name, READY, "s"]["median"] > 0
            assert (name, MFU, "%") not in rows, "no table has a CPU's peak"
            assert rows[name, LOSS, ""].get("wrong") == (
                None if "batch" in rung or "heads" in rung else 0
            )
        assert rows[f"{preset}: {TF32}", TOKENS, "1/s"]["skipped"] == "precision = tf32 is for GPUs"
        assert rows[f"{preset}: {PRODUCTS} bf16", PRODUCTS, "TFLOP/s"]["median"] > 0
    other = "+ fused attention" if "+ fused attention" in arms else BASE
    assert (f"shakespeare-char: + fused AdamW / shakespeare-char: {other}", TOKENS, "ratio") in rows
    assert rows[BABY, SECONDS, "s"]["n"] == 1
    assert rows[BABY, LOSS, ""]["median"] < 9
    assert figure.read_bytes()[:4] == b"\x89PNG"
    assert "| shakespeare-char: + fused AdamW | " in capsys.readouterr().out


def test_a_rung_keeps_what_those_before_it_have() -> None:
    assert settings_at(BASE) == RUNGS[BASE]
    last = settings_at("+ batch x 4")
    assert last == {
        "precision": "bf16",
        "attention": "flash",
        "compile": True,
        "loss_chunk": 4096,
        "_unfused": False,
        "_batch": 4,
    }
    assert settings_at("+ bf16")["_unfused"]
    assert settings_at("(cuDNN attention)") == settings_at("+ fused attention") | {
        "attention": "cudnn"
    }
    assert settings_at("(CUDA graphs)") == settings_at("+ compile") | {"compile": "cuda_graphs"}
    others = gpu.before(list(RUNGS))
    assert others["(cuDNN attention)"] == others["+ fused AdamW"] == "+ fused attention"
    assert others["(CUDA graphs)"] == others["+ chunked loss"] == "+ compile"
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
        report.rows += [Row(f"gpt2-124m: {rung}", TOKENS, "1/s", (1e5 * speed,) * 5)]
        report.rows += [Row(f"gpt2-124m: {rung}", MFU, "%", (share,) * 5)]
    report.rows.append(Row(BABY, SECONDS, "s", (61.0,) * 5, extra={"missed": 0, "text": text}))
    gpu._add_targets(report, ["gpt2-124m"])
    assert [(t.text, t.verdict) for t in report.targets] == [
        ("MFU, gpt2-124m: + bf16, %", mfu),
        (f"{BABY}, s", baby),
    ]
    ratio = report.row("gpt2-124m: + bf16 / gpt2-124m: float32", TOKENS)
    assert ratio is not None
    assert ratio.median == pytest.approx(10.4)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--device", "cuda"],
            "device = cuda, but NVIDIA's driver shows no GPU here; use --device cpu to try it out",
        ),
        (["--arms", "+ bf16"], "at least 1 round, and float32, are needed"),
        (["--rounds=-1"], "rounds = -1"),
        (["--presets", "gpt2"], "unknown preset gpt2; did you mean gpt2-124m?"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    flags: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu, "discover_gpus", list)
    assert bench.main(["gpu", *flags]) == ConfigError.exit_code
    assert re.search(re.escape(message), capsys.readouterr().err)

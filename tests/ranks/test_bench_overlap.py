"""The sweep of bucket sizes: a real run, a wrong gradient, and the finding worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import nanoray.bench.__main__ as bench
from nanoray.bench import overlap
from nanoray.bench.arm import gpt
from nanoray.bench.harness.report import Measurement, Report, ratio
from nanoray.bench.overlap import (
    BUSY,
    EXPOSED,
    NO_SYNC,
    STEP,
    OverlapBenchmark,
    _add_rows,
    arms_of,
)
from nanoray.config import load_config
from nanoray.config.layout import Layout
from nanoray.models.costs import count_parameters
from nanoray.models.gpt import ModelShape
from nanoray.parallel.mesh import Mesh

FLAGS = [
    "communication",
    "overlap",
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
def test_a_real_sweep(
    tmp_path: Path, shared_ranks: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Many small buckets, and one that holds all; both give the gradients of the first."""
    shared_ranks(overlap)
    files = [
        f"--{flag}={tmp_path / f'o.{end}'}" for flag, end in (("json", "json"), ("figure", "png"))
    ]
    assert bench.main([*FLAGS, "--workers", "3", "--buckets", "0.01,100", *files]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("OK  ")
    few = "no finding: n = 2, and fewer than 5 rounds"
    assert out.count(few) == 1
    shape = ModelShape.of(load_config(preset="tiny"), 65)
    recipe = json.loads((tmp_path / "o.json").read_text())["conditions"]["recipe"]
    assert recipe.startswith(f"GPT of {count_parameters(shape):,} parameters, 2 blocks of width 32")
    assert recipe.endswith(", preset tiny, 2 rounds of 2 steps, random tokens")
    rows = {
        (r["arm"], r["metric"], r["unit"]): r
        for r in json.loads((tmp_path / "o.json").read_text())["rows"]
    }
    for arm in ("0.01 MB", "100 MB"):
        assert rows[arm, STEP, "ms"]["wrong"] == 0
        assert 0 < rows[arm, EXPOSED, "ms"]["median"] <= rows[arm, BUSY, "ms"]["median"]
        assert rows[arm, STEP, "ms"]["n"] == rows[f"{arm} / {NO_SYNC}", STEP, "ratio"]["n"] == 2
    assert rows["100 MB", STEP, "ms"]["note"].startswith("1 bucket(s)")
    assert int(rows["0.01 MB", STEP, "ms"]["note"].split()[0]) > 3
    assert (tmp_path / "o.png").read_bytes()[:4] == b"\x89PNG"


def test_a_step_has_one_micro_batch_of_the_preset() -> None:
    arms = arms_of("gpt2-124m", [1.0, 25.0], 4)
    assert list(arms) == [NO_SYNC, "1 MB", "25 MB"]
    sizes = {(c.micro_batch_size, c.grad_accum_steps, c.global_batch_size) for c in arms.values()}
    assert sizes == {(12, 1, 0)}, (
        "a step of 480 sequences would hide its gradients behind 10 others"
    )
    assert [arm.bucket_mb for arm in arms.values()][1:] == [1.0, 25.0]


def test_the_tokens_are_of_the_configurations_whole_vocabulary() -> None:
    overrides = {"tokenizer": "gpt2", "n_embd": 16}
    config = load_config(preset="tiny", overrides=overrides)
    mesh = Mesh(0, 1, 0, torch.device("cpu"), "none", "", layout=Layout.of(config, 1))
    case = gpt(mesh, config, "fp32", 64)
    assert case.model.tok_emb.num_embeddings == 50304
    assert int(case.batch(0)[0].max()) > 40000


@pytest.mark.parametrize(("precision", "factor"), [("fp32", 1.001), ("fp32", 2.0), ("bf16", 1.02)])
def test_gradients_of_another_size_are_wrong(precision: str, factor: float) -> None:
    """Twice the gradient changes no update of AdamW, so the losses would not show it."""
    events: list[dict[str, Any]] = [
        {"step_ms": 1.0, "busy_ms": 0.5, "exposed_ms": 0.5, "largest": 4, "norm": 2.0}
    ]
    events[0] |= {"collectives": {"all_reduce gradients": (1, 4)}, "precision": precision}
    other = [events[0] | {"norm": 2.0 * factor}]
    report = Report("overlap", {})
    found: dict[str, Any] = {NO_SYNC: events, "1 MB": events, "25 MB": other}
    for arm, of_arm in found.items():
        _add_rows(report, arm, of_arm, found)
    wrong = {row.arm: row.wrong for row in report.rows if row.metric == STEP and row.unit == "ms"}
    assert wrong == {NO_SYNC: None, "1 MB": 0, "25 MB": 1}


def swept(times: dict[str, tuple[float, float, float]]) -> Report:
    """A report with (step, busy, exposed) ms of each arm, five rounds alike, and a bare step of 40
    ms.
    """
    bare = Measurement(NO_SYNC, STEP, "ms", (40.0,) * 5)
    report = Report("overlap", {}, [bare])
    for arm, (step, busy, exposed) in times.items():
        own = Measurement(arm, STEP, "ms", (step,) * 5)
        report.rows += [
            own,
            Measurement(arm, BUSY, "ms", (busy,) * 5),
            Measurement(arm, EXPOSED, "ms", (exposed,) * 5),
        ]
        report.rows += [
            ratio(f"{arm} / {NO_SYNC}", STEP, own, bare),
        ]
    return report


def test_the_finding_is_one_line_when_the_most_hidden_is_the_fastest() -> None:
    assert (
        len(OverlapBenchmark().notes(swept({"1 MB": (50.0, 10.0, 1.0), "25 MB": (55.0, 9.0, 9.0)})))
        == 1
    )


def test_a_table_for_the_readme() -> None:
    table = OverlapBenchmark().format_markdown(swept({"1 MB": (50.0, 10.0, 1.0)}))
    assert (
        table[3]
        == "| 1 MB | 50.0 (50.0–50.0) | 1.25 (1.25–1.25) | 10.0 (10.0–10.0) | 1.00 (1.00–1.00) |"
    )

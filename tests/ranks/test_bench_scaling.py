"""`python -m nanoray.bench scaling`: what it predicts beside a dry run, and a real quick run on 2 and 3
ranks.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from nanoray.bench import __main__ as bench
from nanoray.bench import scaling
from nanoray.bench.predicted import (
    ERROR,
    MEASURED,
    PREDICTED,
    FittedLinks,
    OneAlgorithm,
    predict_step,
    speed_of,
)
from nanoray.bench.scaling import RANKS
from nanoray.cli.forecast.links import MODELS, load_topology
from nanoray.cli.forecast.predict import Network, OnTopology, Speed
from nanoray.config import load_config
from nanoray.config.layout import Layout

CONFIG = load_config(preset="shakespeare-cpu")


def test_a_rank_alone_takes_what_was_measured_of_its_compute() -> None:
    speed = speed_of(CONFIG, {"forward_s": 1.0, "backward_s": 2.0, "update_s": 0.5}, 6)
    nothing = FittedLinks({}, {})
    for sequences, seconds in ((6, 3.5), (12, 6.5)):
        step = predict_step(CONFIG, Layout(), 6, nothing, speed, sequences=sequences)
        assert step.step_s == pytest.approx(seconds)


@pytest.mark.parametrize("ranks", [8, 64, 4096])
def test_the_best_all_reduce_is_that_of_a_dry_run_and_no_other_is_faster(ranks: int) -> None:
    config, topology = load_config(preset="gpt2-124m"), load_topology("nvlink-400g")
    speed = Speed.of(topology)

    def step_s(network: Network) -> float:
        return predict_step(config, Layout(dp=ranks), 12, network, speed, "cuda").step_s

    by_name = {name: step_s(OneAlgorithm(topology, name)) for name in ("best", *MODELS)}
    assert by_name["best"] == step_s(OnTopology(topology)) == min(by_name.values())
    assert by_name["ring"] >= by_name["best"]


@pytest.mark.full
def test_a_real_quick_run(
    tmp_path: Path, shared_ranks: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    shared_ranks(scaling)
    files = ["--json", str(tmp_path / "r.json"), "--figure", str(tmp_path / "r.svg")]
    argv = [
        "scaling",
        "--quick",
        "--device",
        "cpu",
        "--check",
        "3",
        "--steps",
        "2",
        "--rounds",
        "1",
    ]
    assert bench.main([*argv, *files]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("OK  ")
    for once in (
        r"^OK  ",
        r"^command  ",
        r"^target  .*, weak 3 ranks ",
        r"^step ms \(efficiency %\)",
    ):
        assert len(re.findall(once, out, re.MULTILINE)) == 1, once
    assert re.search(r"^weak 3 ranks +[\d.]+ +[\d.]+ +\d+ %$", out, re.MULTILINE)
    written = json.loads((tmp_path / "r.json").read_text())
    rows: dict[tuple[str, str], Any] = {(r["arm"], r["metric"]): r for r in written["rows"]}

    fits = [r for r in written["rows"] if r["metric"] == "alpha"]
    assert [r["arm"] for r in fits] == ["fit backend"]
    assert all(
        r["wrong"] == 0 and r["ranks"] == 2 and r["smallest_bytes"] < r["largest_bytes"]
        for r in fits
    )
    beta = rows["fit backend", "beta"]["median"] / 1e12
    alpha = rows["fit backend", "alpha"]["median"] / 1e6
    residuals = rows["fit backend", "residual"]
    for (nbytes, seconds), percent in zip(residuals["points"], residuals["values"], strict=True):
        assert 100 * abs((2 * alpha + nbytes * beta) / seconds - 1) == pytest.approx(
            percent, abs=1e-6
        )

    for arm, sequences in (("weak 2", 6), ("weak 3", 6), ("strong 3", 4)):
        measured, predicted, error = (rows[arm, metric] for metric in (MEASURED, PREDICTED, ERROR))
        assert measured["sequences"] == sequences
        assert error["median"] == pytest.approx(abs(predicted["median"] / measured["median"] - 1))
        assert 0 <= predicted["exposed_ms"] < predicted["median"]
    assert [t["target"] for t in written["targets"]] == [
        "error of the predicted step, weak 3 ranks",
        "error of the predicted step, strong 3 ranks",
    ]

    for topology in ("this-machine", "nvlink-400g", "ethernet-25g", "mig-slices"):
        weak = [rows[f"{topology} weak {n}", "efficiency"] for n in RANKS]
        assert weak[0]["median"] == pytest.approx(100)
        assert all(
            0 < r["median"] <= 100.0001
            and r["step_ms"]["best"] <= min(r["step_ms"].values()) + 1e-9
            for r in weak
        )
        assert rows[f"{topology} strong 4096", "efficiency"]["sequences"] == 1
        assert (f"{topology} strong 8192", "efficiency") not in rows
    assert (tmp_path / "r.svg").read_text().startswith("<?xml")
    assert dist.is_initialized() is False


def test_the_check_is_at_one_and_two_more() -> None:
    assert scaling._checks(None, 2) == [3, 4]
    assert scaling._checks(None, 4) == [5, 6]
    assert scaling._checks("8", 4) == [8]

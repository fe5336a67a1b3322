"""`python -m nanoray.bench precision`: each claim of docs/precision.md at small size, and
a real quick run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoray.bench import __main__ as bench
from nanoray.bench import precision
from nanoray.bench.precision_lab import (
    Lab,
    Training,
    compressed_mean,
    gradients,
    largest_scale,
    lost,
    move,
)
from nanoray.config import make_config
from nanoray.data.prepare import prepare
from nanoray.data.tokens import TokenData


@pytest.fixture(scope="module")
def lab(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    where = {"dataset": str(text), "data_dir": str(tmp_path_factory.mktemp("lab")), "max_steps": 40}
    config = make_config(precision.TINY | where | {"lr": 3e-3, "min_lr": 1e-5, "warmup_steps": 4})
    info = prepare(config)
    return Lab(config, TokenData(info, config.block_size, config.seed), info.vocab_size)


def test_scaling_cures_underflow_of_gradients_up_to_its_cap(lab: Lab) -> None:
    model, batch = lab.model(), lab.batch(0)
    exact = gradients(model, batch, "fp32")
    without = [lost(gradients(model, batch, "fp16", 2.0**-k), exact) for k in (0, 8, 16)]
    assert without == sorted(without)
    assert without[0] < 25
    assert without[2] > 50
    scale = largest_scale(model, batch, 2.0**-16)
    assert 2.0**16 < scale <= 2.0**24
    assert lost(gradients(model, batch, "fp16", scale * 2.0**-16), exact) < without[0]
    assert largest_scale(model, batch, 2.0**-40) == 2.0**24


def test_no_scale_cures_a_lost_update_but_masters_and_random_rounding_do(lab: Lab) -> None:
    weights = {name: p.detach() for name, p in lab.model().named_parameters()}
    went = {name: move(lab, weights, 1e-6, 8, **of)[1] for name, of in precision.UPDATES.items()}
    assert went["bf16_pure"] < 15
    assert went["fp16_pure"] < 50, "the gradients were scaled by 2^16"
    assert went["bf16_pure, stochastic"] == pytest.approx(100, abs=15)
    stuck, _ = move(lab, weights, 1e-6, 4, precision="fp16_pure")
    assert stuck > 50
    large = {name: move(lab, weights, 1e-2, 4, **of)[1] for name, of in precision.UPDATES.items()}
    assert all(far == pytest.approx(100, abs=10) for far in large.values()), large


def test_masters_go_the_whole_way_although_their_weights_show_less(lab: Lab) -> None:
    """The 16-bit weights are the masters rounded: after many updates the masters have moved, and
    then so do they.
    """
    weights = {name: p.detach() for name, p in lab.model().named_parameters()}
    few, many = (
        move(lab, weights, 1e-5, n, precision="bf16_pure", master_weights="fp32") for n in (1, 40)
    )
    assert many[0] < few[0]
    assert many[1] == pytest.approx(100, abs=10)


def test_means_in_16_bits_overflow_or_underflow_by_the_order() -> None:
    small, large = torch.full((100,), 2.0**-20), torch.full((100,), 2.0**14)
    both = torch.cat([small, large])
    assert compressed_mean(both, 2, "sum, then divide") == (0.0, 0.0)
    assert compressed_mean(both, 64, "sum, then divide") == (50.0, 0.0)
    assert compressed_mean(both, 64, "divide, then sum") == (0.0, 50.0)
    assert compressed_mean(torch.full((100,), 2.0**-18), 64, "by √n, twice") == (0.0, 0.0)


def test_scaled_gradients_can_be_divided_first_at_any_number_of_ranks(lab: Lab) -> None:
    """Scaling has moved them far from zero: next to nothing is lost, and nothing overflows."""
    exact = gradients(lab.model(), lab.batch(0), "fp32")
    flat = torch.cat([gradient.flatten() for gradient in exact.values()])
    scaled = flat * (2.0**14 / flat.abs().max())
    over, zero = compressed_mean(scaled, 4096, "divide, then sum")
    assert over == 0.0
    assert zero < 0.1
    assert compressed_mean(scaled, 4096, "sum, then divide")[0] > 10


@pytest.mark.parametrize("mode", precision.MODES)
def test_every_mode_learns_and_holds_what_the_formula_says(lab: Lab, mode: str) -> None:
    run = Training(lab, **precision.MODES[mode])
    for _ in range(12):
        run.step()
    assert run.losses[-1] < run.losses[0]
    assert sum(run.held.values()) == pytest.approx(run.formula["state"], rel=0.01)


@pytest.mark.full
def test_a_real_quick_run(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [
        f"--{flag}={tmp_path / f'r.{end}'}" for flag, end in (("json", "json"), ("figure", "svg"))
    ]
    assert bench.main(["precision", "--quick", "--dataset", str(text), *files]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("OK  ")
    written: dict[str, Any] = json.loads((tmp_path / "r.json").read_text())
    rows = {(r["arm"], r["metric"]) for r in written["rows"] if r["values"]}
    assert {
        (mode, metric) for mode in precision.MODES for metric in (precision.STEP, precision.STATE)
    } <= rows
    assert len(written["targets"]) == len(precision.MODES)
    assert "FAILED" not in out
    assert (tmp_path / "r.svg").read_text().startswith("<?xml")

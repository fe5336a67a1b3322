"""`python -m nanoray.bench precision`: each claim of docs/precision.md at small size, and
a real quick run.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoray.bench import __main__ as bench
from nanoray.bench import precision
from nanoray.bench.precision_lab import (
    Lab,
    Training,
    adam_in_fp16,
    attention_overflow,
    compressed_mean,
    gradients,
    largest_scale,
    life_of_a_scale,
    loss_error,
    lost,
    move,
    pieces_of,
    stream_error,
    subnormal,
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


def test_more_gradients_underflow_late_in_training_and_most_in_the_blocks(lab: Lab) -> None:
    """A table of each layer adds up to that of the whole model."""
    run, batch = Training(lab, precision="fp32"), lab.batch(1000)
    shares = []
    for _ in range(2):
        exact, half = (
            gradients(run.model, batch, "fp32"),
            gradients(run.model, batch, "fp16", 2.0**-4),
        )
        shares.append(lost(half, exact))
        while len(run.losses) < 40:
            run.step()
    assert 0 < 3 * shares[0] < shares[1]
    exact, half = gradients(run.model, batch, "fp32"), gradients(run.model, batch, "fp16", 2.0**-8)
    layers = {layer: lost(half, exact, layer) for layer in pieces_of(run.model)}
    assert layers["blocks.0"] > 10 > layers["norm"] == layers["pos_emb"] == 0.0
    assert subnormal(half, "blocks.0") > 10 * subnormal(half, "norm")
    assert (
        subnormal({"norm.weight": torch.tensor([0.0, 2.0**-15, -(2.0**-20), 2.0**-14])}, "norm")
        == 50.0
    )
    there = {
        layer: sum(int((g != 0).sum()) for n, g in exact.items() if n.startswith(layer))
        for layer in layers
    }
    whole = sum(layers[layer] * there[layer] for layer in layers) / sum(there.values())
    assert whole == pytest.approx(lost(half, exact))


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


def test_adam_in_fp16_is_wrong_below_the_root_of_its_smallest_number() -> None:
    assert adam_in_fp16(1e-1) == (0.0, 0.0)
    plain, scaled = adam_in_fp16(1e-5)
    assert plain == 100.0, "v is 0, and so is eps"
    assert scaled == 0.0
    assert adam_in_fp16(1e-7)[1] < 5


def test_attention_logits_overflow_where_the_scale_comes_late() -> None:
    assert set(attention_overflow(8.0).values()) == {0.0}
    found = attention_overflow(64.0)
    assert found["fp16, scaled after"] > 50
    assert found["fp16, scaled before"] == found["bf16, scaled after"] == 0.0
    assert attention_overflow(128.0)["fp16, scaled before"] > 50
    assert attention_overflow(128.0)["fp16, torch's kernel"] == 0.0, "its logits are float32"


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


def test_a_scale_falls_by_half_for_each_overflow_and_comes_back_slowly() -> None:
    scales = life_of_a_scale(5, 60, interval=20)
    assert scales[9] == 2.0**16
    assert min(scales) == scales[14] == 2.0**11
    assert scales[33] == 2.0**11
    assert scales[34] == 2.0**12


def test_eight_bits_in_the_stream_and_in_the_loss(lab: Lab) -> None:
    errors = {kind: stream_error(lab, 4, kind) for kind in precision.KINDS}
    assert errors["bf16"] < errors["bf16_pure"]
    assert errors["fp16_pure"] < errors["bf16_pure"] / 4
    deeper = {kind: stream_error(lab, 16, kind) for kind in precision.KINDS}
    assert deeper["bf16"] == pytest.approx(errors["bf16"], rel=0.2), "the stream is float32"
    assert deeper["bf16_pure"] > 1.5 * errors["bf16_pure"], "each block's sum is rounded"
    assert deeper["fp16_pure"] > 1.5 * errors["fp16_pure"]
    types = (torch.bfloat16, torch.float16, torch.float32)
    by_type = [
        max(loss_error(lab.model(), lab.batch(i), dtype) for i in range(4)) for dtype in types
    ]
    assert by_type == sorted(by_type, reverse=True)
    assert by_type[0] > 1e-3


@pytest.mark.parametrize("mode", precision.MODES)
def test_every_mode_learns_and_holds_what_the_formula_says(lab: Lab, mode: str) -> None:
    run = Training(lab, **precision.MODES[mode])
    for _ in range(12):
        run.step()
    assert run.losses[-1] < run.losses[0]
    assert sum(run.held.values()) == pytest.approx(run.formula["state"], rel=0.01)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--workers", "2"],
            "workers = 2, but this bench studies arithmetic in one process; drop --workers",
        ),
        (["--rounds", "0"], "rounds = 0; give a number above 0"),
        (["--steps", "1", "--rounds", "2"], "steps = 1, rounds = 2; at least one step a round"),
    ],
)
def test_wrong_flags_are_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(["precision", *flags]) == 2
    assert re.search(re.escape(message), capsys.readouterr().err)


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

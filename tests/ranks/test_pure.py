"""Weights of 16 bits on real ranks: they learn, resume to the bit, agree between modes, and skip on
all ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.axes import Runs, equal, final
from tests.harness.ranks import series

MODES: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16_pure"},
    "bf16, stochastic": {"precision": "bf16_pure", "rounding": "stochastic"},
    "bf16, masters": {"precision": "bf16_pure", "master_weights": "fp32"},
    "fp16": {"precision": "fp16_pure"},
    "fp16, masters": {"precision": "fp16_pure", "master_weights": "fp32"},
}
TYPES = {"bf16_pure": torch.bfloat16, "fp16_pure": torch.float16}


@pytest.fixture
def runs(text: Path, tmp_path: Path) -> Runs:
    return Runs(
        text,
        tmp_path,
        {"dropout": 0.1, "lr": 3e-3, "max_steps": 8, "global_batch_size": 12, "hash_every": 1},
    )


# bf16 with rounding to the nearest is also in test_another_seed_rounds_otherwise_and_nearest_too.
SLOW = ("bf16", "bf16, masters", "fp16", "fp16, masters")


@pytest.mark.parametrize(
    "mode", [pytest.param(m, marks=pytest.mark.full if m in SLOW else ()) for m in MODES]
)
def test_a_pure_run_resumes_to_the_bit_and_is_near_float32(runs: Runs, mode: str) -> None:
    """Two ranks over gloo, cut after step 4. All ranks compare their state after each step."""
    whole, _ = runs.resumed(2, 5, **MODES[mode])
    plain = runs.trained("fp32", 2, precision="fp32")
    assert series(whole) == pytest.approx(series(plain), rel=6e-2)
    assert series(whole) != series(plain)
    if not mode.startswith("fp16"):  # it skips its first steps until the scale fits
        assert series(whole)[8] < series(whole)[1]
    state = final(whole)
    kind = TYPES[MODES[mode]["precision"]]
    assert {t.dtype for t in state.model.values()} == {kind}
    kept = {name.partition(".")[0]: t.dtype for name, t in state.optimizer.items()}
    assert kept.pop("step") == torch.float32
    assert set(kept.values()) == {torch.float32 if "masters" in mode else kind}
    if mode == "bf16, masters":
        masters = {n: t for n, t in state.optimizer.items() if n.startswith("master.")}
        assert len(masters) == len(state.optimizer) / 4
        for name, master in masters.items():
            assert torch.equal(state.model[name.removeprefix("master.")], master.to(kind))


@pytest.mark.full
@pytest.mark.parametrize(
    ("settings", "ranks"),
    [
        pytest.param({"precision": "bf16"}, 1, marks=pytest.mark.full),
        pytest.param({"precision": "bf16"}, 2, marks=pytest.mark.full),
        pytest.param({"precision": "fp16"}, 1, marks=pytest.mark.full),
        ({"precision": "fp16"}, 2),
    ],
    ids=["bf16, one rank", "bf16", "fp16, one rank", "fp16"],
)
def test_a_run_under_autocast_resumes_to_the_bit(
    runs: Runs, settings: dict[str, Any], ranks: int
) -> None:
    """Weights and state stay float32; the loss scale of fp16 goes on where it was."""
    whole, _ = runs.resumed(ranks, 5, **settings)
    state = final(whole)
    assert {t.dtype for t in (*state.model.values(), *state.optimizer.values())} == {torch.float32}


@pytest.mark.full
@pytest.mark.parametrize(
    "settings",
    [MODES["bf16, stochastic"], pytest.param(MODES["fp16"], marks=pytest.mark.full)],
    ids=["bf16", "fp16"],
)
def test_modes_by_hand_have_the_same_bits(runs: Runs, settings: dict[str, Any]) -> None:
    """Slices of ZeRO draw the random bits of their own elements, so all modes round alike."""
    hand = runs.trained("hand", 2, dp_mode="ddp_by_hand", **settings)
    for mode in ("zero1", "zero2"):
        other = runs.trained(mode, 2, dp_mode=mode, **settings)
        assert series(other) == series(hand)
        assert equal(final(other), final(hand))


@pytest.mark.full
@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_products_of_8_bits_train_near_bf16_and_resume_to_the_bit(runs: Runs, scaling: str) -> None:
    whole, _ = runs.resumed(2, 5, precision="fp8", fp8_scaling=scaling)
    assert (
        "fp8 (asked for; emulated: operands are rounded to 8 bits and" in whole.log(0).read_text()
    )
    near = runs.trained("bf16", 2, precision="bf16")
    assert series(whole) == pytest.approx(series(near), rel=3e-2)
    assert series(whole) != series(near)
    assert {t.dtype for t in final(whole).model.values()} == {torch.float32}

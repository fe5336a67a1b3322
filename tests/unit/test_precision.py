"""The loss scaler against hand-worked cases; autocast where it should be."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nanoray.errors import TrainingDiverged
from nanoray.models.precision import LossScaler, autocast

CPU = torch.device("cpu")


def step(scaler: LossScaler, grad: float) -> float:
    """One SGD step of lr 1 with this (already unscaled) gradient; return the weight's change."""
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
    weight.grad = torch.tensor([grad])
    scaler.flag_nonfinite(weight.grad.norm(), torch.zeros(()))
    scaler.step([optimizer])
    return weight.item()


def test_a_good_step_updates_and_a_bad_one_does_not() -> None:
    scaler = LossScaler(CPU, enabled=True)
    assert step(scaler, 3.0) == -3.0
    assert scaler.read(1) == (2.0**16, 0, 1)
    assert step(scaler, float("inf")) == 0.0
    assert step(scaler, float("nan")) == 0.0
    assert scaler.read(3) == (2.0**14, 2, 0)


def test_adamw_state_does_not_move_on_a_skipped_step() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight], fused=True)
    scaler = LossScaler(CPU, enabled=True)
    for grad in (1.0, float("inf"), 1.0):
        weight.grad = torch.full((2,), grad)
        scaler.flag_nonfinite(weight.grad.norm(), torch.zeros(()))
        scaler.step([optimizer])
    state = optimizer.state[weight]
    assert state["step"].item() == 2
    assert torch.isfinite(state["exp_avg"]).all()
    assert torch.isfinite(weight).all()


def test_the_scale_grows_after_the_interval_and_has_a_cap() -> None:
    scaler = LossScaler(CPU, enabled=True)
    scaler.GROWTH_INTERVAL = 3
    for _ in range(3):
        step(scaler, 1.0)
    assert scaler.read(3) == (2.0**17, 0, 0)
    for _ in range(60):
        step(scaler, 1.0)
    assert scaler.read(63).scale == 2.0**24


def test_an_exhausted_scale_raises_and_says_why() -> None:
    scaler = LossScaler(CPU, enabled=True)
    for _ in range(17):
        step(scaler, float("inf"))
    with pytest.raises(
        TrainingDiverged,
        match=r"loss scale fell to 0.5 by step 17 \(17 steps skipped\).*precision bf16",
    ):
        scaler.read(17)


def test_state_survives_a_checkpoint() -> None:
    a, b = LossScaler(CPU, enabled=True), LossScaler(CPU, enabled=True)
    for grad in (float("inf"), 1.0, 1.0):
        step(a, grad)
    b.load_values(a.values())
    assert a.values() == b.values() == {"scale": 2.0**15, "good_steps": 2.0, "skipped": 1.0}


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_autocast_runs_products_in_its_type(precision: str, dtype: torch.dtype) -> None:
    with autocast("cpu", precision):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype

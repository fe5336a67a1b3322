"""SGD with momentum: against its formula, under names of its own in the state, and safe when fp16
skips a step.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanoray.checkpoint.state.optimizers import load_optimizer_tensors, optimizer_tensors
from nanoray.config import Config, make_config
from nanoray.models.precision import LossScaler
from nanoray.parallel.pieces import whole_shards
from nanoray.train.optim.groups import make_optimizer


def config(**values: Any) -> Config:
    return make_config(
        {"micro_batch_size": 1, "optimizer": "sgd", "lr": 0.1, "weight_decay": 0.01} | values
    )


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def gradients(step: int) -> list[Tensor]:
    source = torch.Generator().manual_seed(step)
    return [torch.randn(2, 3, generator=source), torch.randn(2, generator=source)]


@pytest.mark.parametrize("nesterov", [False, True])
def test_it_is_the_formula(nesterov: bool) -> None:
    """v = 0.9 v + g + decay·w on matrices; w -= lr·(g' + 0.9 v) with Nesterov, else lr·v. Vectors
    do not decay.
    """
    ours = model()
    optimizer = make_optimizer(ours, config(momentum=0.9, nesterov=nesterov))
    weights = [p.detach().clone().double() for p in ours.parameters()]
    sums = [torch.zeros_like(w) for w in weights]
    for step in range(4):
        for i, (p, g) in enumerate(zip(ours.parameters(), gradients(step), strict=True)):
            p.grad = g
            pull = g.double() + (0.01 * weights[i] if p.dim() > 1 else 0.0)
            sums[i] = 0.9 * sums[i] + pull
            weights[i] -= 0.1 * (pull + 0.9 * sums[i] if nesterov else sums[i])
        optimizer.step()
    for p, w in zip(ours.parameters(), weights, strict=True):
        assert torch.allclose(p.double(), w, atol=1e-6)


def test_the_state_has_names_and_loads_to_the_bit() -> None:
    first = model()
    optimizer, shards = make_optimizer(first, config(momentum=0.9)), whole_shards(first)
    saved: dict[str, Tensor] = {}
    weights: list[Tensor] = []
    for step in range(4):
        if step == 2:
            saved = {
                name: tensor.clone()
                for name, tensor in optimizer_tensors(optimizer, shards).items()
            }
            weights = [p.detach().clone() for p in first.parameters()]
        for p, g in zip(first.parameters(), gradients(step), strict=True):
            p.grad = g
        optimizer.step()
    assert saved.keys() == {"momentum_buffer.weight", "momentum_buffer.bias"}
    second = model()
    again, its = make_optimizer(second, config(momentum=0.9)), whole_shards(second)
    with torch.no_grad():
        for p, w in zip(second.parameters(), weights, strict=True):
            p.copy_(w)
    load_optimizer_tensors(again, its, saved)
    for step in (2, 3):
        for p, g in zip(second.parameters(), gradients(step), strict=True):
            p.grad = g
        again.step()
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True)
    )


def test_a_first_update_that_is_left_out_leaves_momentum_at_zero() -> None:
    ours = model()
    optimizer = make_optimizer(ours, config(momentum=0.9))
    scaler = LossScaler(torch.device("cpu"), enabled=False)
    before = [p.detach().clone() for p in ours.parameters()]
    for p, g in zip(ours.parameters(), gradients(0), strict=True):
        p.grad = g * torch.inf
    scaler.step([optimizer], leave_out=torch.ones(()))
    assert all(torch.equal(p, w) for p, w in zip(ours.parameters(), before, strict=True))
    assert all(
        not tensor.any() for tensor in optimizer_tensors(optimizer, whole_shards(ours)).values()
    )

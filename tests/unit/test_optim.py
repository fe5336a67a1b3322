"""Learning rates against closed forms, decay groups, scaling rules, and the optimizer's state on
disk.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from nanoray.checkpoint.state.optimizers import load_optimizer_tensors, optimizer_tensors
from nanoray.config import Config, make_config
from nanoray.parallel.norm import clip_to
from nanoray.parallel.pieces import whole_shards
from nanoray.train.optim.groups import lr_at, make_optimizer


def config(**values: object) -> Config:
    return make_config(
        {"global_batch_size": 12, "max_steps": 100, "warmup_steps": 10, "lr": 1.0, "min_lr": 0.1}
        | values
    )


def test_cosine() -> None:
    c = config()
    assert lr_at(0, c) == pytest.approx(1 / 11)
    assert lr_at(9, c) == pytest.approx(10 / 11)
    assert lr_at(10, c) == 1.0
    assert lr_at(55, c) == pytest.approx(0.55)  # half way: the mean of peak and end
    assert lr_at(100, c) == pytest.approx(0.1)
    assert lr_at(5000, c) == pytest.approx(0.1)


@pytest.mark.parametrize("norm", [0.5, 1.0, 3.0, math.inf, math.nan])
def test_clipping_gives_torch_s_bits(norm: float) -> None:
    ours, theirs = (
        [nn.Parameter(torch.zeros(7)), nn.Parameter(torch.zeros(2, 3))] for _ in range(2)
    )
    for p, q in zip(ours, theirs, strict=True):
        p.grad = torch.randn(p.shape)
        q.grad = p.grad.clone()
    clip_to(1.0, [p.grad for p in ours], torch.tensor(norm))
    nn.utils.clip_grads_with_norm_(theirs, 1.0, torch.tensor(norm))
    for p, q in zip(ours, theirs, strict=True):
        assert p.grad.isfinite().all(), (
            "the update is left out; NaN would stay where nothing is written again"
        )
        assert torch.equal(p.grad, q.grad) or not math.isfinite(norm)
    written = 1.0 <= norm < math.inf
    assert (ours[0].grad._version > 0) == written  # on a CPU small gradients are not written again


def test_warmup_stable_decay() -> None:
    c = config(schedule="wsd", decay_fraction=0.4)
    assert [lr_at(s, c) for s in (10, 30, 60)] == [1.0, 1.0, 1.0]
    assert lr_at(80, c) == pytest.approx(0.55)
    assert lr_at(100, c) == pytest.approx(0.1)


def test_matrices_decay_and_vectors_do_not() -> None:
    model = nn.Sequential(nn.Embedding(4, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    groups = make_optimizer(model, config(weight_decay=0.2)).param_groups
    assert [(g["weight_decay"], [p.dim() for p in g["params"]]) for g in groups] == [
        (0.2, [2, 2]),
        (0.0, [1, 1, 1]),
    ]
    assert all(g["fused"] for g in groups)


def test_state_goes_out_and_comes_back() -> None:
    torch.manual_seed(0)
    a, b = nn.Linear(3, 2), nn.Linear(3, 2)
    b.load_state_dict(a.state_dict())
    first, second = make_optimizer(a, config()), make_optimizer(b, config())
    x = torch.randn(5, 3)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(a, first)
    tensors = optimizer_tensors(first, whole_shards(a))
    assert sorted(tensors) == sorted(
        f"{k}.{n}" for k in ("exp_avg", "exp_avg_sq", "step") for n in ("weight", "bias")
    )
    b.load_state_dict(a.state_dict())
    load_optimizer_tensors(second, whole_shards(b), tensors)
    step(a, first)
    step(b, second)
    assert torch.equal(a.weight, b.weight)
    assert tensors["step.weight"].item() == 2, "optimizer_tensors gives the live state, not a copy"


def test_moments_of_a_number_follow_it_and_groups_may_keep_different_things() -> None:
    """AdamW's moments of a parameter without dimensions have none, as `step` has."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.linear = (
                nn.Parameter(torch.tensor(2.6, dtype=torch.float64)),
                nn.Linear(2, 2),
            )

    def adamw() -> torch.optim.AdamW:
        groups = [
            {"params": [model.scale], "amsgrad": True},
            {"params": [*model.linear.parameters()]},
        ]
        return torch.optim.AdamW(groups, lr=0.1)

    model = Scaled()
    optimizer, again = adamw(), adamw()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    saved = {
        name: tensor.float()
        for name, tensor in optimizer_tensors(optimizer, whole_shards(model)).items()
    }
    load_optimizer_tensors(again, whole_shards(model), saved)
    assert again.state[model.scale]["exp_avg"].dtype == torch.float64
    assert again.state[model.scale]["step"].dtype == torch.float32

"""Dropout by nanoray's own masks: their share, scale, seeds, and what they do not depend on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nanoray.models.dropout import dropout, seed_generators

CPU = torch.device("cpu")


def kept(x: Tensor, p: float, seed: int = 1) -> Tensor:
    seed_generators(seed, CPU)
    return dropout(x, p) != 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("p", [0.1, 0.2, 0.5, 0.9])
def test_the_share_and_the_scale(dtype: torch.dtype, p: float) -> None:
    """A share of 100,000 numbers is within five standard deviations; what stays is scaled, and so
    is its gradient.
    """
    x = torch.ones(250, 400, dtype=dtype, requires_grad=True)
    seed_generators(1, CPU)
    y = dropout(x, p)
    left_out = (y == 0).double().mean().item()
    assert abs(left_out - p) < 5 * (p * (1 - p) / x.numel()) ** 0.5
    scale = y[y != 0]
    assert scale.unique().numel() == 1
    assert scale[0].item() == pytest.approx(1 / (1 - p), rel=max(torch.finfo(dtype).eps, 2e-4))
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, y.detach())


def test_neighbours_do_not_know_each_other() -> None:
    """Four numbers share a draw: each pair of them is left out together as often as chance has it."""
    masks = kept(torch.ones(100_000, 4), 0.5).double()
    together = masks.T @ masks / len(masks)
    expected = torch.full((4, 4), 0.25, dtype=torch.float64).fill_diagonal_(0.5)
    assert (together - expected).abs().max() < 5 * (0.25 / len(masks)) ** 0.5


def test_a_mask_depends_on_the_seed_and_not_on_type_or_layout() -> None:
    x = torch.ones(7, 5, 3)
    mask = kept(x, 0.4)
    assert torch.equal(kept(x.bfloat16(), 0.4), mask)
    assert torch.equal(kept(torch.ones(3, 5, 7).transpose(0, 2), 0.4), mask)
    assert not torch.equal(kept(x, 0.4, seed=2), mask)

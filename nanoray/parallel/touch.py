"""Reach parameters by a backward that computes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class _Touch(torch.autograd.Function):
    """Ends a graph at some parameters, without a gradient of theirs."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, *params: Tensor) -> Tensor:
        ctx.inputs = 1 + len(params)
        return start.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (None,) * ctx.inputs


def touch(params: Sequence[nn.Parameter]) -> None:
    """Run a backward that ends at `params`, with undefined gradients.

    What waits for a gradient of each parameter, as torch's DDP does, is called; `.grad` stays.
    """
    # A parameter that the script has frozen since the run began has no place in a graph.
    frozen = [p for p in params if not p.requires_grad]
    for p in frozen:
        p.requires_grad_(True)
    start = torch.zeros((), requires_grad=True)
    _Touch.apply(start, *params).backward()
    for p in frozen:
        p.requires_grad_(False)

"""Tensor parallelism of a mixture of experts (models/moe.py): a rank has some hidden units of every
expert.

    x (B, T, C) ─┬─ router, the same on all ranks ─ gates g ─●
                 │                                           │
                 ●─ by expert ─ ▒ up 0 ─ GELU ─ ▒ down 0 ─ Σ g·y ─ Σ ─ y (B, T, C)
                                ░ up 0 ─ GELU ─ ░ down 0 ─ Σ g·y ─┘

    up.weight (E, hidden, C), its biases, and down.weight (E, C, hidden) are cut along the hidden units

Each rank routes all tokens and gets the same gates. Its results are a part of each sum, and so is
its gradient of the gates: it is summed at ●, as that of the tokens is. The gradient of the router's
own losses is complete on every rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nanoray.models.moe import MoE, Stacked
from nanoray.parallel.axis import Axis
from nanoray.parallel.residual_stream import enter, leave, whole


class StackedColumn(Stacked):
    """Some outputs of every expert's layer."""

    axis: Axis


class StackedRow(Stacked):
    """All outputs of every expert's layer, from some of its inputs; the first rank adds the biases."""

    axis: Axis

    def layers(self) -> list[tuple[Tensor, Tensor | None]]:
        weights = self.weight.unbind(0)  # (C, hidden/tp) each
        biases: list[Tensor | None] = [None] * len(weights)
        if self.bias is not None:
            biases = list(_Once.apply(self.bias, self.axis).view(len(weights), -1).unbind(0))
        return list(zip(weights, biases, strict=True))


class _Once(torch.autograd.Function):
    """A bias that is added before the sum over the ranks, so only the first rank adds it.

    Its gradient is the same on all ranks.
    """

    @staticmethod
    def forward(ctx: Any, bias: Tensor, axis: Axis) -> Tensor:
        return bias if axis.index == 0 else torch.zeros_like(bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


class SplitExperts(MoE):
    """A mixture of experts, with some hidden units of each.

    One sum over the ranks adds up the results of all experts of a token.
    """

    tensor: Axis
    sequence = False

    def _logits(self, x: Tensor) -> Tensor:
        # Each rank rates its own positions, but balance is that of a whole sequence.
        logits = super()._logits(x)
        return whole(logits, self.tensor) if self.sequence else logits  # (B, T, E)

    @torch.compiler.disable
    def mix(self, x: Tensor, gates: Tensor, chosen: Tensor) -> Tensor:
        x = enter(x, self.tensor, self.sequence)
        gates = enter(gates, self.tensor)
        y = super().mix(x, gates, chosen)
        return leave(y, self.tensor, self.sequence)

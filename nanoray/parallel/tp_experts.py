"""Tensor parallelism of a mixture of experts (models/moe.py): a rank has some hidden units of every
expert.

    x (B, T, C) ─┬─ router, the same on all ranks ─ gates g ─●
                 │                                           │
                 ●─ by expert ─ ▒ up 0 ─ GELU ─ ▒ down 0 ─ Σ g·y ─ Σ ─ y (B, T, C)
                                ░ up 0 ─ GELU ─ ░ down 0 ─ Σ g·y ─┘

    up.weight (E, hidden, C) and its biases are cut along the hidden units, down.weight (E, C, hidden) alike

Each rank routes all tokens and gets the same gates. Its results are a part of each sum, and so is
its gradient of the gates: it is summed at ●, as that of the tokens is. What the router's own losses
add is whole on every rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nanoray.mesh.axis import Axis
from nanoray.models.moe import MoE, Stacked
from nanoray.parallel.stream import enter, leave, whole


class StackedColumn(Stacked):
    """Some outputs of every expert's layer."""

    axis: Axis


class StackedRow(Stacked):
    """All outputs of every expert's layer, from some of its inputs; the first rank adds the biases."""

    axis: Axis

    def layers(self) -> list[tuple[Tensor, Tensor | None]]:
        weights, biases = self.weight.unbind(0), [None] * len(self.weight)
        if self.bias is not None:
            biases = _Once.apply(self.bias, self.axis).view(len(weights), -1).unbind(0)
        return [*zip(weights, biases, strict=True)]


class _Once(torch.autograd.Function):
    """A bias where results are still to be summed: forward on the first rank alone. All get its
    gradient, the same.
    """

    @staticmethod
    def forward(ctx: Any, bias: Tensor, axis: Axis) -> Tensor:
        return bias if axis.index == 0 else torch.zeros_like(bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


class SplitExperts(MoE):
    """A mixture of experts, with some hidden units of each. One sum adds up the results of all of a
    token's experts.
    """

    tensor: Axis
    sequence = False

    def _logits(self, x: Tensor) -> Tensor:
        logits = super()._logits(x)
        # (B, T, E): balance is that of a whole sequence
        return whole(logits, self.tensor) if self.sequence else logits

    @torch.compiler.disable
    def mix(self, x: Tensor, gates: Tensor, chosen: Tensor, kept: Tensor | None) -> Tensor:
        y = super().mix(
            enter(x, self.tensor, self.sequence), enter(gates, self.tensor), chosen, kept
        )
        return leave(y, self.tensor, self.sequence)

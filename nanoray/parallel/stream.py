"""Where the residual stream enters layers that are cut over an axis, and where their results leave
them.

tp = 2, a sequence of 8 positions; ▒ are those of rank 0, ░ of rank 1, █ of both:

    whole on every rank                                  --sequence_parallel: cut along the sequence

    ████████ ─ norm ─●─ ▒ heads ─ Σ ─ + x                ▒▒▒▒ ─ norm ─┐          ┌─ ▒▒▒▒ ─ + x
    ████████ ─ norm ─●─ ░ heads ─ Σ ─ + x                              ● ████████ Σ
                                                         ░░░░ ─ norm ─┘          └─ ░░░░ ─ + x

    enter ●    forward     nothing                       all-gather along the sequence
               backward    sum over the ranks            reduce-scatter: the sum, of own positions
    leave Σ    forward     sum over the ranks            reduce-scatter
               backward    nothing                       all-gather
    whole      forward                                   all-gather, where all ranks go on to compute the same
               backward                                  own positions of the gradient

The bytes are the same: an all-reduce is a reduce-scatter and an all-gather. But norms, dropouts and
residual sums work on 1/tp of the positions and keep as much less for backward. Their parameters,
and biases that are added after Σ, so have the gradient of own positions only: it is summed over the
axis once per step (plan.py). The stream's dropout draws the mask of the whole sequence on every
rank and takes its own part, so the masks are those without it.

In a compiled block the collectives run eagerly, and what lies between them is compiled. For tp.py
and tp_experts.py. Source: Shoeybi et al. 2019, Megatron-LM; Korthikanti et al. 2022, Reducing
Activation Recomputation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nanoray.errors import ConfigError
from nanoray.mesh.axis import Axis
from nanoray.models.dropout import Dropout, dropout


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.axis.sum(
            grads[0].clone(memory_format=torch.contiguous_format), "activations"
        ), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        # A copy: activation checkpointing may have kept x itself
        return axis.sum(x.clone(), "activations")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


class _EnterCut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _gathered(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _scattered(grads[0], ctx.axis), None


class _LeaveCut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _scattered(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _gathered(grads[0], ctx.axis), None


class _Whole(_EnterCut):
    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return own_positions(grads[0], ctx.axis), None


@torch.compiler.disable
def enter(x: Tensor, axis: Axis, sequence: bool = False) -> Tensor:
    """Return x (B, T, C), equal on all ranks, for each rank to compute something else with it. (all
    ranks of the axis)

    `sequence`: x has the rank's own positions, (B, T/tp, C).
    """
    return (_EnterCut if sequence else _Enter).apply(x, axis)


@torch.compiler.disable
def leave(x: Tensor, axis: Axis, sequence: bool = False) -> Tensor:
    """Return the sum of what the ranks have computed (B, T, C), equal on all ranks. (all ranks of
    the axis)

    `sequence`: return the rank's own positions of it, (B, T/tp, C).
    """
    return (_LeaveCut if sequence else _Leave).apply(x, axis)


@torch.compiler.disable
def whole(x: Tensor, axis: Axis) -> Tensor:
    """Return x (B, T, C), given own positions of it, for all ranks to compute the same. (all ranks
    of the axis)
    """
    return _Whole.apply(x, axis)


def own_positions(x: Tensor, axis: Axis) -> Tensor:
    """Return a copy of this rank's positions (B, T/tp, ...) of x (B, T, ...)."""
    own = x.shape[1] // axis.size
    return x.narrow(1, axis.index * own, own).clone(memory_format=torch.contiguous_format)


def _gathered(x: Tensor, axis: Axis) -> Tensor:
    parts = x.new_empty(axis.size, *x.shape)  # (tp, B, T/tp, ...)
    parts[axis.index] = x
    axis.start_all_gather(parts.view(-1), "activations")()
    return parts.movedim(0, 1).flatten(1, 2)


def _scattered(x: Tensor, axis: Axis) -> Tensor:
    parts = x.unflatten(1, (axis.size, -1)).movedim(1, 0).contiguous()  # (tp, B, T/tp, ...)
    out = torch.empty_like(parts[0])
    with axis.noted("reduce_scatter", "activations", parts):
        axis.start_reduce_scatter(parts.view(-1), "activations")(out.view(-1))
    return out


def require_whole(positions: int, axis: Axis) -> None:
    """Raise ConfigError when the ranks cannot share so many positions equally."""
    if positions % axis.size:
        raise ConfigError(
            f"sequence_parallel cuts sequences over tp = {axis.size} ranks, which does not divide "
            f"{positions} "
            f"positions; use sequences of {-(-positions // axis.size) * axis.size}, or drop "
            "sequence_parallel"
        )


class CutDropout(Dropout):
    """Dropout of the rank's own positions: of the whole sequence's mask, which all ranks draw
    alike, its part.
    """

    axis: Axis

    def forward(self, x: Tensor) -> Tensor:
        """Return x (B, T/tp, C) with the masks that x (B, T, C) would have without
        --sequence_parallel.
        """
        if not (self.training and self.p > 0):
            return x
        B, own, C = x.shape
        return x * own_positions(dropout(x.new_ones(B, own * self.axis.size, C), self.p), self.axis)

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
    whole      forward                                   all-gather, where all ranks compute the same from here on
               backward                                  own positions of the gradient

The bytes are the same: an all-reduce is a reduce-scatter and an all-gather. But norms, dropouts and
residual sums work on 1/tp of the positions and keep as much less for backward. The parameters of
norms, and biases that are added after Σ, have the gradient of own positions only: it is summed over
the axis once per step (PartialGradients). The stream's dropout draws the mask of the whole sequence
on every rank and takes its own part, so the masks are those without --sequence_parallel.

In a compiled block the collectives run eagerly, and what lies between them is compiled. For tp.py
and tp_experts.py. Source: Shoeybi et al. 2019, Megatron-LM; Korthikanti et al. 2022, Reducing
Activation Recomputation.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from nanoray.errors import ConfigError
from nanoray.models.dropout import Dropout, dropout
from nanoray.parallel.axis import Axis
from nanoray.parallel.hooks import StepHook
from nanoray.parallel.pieces import Shard


class _Enter(torch.autograd.Function):
    """The stream is whole: nothing in forward, a sum in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        # A copy: the sum is in place, and autograd may use this gradient elsewhere.
        gradient = grads[0].clone(memory_format=torch.contiguous_format)
        return ctx.axis.sum(gradient, "activations"), None


class _Leave(torch.autograd.Function):
    """The stream is whole: a sum in forward, nothing in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        # A copy: activation checkpointing may have kept x itself
        return axis.sum(x.clone(), "activations")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


class _EnterCut(torch.autograd.Function):
    """The stream is cut along the sequence: an all-gather, and in backward a reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _gathered(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _scattered(grads[0], ctx.axis), None


class _LeaveCut(torch.autograd.Function):
    """The stream is cut along the sequence: a reduce-scatter, and in backward an all-gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _scattered(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _gathered(grads[0], ctx.axis), None


class _Whole(_EnterCut):
    """An all-gather whose results are equal on all ranks: so are their gradients, and each rank
    takes those of its own positions.
    """

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return own_positions(grads[0], ctx.axis), None


@torch.compiler.disable
def enter(x: Tensor, axis: Axis, sequence: bool = False) -> Tensor:
    """Return x (B, T, C), equal on all ranks, as the input of layers that are cut.

    (all ranks of the axis) `sequence`: x has the rank's own positions, (B, T/tp, C).
    """
    return (_EnterCut if sequence else _Enter).apply(x, axis)


@torch.compiler.disable
def leave(x: Tensor, axis: Axis, sequence: bool = False) -> Tensor:
    """Return the sum of x (B, T, C) over the ranks, equal on all of them.

    (all ranks of the axis) `sequence`: return the rank's own positions of it, (B, T/tp, C).
    """
    return (_LeaveCut if sequence else _Leave).apply(x, axis)


@torch.compiler.disable
def whole(x: Tensor, axis: Axis) -> Tensor:
    """Return x (B, T, C), given own positions of it, as the input of layers that are not cut.

    (all ranks of the axis)
    """
    return _Whole.apply(x, axis)


def own_positions(x: Tensor, axis: Axis) -> Tensor:
    """Return a copy of this rank's positions (B, T/tp, ...) of x (B, T, ...)."""
    own = x.shape[1] // axis.size
    return x.narrow(1, axis.index * own, own).clone(memory_format=torch.contiguous_format)


def _gathered(x: Tensor, axis: Axis) -> Tensor:
    """Return all positions (B, T, ...), given own ones (B, T/tp, ...)."""
    parts = x.new_empty(axis.size, *x.shape)  # (tp, B, T/tp, ...)
    parts[axis.index] = x
    axis.start_all_gather(parts.view(-1), "activations")()
    return parts.movedim(0, 1).flatten(1, 2)


def _scattered(x: Tensor, axis: Axis) -> Tensor:
    """Return own positions (B, T/tp, ...) of the sum of x (B, T, ...) over the ranks."""
    parts = x.unflatten(1, (axis.size, -1)).movedim(1, 0).contiguous()  # (tp, B, T/tp, ...)
    out = torch.empty_like(parts[0])
    with axis.noted("reduce_scatter", "activations", parts):
        axis.start_reduce_scatter(parts.view(-1), "activations")(out.view(-1))
    return out


def require_whole(positions: int, axis: Axis) -> None:
    """Raise ConfigError when the ranks cannot share `positions` equally."""
    if positions % axis.size:
        longer = -(-positions // axis.size) * axis.size
        raise ConfigError(
            f"sequence_parallel cuts sequences over tp = {axis.size} ranks, which does not divide "
            f"{positions} positions; use sequences of {longer}, or drop sequence_parallel"
        )


class CutDropout(Dropout):
    """Dropout of the rank's own positions: its part of the mask that all ranks draw."""

    axis: Axis

    def forward(self, x: Tensor) -> Tensor:
        """Return x (B, T/tp, C) with the masks that x (B, T, C) would have without
        --sequence_parallel.
        """
        if not (self.training and self.p > 0):
            return x
        B, own, C = x.shape
        mask = dropout(x.new_ones(B, own * self.axis.size, C), self.p)  # (B, T, C)
        return x * own_positions(mask, self.axis)


class PartialGradients(StepHook):
    """Adds up gradients of which each rank of the axis has the part of its own positions."""

    def __init__(self, shards: Sequence[Shard], names: Collection[str], axis: Axis) -> None:
        """names: the parameters with such gradients, among those of `shards`."""
        self._params = [shard.param for shard in shards if shard.piece.name in names]
        self._axis = axis

    def add_up(self) -> None:
        """Sum the gradients over the axis, in one message. (all ranks of a replica)"""
        gradients = [p.grad for p in self._params if p.grad is not None]
        if not gradients:
            return
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        total = self._axis.sum(flat, "gradients")
        parts = total.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

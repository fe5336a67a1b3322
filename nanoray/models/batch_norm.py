"""Batch normalisation (Ioffe & Szegedy 2015) that updates its running statistics with the weights.

torch's BatchNorm2d changes its running statistics in the forward pass. A step that breaks and is
repeated, a replay or a warm-up would change them twice, and under data parallelism they would
differ from rank to rank. Here a forward pass in training only adds to `pending`;
parallel/running_statistics.py averages that over micro batches and ranks, and updates the running
statistics together with the weights. So they are equal on all ranks after every step, like the
weights: evaluation, checkpoints, hashes and the copy for a new rank need no rule of their own.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoray.errors import ConfigError
from nanoray.machine.compat import BatchNormBase


class Summing(Protocol):
    """The ranks that share a batch (parallel/axis.py)."""

    @property
    def size(self) -> int:
        """Return the number of ranks."""

    def sum(self, tensor: Tensor, what: str) -> Tensor:
        """Add a tensor up over all ranks, in place, and return it."""


class BatchNorm(nn.Module):
    """Normalise each channel of (B, C, ...) by its mean and variance in this rank's micro batch.

    With an `axis`, by those of the micro batches of all its ranks together. Evaluation uses the
    running statistics. `adopt_norms` gives this forward to a norm of torch's, with any of its options,
    which has made the weights and the running statistics.
    """

    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None
    pending: Tensor
    passes: Tensor
    momentum: float | None
    eps: float
    track_running_stats: bool
    axis: Summing | None
    always_synchronised: bool

    def prepare(self, always_synchronised: bool) -> None:
        """Add what the running statistics need to change with the weights."""
        self.axis = None
        self.always_synchronised = always_synchronised  # also without sync_batchnorm
        # The sums of mean and unbiased variance over the forward passes of this step, (2, C), and
        # the number of these passes. Not part of the state. Sums of 16 bits would lose digits.
        running = torch.zeros(0) if self.running_mean is None else self.running_mean
        dtype = torch.promote_types(running.dtype, torch.float32)
        pending = running.new_zeros(2, running.numel(), dtype=dtype)
        self.register_buffer("pending", pending, persistent=False)
        self.register_buffer("passes", running.new_zeros(1, dtype=dtype), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        running = self.running_mean
        if not self.training and running is not None:
            return F.batch_norm(x, running, self.running_var, self.weight, self.bias, eps=self.eps)
        statistics = mean = var = None
        if self.training and self.track_running_stats and running is not None:
            # (2, C): mean and variance of this batch
            statistics = torch.zeros_like(self.pending, dtype=running.dtype)
            mean = statistics[0]
            var = statistics[1]
        if not self.training or self.axis is None or self.axis.size == 1:
            # With momentum 1 the "running" statistics that it writes are those of this batch.
            y = F.batch_norm(
                x, mean, var, self.weight, self.bias, training=True, momentum=1.0, eps=self.eps
            )
        else:
            y = _synchronised(x, self.weight, self.bias, statistics, self.eps, self.axis)
        # Only noted here; `update` applies it when the weights change.
        if statistics is not None:
            with torch.no_grad():
                self.pending += statistics
                self.passes += 1
        return y  # (B, C, ...)

    @torch.no_grad()
    def update(self, mean: Tensor, var: Tensor, good: Tensor) -> None:
        """Move the running statistics towards mean and var, (C,), if `good`, a boolean scalar."""
        if self.num_batches_tracked is not None:
            self.num_batches_tracked += good
        momentum: float | Tensor = 0.0
        if self.momentum is not None:
            momentum = self.momentum
        elif self.num_batches_tracked is not None:
            momentum = 1 / self.num_batches_tracked.clamp(min=1)  # a mean over all steps
        # Without a branch on `good`, so the host need not wait for the device.
        for running, new in ((self.running_mean, mean), (self.running_var, var)):
            if running is not None:  # a script may have removed them
                running.copy_(torch.where(good, running + momentum * (new - running), running))


def adopt_norms(model: nn.Module) -> None:
    """Turn torch's batch norms in a model into this kind, in place.

    Each stays the same object, so that references to it, its hooks and its attributes go on to
    work. Raises ConfigError for a norm that cannot be adopted.
    """
    for name, module in model.named_modules():
        if isinstance(module, BatchNormBase) and not has_own_forward(module):
            _adopt(module, name)


def has_own_forward(norm: BatchNormBase) -> bool:
    """Whether a norm computes something else than torch's, as one with an activation does.

    Its buffers are then those of rank 0, like any buffer that a forward changes.
    """
    torchs = (BatchNormBase.forward, nn.SyncBatchNorm.forward)
    return type(norm).forward not in torchs or "forward" in vars(norm)


def _adopt(norm: BatchNormBase, name: str) -> None:
    is_synchronised = isinstance(norm, nn.SyncBatchNorm)
    if is_synchronised and getattr(norm, "process_group", None) is not None:
        raise ConfigError(
            f"{name or 'the model'} is a SyncBatchNorm with a process_group of its own, which does "
            "not outlive a lost rank; drop process_group: it then synchronises over all ranks of "
            "the data"
        )
    # torch's DDP refuses a SyncBatchNorm on CPUs, and prepares it for exchanges of its own on GPUs.
    kind: Any = BatchNormBase if is_synchronised else type(norm)
    norm.__class__ = _kind_of(kind, type(norm).__name__)
    assert isinstance(norm, BatchNorm)
    norm.prepare(is_synchronised)


@cache
def _kind_of(kind: type[nn.Module], name: str) -> Any:
    """Return a class of torch's norms with the forward above, under its name."""
    return type(name, (BatchNorm, kind), {"__module__": kind.__module__})


@torch.compiler.disable  # a compiled graph ends before the exchange and goes on after it
def _synchronised(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: Tensor | None,
    eps: float,
    axis: Summing,
) -> Tensor:
    return Synchronised.apply(x, weight, bias, statistics, eps, axis)


class Synchronised(torch.autograd.Function):
    """Batch normalisation over the micro batches of an axis' ranks: one sum forward, one backward.

    With x̂ = (x - mean) / std and m elements of a channel on all ranks together:

        y  = w·x̂ + b
        dx = w / std · (dy - Σdy / m - x̂ · Σ(dy·x̂) / m)
        dw = Σ(dy·x̂)
        db = Σdy

    The sums of dx run over all ranks. Those of dw and db run over this rank's elements only,
    because the ranks add up the gradients of parameters later, as those of any other layer.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        statistics: Tensor | None,
        eps: float,
        axis: Summing,
    ) -> Tensor:
        """Return y (B, C, ...); write mean and unbiased variance to `statistics`, (2, C).

        (all ranks of the axis)
        """
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        x64 = wide.double()
        channels = x.shape[1]
        others = [dim for dim in range(x.dim()) if dim != 1]  # all but that of the channels
        per_channel = (-1, *[1] * (x.dim() - 2))  # the shape of (C,) beside x

        # In float64, because E[x²] - E[x]² loses digits, and squares about the common mean need a
        # second exchange.
        count = x64.new_full((channels,), float(x.numel() // channels))
        own = torch.stack([x64.sum(others), x64.square().sum(others), count])  # (3, C)
        total, squares, m = axis.sum(own, "batchnorm")  # (C,) each
        # The mean and variance of all ranks' elements, and the unbiased one for evaluation.
        mean = total / m
        var = (squares / m - mean.square()).clamp(min=0.0)
        if statistics is not None:
            statistics[0] = mean
            statistics[1] = var * m / (m - 1)

        inv_std = (var + eps).rsqrt().to(wide.dtype)
        centered = wide - mean.to(wide.dtype).view(per_channel)
        x_hat = centered * inv_std.view(per_channel)  # (B, C, ...)
        ctx.save_for_backward(x_hat, weight, inv_std, m.to(wide.dtype))
        ctx.axis = axis
        y = x_hat
        if weight is not None:
            y = y * weight.view(per_channel)
        if bias is not None:
            y = y + bias.view(per_channel)
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the gradients of x, weight and bias. (all ranks of the axis)"""
        x_hat, weight, inv_std, m = ctx.saved_tensors
        dy = grads[0].to(x_hat.dtype)
        others = [dim for dim in range(dy.dim()) if dim != 1]
        per_channel = (-1, *[1] * (dy.dim() - 2))
        db = dy.sum(others)  # (C,)
        dw = (dy * x_hat).sum(others)  # (C,)

        # axis.sum works in place, and this rank's own sums are the parameters' gradients.
        mean_dy, mean_dy_x_hat = ctx.axis.sum(torch.stack([db, dw]), "batchnorm") / m  # (C,) each
        centered = dy - mean_dy.view(per_channel) - x_hat * mean_dy_x_hat.view(per_channel)
        scale = inv_std if weight is None else weight * inv_std
        dx = scale.view(per_channel) * centered  # (B, C, ...)

        # A norm without weights, or with frozen ones, asks for no gradient of them.
        needs_dw, needs_db = ctx.needs_input_grad[1:3]
        return (
            dx.to(grads[0].dtype),
            dw if needs_dw else None,
            db if needs_db else None,
            None,
            None,
            None,
        )

"""Batch normalisation (Ioffe & Szegedy 2015) that updates its running statistics with the weights.

torch's BatchNorm2d changes its running statistics in the forward pass. A step that breaks and is
repeated, a replay or a warm-up would change them twice, and under data parallelism they would
differ from rank to rank. Here a forward pass in training only adds to `pending`;
parallel/statistics.py averages that over micro batches and ranks, and updates the running
statistics together with the weights. So they are equal on all ranks after every step, like the
weights: evaluation, checkpoints, hashes and the copy for a new rank need no rule of their own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoray.compat import BatchNormBase
from nanoray.errors import ConfigError
from nanoray.mesh.axis import Axis


class BatchNorm(nn.Module):
    """Normalise each channel of (B, C, H, W) by its mean and variance in this rank's micro batch.

    With an `axis`, by those of the micro batches of all its ranks together. Evaluation uses the
    running statistics.
    """

    def __init__(self, channels: int, momentum: float = 0.1, eps: float = 1e-5) -> None:
        super().__init__()
        self.momentum = momentum
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))
        # The sums of mean and unbiased variance over the forward passes of this step, (2, C), and
        # the number of these passes. Not part of the state.
        self.register_buffer("pending", torch.zeros(2, channels), persistent=False)
        self.register_buffer("passes", torch.zeros(1), persistent=False)
        # Of a norm in place of torch's: how many times the running statistics were updated
        self.register_buffer("num_batches_tracked", None)
        self.axis: Axis | None = None
        self.num_batches_tracked: Tensor | None
        self.running_mean: Tensor
        self.running_var: Tensor
        self.pending: Tensor
        self.passes: Tensor

    @classmethod
    def of(cls, norm: BatchNormBase) -> BatchNorm:
        """Return a replacement of torch's norm, with the same parameters.

        Raises ConfigError for a norm that cannot be replaced.
        """
        complete = norm.affine and norm.track_running_stats and norm.momentum
        if not complete or isinstance(norm, nn.SyncBatchNorm):
            raise ConfigError(
                f"{norm} has no parameters, no running statistics or no momentum, or exchanges "
                "them itself, so ranks could not agree on its statistics; use affine, "
                "track_running_stats and momentum, and no SyncBatchNorm"
            )
        assert norm.momentum is not None
        assert norm.running_mean is not None
        assert norm.running_var is not None
        replacement = cls(norm.num_features, norm.momentum, norm.eps)
        replacement.weight = norm.weight
        replacement.bias = norm.bias
        replacement.running_mean.copy_(norm.running_mean)
        replacement.running_var.copy_(norm.running_var)
        replacement.num_batches_tracked = norm.num_batches_tracked
        return replacement.train(norm.training)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return F.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
            )
        statistics = torch.zeros_like(self.pending)  # (2, C): mean and variance of this batch
        mean = statistics[0]
        var = statistics[1]
        if self.axis is None or self.axis.size == 1:
            # With momentum 1 the "running" statistics that it writes are those of this batch.
            y = F.batch_norm(
                x, mean, var, self.weight, self.bias, training=True, momentum=1.0, eps=self.eps
            )
        else:
            y = _synchronised(x, self.weight, self.bias, statistics, self.eps, self.axis)
        # Only noted here; `update` applies it when the weights change.
        with torch.no_grad():
            self.pending += statistics
            self.passes += 1
        return y  # (B, C, H, W)

    @torch.no_grad()
    def update(self, mean: Tensor, var: Tensor, good: Tensor) -> None:
        """Move the running statistics towards mean and var, (C,), if `good`, a boolean scalar."""
        # Without a branch on `good`, so the host need not wait for the device.
        for running, new in ((self.running_mean, mean), (self.running_var, var)):
            running.copy_(torch.where(good, running + self.momentum * (new - running), running))
        if self.num_batches_tracked is not None:
            self.num_batches_tracked += good


def replace_norms(model: nn.Module) -> None:
    """Replace each of torch's batch norms in a model; the parameters stay the same objects."""
    # Children, because a module is replaced in its parent.
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, BatchNormBase):
                setattr(module, name, BatchNorm.of(child))


@torch.compiler.disable  # a compiled graph ends before the exchange and goes on after it
def _synchronised(
    x: Tensor, weight: Tensor, bias: Tensor, statistics: Tensor, eps: float, axis: Axis
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
        weight: Tensor,
        bias: Tensor,
        statistics: Tensor,
        eps: float,
        axis: Axis,
    ) -> Tensor:
        """Return y (B, C, H, W); write mean and unbiased variance to `statistics`, (2, C).

        (all ranks of the axis)
        """
        x32 = x.float()
        x64 = x32.double()
        channels = x.shape[1]

        # In float64, because E[x²] - E[x]² loses digits, and squares about the common mean need a
        # second exchange.
        count = x64.new_full((channels,), float(x.numel() // channels))
        own = torch.stack([x64.sum((0, 2, 3)), x64.square().sum((0, 2, 3)), count])  # (3, C)
        total, squares, m = axis.sum(own, "batchnorm")  # (C,) each
        # The mean and variance of all ranks' elements, and the unbiased one for evaluation.
        mean = total / m
        var = (squares / m - mean.square()).clamp(min=0.0)
        statistics[0] = mean
        statistics[1] = var * m / (m - 1)

        inv_std = (var + eps).rsqrt().float()
        x_hat = (x32 - mean.float()[:, None, None]) * inv_std[:, None, None]  # (B, C, H, W)
        ctx.save_for_backward(x_hat, weight, inv_std, m.float())
        ctx.axis = axis
        return (x_hat * weight[:, None, None] + bias[:, None, None]).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the gradients of x, weight and bias. (all ranks of the axis)"""
        x_hat, weight, inv_std, m = ctx.saved_tensors
        dy = grads[0].float()
        db = dy.sum((0, 2, 3))  # (C,)
        dw = (dy * x_hat).sum((0, 2, 3))  # (C,)

        # axis.sum works in place, and this rank's own sums are the parameters' gradients.
        mean_dy, mean_dy_x_hat = ctx.axis.sum(torch.stack([db, dw]), "batchnorm") / m  # (C,) each
        centered = dy - mean_dy[:, None, None] - x_hat * mean_dy_x_hat[:, None, None]
        dx = (weight * inv_std)[:, None, None] * centered  # (B, C, H, W)
        return dx.to(grads[0].dtype), dw, db, None, None, None

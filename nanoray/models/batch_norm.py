"""Batch normalisation (Ioffe & Szegedy 2015) whose running statistics change with the weights, and
not before.

torch's BatchNorm2d changes its running statistics in the forward pass. A step that breaks and is
repeated, a replay or a warm-up would change them twice, and under data parallelism they would
differ from rank to rank. Here a forward pass in training only adds to `pending`;
parallel/statistics.py averages that over micro batches and ranks, and updates the running
statistics together with the weights. So they are equal on all ranks after every step, like the
weights: evaluation, checkpoints, hashes and a newcomer's copy need no rule of their own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from nanoray.errors import ConfigError
from nanoray.mesh.axis import Axis


class BatchNorm(nn.Module):
    """Normalise each channel of (B, C, H, W) by its mean and variance in this rank's micro batch.

    With an `axis`, by those of the micro batches of all its ranks together. Evaluation uses the
    running statistics.
    """

    def __init__(self, channels: int, momentum: float = 0.1, eps: float = 1e-5) -> None:
        super().__init__()
        self.momentum, self.eps = momentum, eps
        self.weight, self.bias = (
            nn.Parameter(torch.ones(channels)),
            nn.Parameter(torch.zeros(channels)),
        )
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))
        # The sums of mean and unbiased variance over the forward passes of this step, (2, C). Not
        # part of the state.
        self.register_buffer("pending", torch.zeros(2, channels), persistent=False)
        self.register_buffer("passes", torch.zeros(1), persistent=False)  # so many forward passes
        self.axis: Axis | None = None
        self.running_mean: Tensor
        self.running_var: Tensor
        self.pending: Tensor
        self.passes: Tensor

    @classmethod
    def of(cls, norm: _BatchNorm) -> BatchNorm:
        """Return one in the place of torch's, around the same parameters. Raises ConfigError for
        what it cannot be.
        """
        if not (norm.affine and norm.track_running_stats and norm.momentum) or isinstance(
            norm, nn.SyncBatchNorm
        ):
            raise ConfigError(
                f"{norm} has no parameters, no running statistics or no momentum, or exchanges "
                "them itself, so ranks "
                "could not agree on its statistics; use affine, track_running_stats and momentum, "
                "and no SyncBatchNorm"
            )
        made = cls(norm.num_features, norm.momentum, norm.eps)
        made.weight, made.bias = norm.weight, norm.bias
        assert norm.running_mean is not None
        assert norm.running_var is not None
        made.running_mean.copy_(norm.running_mean)
        made.running_var.copy_(norm.running_var)
        return made.train(norm.training)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return F.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
            )
        seen = torch.zeros_like(self.pending)  # (2, C)
        if self.axis is None or self.axis.size == 1:
            # With momentum 1 the "running" statistics that it writes are those of this batch.
            y = F.batch_norm(x, seen[0], seen[1], self.weight, self.bias, True, 1.0, self.eps)
        else:
            y = _synchronised(x, self.weight, self.bias, seen, self.eps, self.axis)
        with torch.no_grad():
            self.pending += seen
            self.passes += 1
        return y  # (B, C, H, W)

    @torch.no_grad()
    def update(self, mean: Tensor, var: Tensor, good: Tensor) -> None:
        """Move the running statistics towards mean and var, (C,) each, where `good`, a boolean
        scalar, says so.
        """
        for running, new in ((self.running_mean, mean), (self.running_var, var)):
            running.copy_(torch.where(good, running + self.momentum * (new - running), running))


def replace_norms(model: nn.Module) -> None:
    """Put a BatchNorm of this file in the place of each of torch's in a model; the parameters stay
    the same objects.
    """
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, _BatchNorm):
                setattr(module, name, BatchNorm.of(child))


@torch.compiler.disable  # a compiled graph ends before the exchange and goes on after it
def _synchronised(
    x: Tensor, weight: Tensor, bias: Tensor, seen: Tensor, eps: float, axis: Axis
) -> Tensor:
    return Synchronised.apply(x, weight, bias, seen, eps, axis)


class Synchronised(torch.autograd.Function):
    """Batch normalisation over the micro batches of all ranks of an axis: one sum forward, one sum
    backward.

    With x̂ = (x - mean) / std and m elements of a channel on all ranks together:

        y = w·x̂ + b,    dx = w / std · (dy - Σdy / m - x̂ · Σ(dy·x̂) / m),    dw = Σ(dy·x̂),    db = Σdy

    The sums of dx run over all ranks. Those of dw and db run over this rank's elements only,
    because the ranks add up the gradients of parameters later, as those of any other layer.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, seen: Tensor, eps: float, axis: Axis
    ) -> Tensor:
        """Return y (B, C, H, W); write mean and unbiased variance to `seen`, (2, C). (all ranks of
        the axis)
        """
        wide = x.float()
        count = wide.new_full((wide.shape[1],), float(wide.numel() // wide.shape[1]))
        # In float64, because E[x²] - E[x]² loses digits, and squares about the common mean need a
        # second exchange.
        sums = [wide.double().sum((0, 2, 3)), wide.double().square().sum((0, 2, 3)), count.double()]
        total, squares, m = axis.sum(torch.stack(sums), "batchnorm")  # (C,) each
        mean = total / m
        var = (squares / m - mean.square()).clamp(min=0.0)
        seen[0], seen[1] = mean, var * m / (m - 1)
        inv_std = (var + eps).rsqrt().float()
        x_hat = (wide - mean.float()[:, None, None]) * inv_std[:, None, None]  # (B, C, H, W)
        ctx.save_for_backward(x_hat, weight, inv_std, m.float())
        ctx.axis = axis
        return (x_hat * weight[:, None, None] + bias[:, None, None]).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the gradients of x, weight and bias. (all ranks of the axis)"""
        x_hat, weight, inv_std, m = ctx.saved_tensors
        dy = grads[0].float()
        own = torch.stack([dy.sum((0, 2, 3)), (dy * x_hat).sum((0, 2, 3))])  # (2, C)
        both = ctx.axis.sum(own.clone(), "batchnorm") / m
        dx = (weight * inv_std)[:, None, None] * (
            dy - both[0][:, None, None] - x_hat * both[1][:, None, None]
        )
        return dx.to(grads[0].dtype), own[1], own[0], None, None, None

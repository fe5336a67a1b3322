"""Running statistics of batch normalisation: averaged over micro batches and ranks, and updated with the weights.

forward ─► pending += mean, var ─► average: one small sum over the ranks ─► update, together with the weights
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn

from nanoray.mesh.axis import Axis
from nanoray.models.batch_norm import BatchNorm


class RunningStatistics:
    """Keeps the running statistics of a model's norms equal on all ranks. Does nothing for a model without any."""

    def __init__(self, model: nn.Module, axis: Axis, synchronised: bool) -> None:
        """With `synchronised` the norms also use mean and variance of all ranks' micro batches. (all ranks)"""
        self._norms = [module for module in model.modules() if isinstance(module, BatchNorm)]
        self._axis, self._average = axis, torch.empty(0)
        for norm in self._norms:
            norm.axis = axis if synchronised else None
        weakref.finalize(self, _release, self._norms, axis)  # which is that of one group of ranks

    def begin(self) -> None:
        """Forget forward passes that belong to no step: those of a warm-up, a replay, or a step that broke."""
        for norm in self._norms:
            norm.pending.zero_()

    def average(self, micro_batches: int) -> None:
        """Average the statistics of the step's forward passes. (all ranks) Nothing that other steps see changes yet."""
        if self._norms:
            flat = torch.cat([norm.pending.flatten() for norm in self._norms])
            self._average = self._axis.sum(flat, "statistics") / (micro_batches * self._axis.size)

    def update(self) -> None:
        """Update the running statistics of all norms, unless one of the averages is not finite."""
        if not self._norms:
            return
        good = torch.isfinite(self._average).all()
        parts: list[Tensor] = [*self._average.split([norm.pending.numel() for norm in self._norms])]
        for norm, part in zip(self._norms, parts, strict=True):
            mean, var = part.view_as(norm.pending)
            norm.update(mean, var, good)


def _release(norms: list[BatchNorm], axis: Axis) -> None:
    for norm in norms:
        norm.axis = None if norm.axis is axis else norm.axis

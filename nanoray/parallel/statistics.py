"""Running statistics of batch normalisation: averaged over micro batches and ranks, and updated
with the weights.

forward ─► pending += mean, var ─► add_up: one small sum over the ranks ─► update: over the passes,
with the weights
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn

from nanoray.mesh.axis import Axis
from nanoray.models.batch_norm import BatchNorm


class RunningStatistics:
    """Keeps the running statistics of a model's norms equal on all ranks. Does nothing for a model
    without any.
    """

    def __init__(self, model: nn.Module, axis: Axis, synchronised: bool) -> None:
        """With `synchronised` the norms also use mean and variance of all ranks' micro batches.
        (all ranks)
        """
        self.norms = [module for module in model.modules() if isinstance(module, BatchNorm)]
        self._axis, self._sums = axis, torch.empty(0)
        for norm in self.norms:
            norm.axis = axis if synchronised else None
        weakref.finalize(self, _release, self.norms, axis)  # which is that of one group of ranks

    def begin(self) -> None:
        """Forget forward passes that belong to no step: those of a warm-up, a replay, or a step
        that broke.
        """
        for norm in self.norms:
            norm.pending.zero_()
            norm.passes.zero_()

    def add_up(self) -> None:
        """Add up the statistics of the step's forward passes. (all ranks) Nothing that other steps
        see changes yet.

        A model may call a norm several times for a micro batch, or not at all, and one that is
        frozen counts nothing.
        """
        if self.norms:
            flat = torch.cat(
                [part.flatten() for norm in self.norms for part in (norm.pending, norm.passes)]
            )
            self._sums = self._axis.sum(flat, "statistics")

    def update(self) -> None:
        """Update the running statistics of all norms that ran, unless one of the averages is not
        finite.
        """
        if not self.norms:
            return
        good = torch.isfinite(self._sums).all()
        parts: list[Tensor] = [*self._sums.split([norm.pending.numel() + 1 for norm in self.norms])]
        for norm, part in zip(self.norms, parts, strict=True):
            passes = part[-1]
            mean, var = (part[:-1] / passes.clamp(min=1)).view_as(norm.pending)
            norm.update(mean, var, good & (passes > 0))


def _release(norms: list[BatchNorm], axis: Axis) -> None:
    for norm in norms:
        norm.axis = None if norm.axis is axis else norm.axis

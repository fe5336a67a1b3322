"""Running statistics of batch normalisation: averaged over micro batches and ranks, and updated
with the weights.

    each forward   pending += mean, var; passes += 1          (models/batch_norm.py)
    add_up         one small sum over the data ranks
    commit         running statistics move towards pending / passes, with the weights
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn

from nanoray.models.batch_norm import BatchNorm
from nanoray.parallel.axis import Axis
from nanoray.parallel.hooks import StepHook


def has_statistics(model: nn.Module) -> bool:
    """Whether a model has norms whose statistics ranks average or share."""
    return any(isinstance(module, BatchNorm) for module in model.modules())


class RunningStatistics(StepHook):
    """Keeps the running statistics of a model's norms equal on all ranks."""

    def __init__(self, model: nn.Module, axis: Axis, synchronised: bool) -> None:
        """Attach to the norms of `model`. (all ranks)

        With `synchronised` they also use the mean and variance of all ranks' micro batches.
        """
        self._norms = [module for module in model.modules() if isinstance(module, BatchNorm)]
        self._axis = axis
        self._sums = torch.empty(0)  # of all norms: pending and passes, one after the other
        for norm in self._norms:
            norm.axis = axis if synchronised or norm.always_synchronised else None

        # The model outlives its group of ranks, and a norm's axis would keep the group open.
        weakref.finalize(self, _release, self._norms, axis)

    def begin(self) -> None:
        """Forget the forward passes of a warm-up, of a replay, or of a step that broke."""
        for norm in self._norms:
            norm.pending.zero_()
            norm.passes.zero_()

    def add_up(self) -> None:
        """Sum the statistics of the step's forward passes over the ranks. (all ranks)

        A model may call a norm several times for a micro batch, or not at all, and one that is
        frozen counts nothing: so the number of passes is summed with them.
        """
        parts = []
        for norm in self._norms:
            parts += [norm.pending.flatten(), norm.passes.flatten()]
        if parts:
            self._sums = self._axis.sum(torch.cat(parts), "statistics")

    def commit(self, left_out: Tensor | None = None) -> None:
        """Update the running statistics of all norms that ran.

        Nothing changes where an average is not finite, on any norm: the device decides, so the
        host does not wait.
        """
        if not self._norms:
            return
        is_finite = torch.isfinite(self._sums).all()
        sizes = [norm.pending.numel() + 1 for norm in self._norms]
        for norm, part in zip(self._norms, self._sums.split(sizes), strict=True):
            passes = part[-1]
            mean, var = (part[:-1] / passes.clamp(min=1)).view_as(norm.pending)
            norm.update(mean, var, is_finite & (passes > 0))


def _release(norms: list[BatchNorm], axis: Axis) -> None:
    for norm in norms:
        if norm.axis is axis:  # else a newer group has it already
            norm.axis = None

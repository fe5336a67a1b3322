"""A loss over a varying number of targets: its sum and the weight of the sum, in place of a mean.

The mean over each micro batch's own targets is not a part of the mean over the whole batch, where
padding or `ignore_index` leaves some micro batches fewer targets than others. With sums and weights
gradient and loss are those of the whole batch, however it is divided (parallel/flow.py).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Weighted(NamedTuple):
    """A loss summed over the targets of a batch, and the weight of this sum.

    A model or a loss_fn returns it in place of a mean, for every batch or for none. Loss and
    gradient are then those of the whole batch, however ranks and micro batches divide it.
    """

    sum: Tensor
    """the sum of the losses of all targets: a scalar with a gradient"""

    weight: Tensor | float
    """the number of targets that `sum` adds up, or the sum of their weights; may be 0"""


LossValue = Tensor | Weighted  # Tensor: the mean over a batch


def weight_of(loss: Weighted) -> Tensor:
    """Return the weight as a scalar on the loss's device: float32, or float64 where the loss is."""
    dtype = torch.promote_types(loss.sum.dtype, torch.float32)
    if isinstance(loss.weight, Tensor):
        return loss.weight.detach().to(loss.sum.device, dtype).reshape(())
    return torch.tensor(float(loss.weight), dtype=dtype, device=loss.sum.device)


def positive(weight: Tensor) -> Tensor:
    """Return a total weight to divide by: 1 in place of 0, so that no targets have a loss of 0."""
    return torch.where(weight == 0, torch.ones_like(weight), weight)


def mean_of(loss: LossValue) -> Tensor:
    """Return the mean over the batch's own targets; 0 where it has none."""
    if isinstance(loss, Weighted):
        return loss.sum / positive(weight_of(loss)).to(loss.sum.dtype)
    return loss

"""The norm of gradients that lie on many ranks: each element counts once, at its owner."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nanoray.mesh.axis import Axis

CHUNK = 1 << 16  # elements: on CPU torch makes a float64 copy first, which should stay in the cache


def clip_to(limit: float, gradients: Sequence[Tensor], norm: Tensor) -> None:
    """Scale gradients, of which a rank may have none, so that the norm of all ranks' is at most
    `limit`.

    On a CPU, which knows the norm, nothing is done where it is small enough: one pass over the
    gradients less. Nor where it is not finite: the update is left out, and NaN would stay where no
    later gradient is written.
    """
    factor = torch.where(norm.isfinite(), (limit / (norm + 1e-6)).clamp(max=1.0), 1.0)
    if gradients and (factor.device.type != "cpu" or factor != 1):
        torch._foreach_mul_([*gradients], factor)


def norm_of_owned(owned: Sequence[Tensor], axis: Axis, device: torch.device) -> Tensor:
    """Return the norm of all ranks' `owned` elements, a float32 scalar on the device, equal on all
    ranks. (all ranks)

    Squares are added in float64. So the result does not depend on how the elements are cut: modes
    get the same bits.
    """
    chunks = [
        part
        for tensor in owned
        for part in (tensor.split(CHUNK) if device.type == "cpu" else [tensor])
    ]
    if chunks:
        square = (
            torch.stack([torch.linalg.vector_norm(part, dtype=torch.float64) for part in chunks])
            .square()
            .sum()
        )
    else:
        square = torch.zeros((), dtype=torch.float64, device=device)
    return axis.sum(square, "norm").sqrt().float()

"""The norm of gradients that lie on many ranks: each element counts once, at its owner."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nanoray.machine.compat import foreach_mul_
from nanoray.parallel.axis import Axis

CHUNK = 1 << 16  # elements: on CPU torch makes a float64 copy first, which should stay in the cache


def clip_to(limit: float, gradients: Sequence[Tensor], norm: Tensor) -> None:
    """Scale this rank's gradients, if it has any, so that the norm of all ranks' is at most `limit`.

    Nothing is scaled where the norm is not finite: the update is left out, and NaN would stay in
    memory that no later gradient overwrites.
    """
    factor = torch.where(norm.isfinite(), (limit / (norm + 1e-6)).clamp(max=1.0), 1.0)
    if not gradients:
        return

    # A CPU can read the factor at no cost, and a factor of 1 saves one pass over the gradients. On a
    # GPU this would wait for the device.
    if factor.device.type == "cpu" and factor == 1:
        return
    foreach_mul_(list(gradients), factor)


def norm_of_owned(owned: Sequence[Tensor], axis: Axis, device: torch.device) -> Tensor:
    """Return the norm of the `owned` elements of all ranks. (all ranks)

    A float32 scalar on the device, equal on all ranks. Squares are added in float64, so the result
    does not depend on how the elements are cut: all modes get the same bits.
    """
    chunks: list[Tensor] = []
    for tensor in owned:
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        if device.type == "cpu":
            chunks += tensor.split(CHUNK)
        else:
            chunks.append(tensor)

    square = torch.zeros((), dtype=torch.float64, device=device)
    if chunks:
        norms = [torch.linalg.vector_norm(chunk, dtype=torch.float64) for chunk in chunks]
        square = torch.stack(norms).square().sum()
    return axis.sum(square, "norm").sqrt().float()

"""Dropout whose masks follow from (seed, step, micro batch, data rank, layer) alone.

So they do not depend on the process, on its earlier computations, or on the order of micro batches
and layers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Dropout(nn.Dropout):
    """torch's Dropout, with masks by `dropout`."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        return dropout(x, self.p)


class NoDropout(nn.Identity):
    """In the place of a Dropout that would leave nothing out."""

    p = 0.0


def dropout_layer(p: float) -> Dropout | NoDropout:
    """Return a layer that leaves numbers out with probability p."""
    return Dropout(p) if p else NoDropout()


def dropout(x: Tensor, p: float) -> Tensor:
    """Return x with each number left out with probability p, and the others divided by 1 - p."""
    # A GPU draws numbers fast, and a compiler fuses torch's own dropout.
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.dropout(x, p)
    return x * draw_factors(x, p)


def draw_factors(x: Tensor, p: float) -> Tensor:
    """Return the factors by which dropout multiplies x: 0, and 1/(1 - p). On the CPU.

    On many CPUs torch draws a mask's numbers one after the other, 64 bits for each, which takes a
    large part of a step. Here 64 bits decide over four numbers; p is rounded to 1/65536. So two
    calls draw the same as one for both, where the numbers of the first are a multiple of four.
    """
    # A number is kept for `keep` of the 2^16 values of its draw.
    keep = round((1 - p) * 2**16)
    keep = min(max(keep, 1), 2**16 - 1)
    count = x.numel()
    draws64 = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None)
    draws = draws64.view(torch.int16)[:count].view(x.shape)  # from -2^15 on
    kept = torch.lt(draws, keep - 2**15, out=torch.empty_like(x))  # 0 or 1, in the dtype of x
    return kept.mul_(2**16 / keep)


def derive_seed(seed: int, *values: int) -> int:
    """Return a seed for generators, below 2^63.

    Seeds of nearby values are unrelated (SplitMix64's finalizer).
    """
    for value in values:
        seed = ((seed ^ (value + 1) * 0x9E3779B97F4A7C15) * 0xBF58476D1CE4E5B9) % 2**64
        seed ^= seed >> 31
    return seed % 2**63


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the generators that dropout draws from. torch.manual_seed takes far longer."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)

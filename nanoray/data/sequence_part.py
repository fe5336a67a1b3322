"""Which positions of every sequence a rank of context parallelism has.

cp = 3, so a sequence is six equal chunks. Rank c has the chunks c and 5-c:

    sequence   │ 0 │ 1 │ 2 │ 3 │ 4 │ 5 │
    rank       │ 0 │ 1 │ 2 │ 2 │ 1 │ 0 │       rank 0 holds 0 5, rank 1 holds 1 4, rank 2 holds 2 3

A position attends to those before it, so a late chunk is more work than an early one. A rank with one
early and one late chunk has as much work as any other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SequencePart:
    """The part of one of `ranks` ranks that share every sequence."""

    index: int
    ranks: int

    @property
    def chunks(self) -> tuple[int, int]:
        """The numbers of the two chunks, of 2·ranks."""
        return self.index, 2 * self.ranks - 1 - self.index

    def own(self, whole: Tensor, dim: int = 1) -> Tensor:
        """Return a copy of the own positions (T/ranks) of a tensor with T positions along `dim`."""
        size = whole.shape[dim] // (2 * self.ranks)
        return torch.cat([whole.narrow(dim, chunk * size, size) for chunk in self.chunks], dim)


def own_parts(part: SequencePart, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return a rank's positions of a batch (B, T): of the tokens x, and of their targets y."""
    return part.own(x), part.own(y)

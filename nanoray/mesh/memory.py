"""The elements of a tensor as they are sent, hashed and written: in a row, without marks."""

from __future__ import annotations

import torch
from torch import Tensor


def plain_memory(tensor: Tensor) -> Tensor:
    """Return a tensor's elements in a row, contiguous; a copy only where it must be one.

    torch may keep a conjugation or a negation as a mark on the tensor: here it is done.
    """
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)


def bytes_of(tensor: Tensor) -> Tensor:
    """Return a tensor's elements as bytes, in a row."""
    return plain_memory(tensor).view(torch.uint8)

"""The elements of a tensor as they are sent, hashed, compared and written: in a row, without marks."""

from __future__ import annotations

from typing import Any

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


def equal_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same bits; NaN equals itself.

    Tensors without plain memory (sparse, quantised, of another library) pass for equal.
    """
    if a.shape != b.shape:
        return False
    if not has_plain_memory(a):
        return True
    return torch.equal(bytes_of(a), bytes_of(b))


def has_plain_memory(tensor: Tensor) -> bool:
    """Return whether a tensor's elements can be read and written as they are."""
    is_strided = tensor.layout == torch.strided and not tensor.is_quantized
    return is_strided and not tensor.is_meta and type(tensor.data) is Tensor


@torch.no_grad()
def assign(tensor: Tensor, value: Tensor) -> None:
    """Overwrite a tensor in place; one of another shape, or with repeated elements, gets new memory."""
    strides = zip(tensor.stride(), tensor.shape, strict=True)
    repeats = any(stride == 0 and size > 1 for stride, size in strides)
    if tensor.shape == value.shape and not repeats:
        tensor.copy_(value)
        return
    tensor.data = value.to(tensor.device, tensor.dtype, copy=True).contiguous()


def local_of(tensor: Any) -> Any:
    """Return a rank's own part of a tensor that is cut over ranks; other values are unchanged."""
    # Asked in this way, because DTensor's import is slow.
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor

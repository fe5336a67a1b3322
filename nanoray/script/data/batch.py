"""A batch of a script's data: a pair (inputs, targets) or a dict, and its number of samples."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanoray.errors import DataError

Pair = tuple[Any, Any]  # inputs and targets


class NamedBatch(dict[str, Any]):
    """A batch that is a dict, as data sets of Hugging Face give it: both inputs and targets."""


@dataclass(frozen=True)
class Counted:
    """A batch with its number of samples, where its tensors do not have one row for each sample.

    A stream yields it in place of a batch.
    """

    batch: Any
    """a pair (inputs, targets), or a dict"""

    samples: int
    """the number of its samples: a mean loss of the batch counts as often; may be 0"""


class CountedTargets(NamedTuple):
    """The targets of a micro batch with its number of samples, where that differs."""

    targets: Any
    samples: int


def counted(batch: Any) -> tuple[Pair, int]:
    """Return a batch as inputs and targets, and its number of samples."""
    if isinstance(batch, Counted):
        return as_pair(batch.batch), batch.samples
    pair = as_pair(batch)
    return pair, count_samples(pair)


def as_pair(batch: Any) -> Pair:
    """Return a batch as inputs and targets. Raises DataError when it is neither a pair nor a dict."""
    if batch is None:
        raise DataError(
            "a batch is None; leave it out of the data, or let collate_fn return at least one sample"
        )
    kind = type(batch).__name__
    if isinstance(batch, (tuple, list)):
        if len(batch) == 2:
            return batch[0], batch[1]
        kind = f"{kind} of {len(batch)}"
    if isinstance(batch, Mapping):
        named = NamedBatch(batch)
        return named, named
    raise DataError(
        f"a batch is a {kind}, but must be a pair of inputs and targets; pack it as (inputs, "
        "targets), two arrays as torch.utils.data.TensorDataset(inputs, targets)"
    )


def count_samples(pair: Pair) -> int:
    """Return the number of samples of a stream's batch: the first dimension that its tensors share.

    Scalars do not count, nor what is in lists and tuples. Raises DataError where the tensors differ,
    or there are none.
    """
    sizes = set()
    for part in pair:
        for value in _leaves(part, into_lists=False):
            if isinstance(value, (Tensor, np.ndarray)) and value.ndim:
                sizes.add(len(value))
    if len(sizes) == 1:
        return sizes.pop()

    found = ", ".join(str(size) for size in sorted(sizes)) or "none"
    raise DataError(
        f"the lengths of a batch's tensors ({found}) do not say how many samples it has; yield "
        "nanoray.Counted(batch, samples) in its place"
    )


def hash_of(pair: Pair) -> int:
    """Return a hash of the tensors, arrays, texts and numbers of a batch; 0 where it has none."""
    checksum = 0
    for value in _leaves(pair, into_lists=True):
        if isinstance(value, Tensor) and value.layout == torch.strided:
            value = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            checksum = zlib.crc32(value.tobytes(), checksum)
        elif isinstance(value, (str, bytes, int, float)):
            checksum = zlib.crc32(repr(value).encode(), checksum)
    return checksum


def to_device(value: Any, device: torch.device, pins: bool) -> Any:
    """Copy tensors in nested lists, tuples and dicts to the device, with `pins` by pinned memory."""
    if isinstance(value, Tensor):
        if pins:
            value = value.pin_memory()
        # A copy also on the CPU: batches are kept, and a model may change its inputs in place. It is
        # asynchronous only from pinned memory.
        return value.to(device, non_blocking=True, copy=True)
    if isinstance(value, Mapping):
        return {key: to_device(item, device, pins) for key, item in value.items()}
    # A packed sequence, or a batch of another library, moves itself.
    if callable(getattr(value, "to", None)):
        return value.to(device)
    if isinstance(value, (tuple, list)):
        parts = [to_device(item, device, pins) for item in value]
        if hasattr(value, "_fields"):  # a named tuple
            return type(value)(*parts)
        return type(value)(parts)
    return value


def _leaves(value: Any, into_lists: bool) -> Iterator[Any]:
    """Yield what nested dicts and named tuples contain; with `into_lists` also lists and tuples."""
    parts: Iterable[Any] | None = None
    if isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, (list, tuple)) and (into_lists or hasattr(value, "_fields")):
        parts = value
    if parts is None:
        yield value
        return
    for part in parts:
        yield from _leaves(part, into_lists)

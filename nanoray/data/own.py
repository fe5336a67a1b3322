"""Read the data of a user's script in an order that can be resumed.

dataset[i]         sample k is number k mod N of a permutation that follows from (seed, k // N): one
                   integer resumes it
iterable           batch k is the k-th that `iter(...)` yields, equal on every rank: a resume skips
                   the batches that were used
with state_dict()  every rank reads its own loader, whose state is saved with checkpoints
                   (stateful.py)
DataLoader         its dataset and collate_fn are used, not its sampler and workers
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from nanoray.data.hashing import mix
from nanoray.data.order import EpochOrder
from nanoray.data.stateful import KEPT, Stateful, has_index, is_stateful
from nanoray.data.tokens import evenly_spaced
from nanoray.errors import DataError

LOADER = "loader"  # the name of a loader's state in a checkpoint


class OwnData:
    """The two splits of a script; items and batches are pairs (inputs, targets)."""

    def __init__(
        self,
        train: Any,
        val: Any,
        seed: int,
        micro: int,
        device: torch.device,
        place: tuple[int, int] = (0, 1),
    ) -> None:
        """Choose how to read each split.

        `micro` is the number of samples of a batch, `place` the (index, number) of the data ranks.
        Raises DataError for data that cannot be read in any of these ways.
        """
        self._device = device
        self._micro = micro
        self._rank, self._ranks = place
        self._train: Stateful | Items | Batches
        if is_stateful(train):
            self._train = Stateful(train)
        else:
            self._train = source_of(train, "train", micro)
        self._val = source_of(val, "val", micro) if val is not None else None

        # Only items are shuffled here; batches keep the order of their iterable.
        self._epochs: EpochOrder | None = None
        if isinstance(self._train, Items):
            key = mix(np.array([seed], np.uint64))
            self._epochs = EpochOrder(len(self._train), key)

    def train_batch(self, first_sample: int, count: int) -> tuple[Any, Any]:
        """Return inputs and targets of `count` samples, on the device."""
        if isinstance(self._train, Stateful):
            # Rank 0's first sample of this micro batch has the same number on every rank.
            number = self._batches_of_rank(first_sample - self._rank * count)
            pair = require_size(self._train.batch(number), number, "train", self._micro)
        elif isinstance(self._train, Batches):
            pair = self._train.batch(first_sample // count)
        else:
            assert self._epochs
            pair = self._train.items(self._epochs.indices(first_sample, count).tolist())
        return self._on_device(pair)

    def val_windows(self, limit: int) -> np.ndarray:
        """Return the numbers of at most `limit` validation samples, evenly spaced, int64."""
        if self._val is None:
            return np.empty(0, np.int64)
        if isinstance(self._val, Batches):
            # Validation batches are read once and kept: every evaluation uses the same samples.
            self._val = self._val.first(limit)
        return evenly_spaced(len(self._val) - 1, min(limit, len(self._val)))

    def val_batch(self, starts: np.ndarray) -> tuple[Any, Any]:
        """Return inputs and targets of these validation samples, on the device."""
        assert isinstance(self._val, Items)
        return self._on_device(self._val.items(starts.tolist()))

    @property
    def in_batches(self) -> bool:
        """Whether the training data come in batches of a size of their own."""
        return not isinstance(self._train, Items)

    @property
    def stateful(self) -> bool:
        """Whether each rank reads a loader of its own, with a state."""
        return isinstance(self._train, Stateful)

    def state_at(self, samples: int) -> dict[str, Tensor]:
        """Return the state of this rank's loader after `samples` samples of all ranks, by name."""
        if not isinstance(self._train, Stateful):
            return {}
        return {LOADER: self._train.state_before(self._batches_of_rank(samples))}

    def load_state(self, saved: Mapping[str, Tensor], samples: int) -> None:
        """Continue from the result of `state_at(samples)`."""
        assert isinstance(self._train, Stateful)
        self._train.load(saved[LOADER], self._batches_of_rank(samples))

    def _batches_of_rank(self, samples: int) -> int:
        """Return the batches that a rank has read after `samples` samples of all ranks."""
        return samples // (self._micro * self._ranks)

    def _on_device(self, pair: tuple[Any, Any]) -> tuple[Any, Any]:
        inputs, targets = pair
        return _to(inputs, self._device), _to(targets, self._device)


class Items:
    """A dataset with an index."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] = default_collate) -> None:
        self._dataset = dataset
        self._collate = collate

    def __len__(self) -> int:
        return len(self._dataset)

    def items(self, numbers: list[int]) -> tuple[Any, Any]:
        """Return the items of these numbers as one batch."""
        return _pair(self._collate([self._dataset[number] for number in numbers]))


class Batches:
    """An iterable of batches, read in its order; the newest ones are kept."""

    def __init__(self, batches: Iterable[Any], split: str, micro: int) -> None:
        self._batches = batches
        self._split = split
        self._micro = micro
        self._iterator: Iterator[Any] = iter(())
        self._next = -1  # the number of the batch that the iterator yields next; -1: not begun
        self._kept: OrderedDict[int, tuple[Any, Any]] = OrderedDict()

    def batch(self, number: int) -> tuple[Any, Any]:
        """Return batch `number`, counted over all passes through the iterable.

        Raises DataError when the iterable yields none.
        """
        if number in self._kept:
            return self._kept[number]

        # An iterable has no state, so going back means to begin again and to skip.
        if self._next < 0 or number < self._next:
            self._iterator = iter(self._batches)
            self._next = 0
        while self._next <= number:
            index = self._next
            pair = self._advance()
            if index > number - KEPT:
                self._kept[index] = pair
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return self._kept[number]

    def _advance(self) -> tuple[Any, Any]:
        batch = next(self._iterator, None)
        if batch is None:  # the next epoch
            self._iterator = iter(self._batches)
            batch = next(self._iterator, None)
        if batch is None:
            raise DataError(
                f"the {self._split} data yield no batch; give an iterable that can be iterated "
                "again"
            )
        index = self._next
        self._next += 1
        return require_size(batch, index, self._split, self._micro)

    def first(self, limit: int) -> Items:
        """Return about `limit` samples from the start as a dataset with an index."""
        samples = []
        batches = -(-limit // self._micro)  # rounded up
        for batch in itertools.islice(iter(self._batches), batches):
            inputs, targets = _pair(batch)
            count = _count_samples((inputs, targets))
            for i in range(count):
                samples.append((_sample_of(inputs, i, count), _sample_of(targets, i, count)))
        if not samples:
            raise DataError(f"the {self._split} data yield no batch")
        return Items(samples[:limit])


def source_of(data: Any, split: str, micro: int) -> Items | Batches:
    """Return data as items with an index, or as batches. Raises DataError when it is neither."""
    # Its sampler and workers would not be resumable, so its dataset is used directly.
    if isinstance(data, DataLoader) and _is_dataset(data.dataset):
        return source_of_items(data.dataset, split, data.collate_fn)
    if _is_dataset(data):
        return source_of_items(data, split)
    if isinstance(data, Iterable):
        # A generator, or another iterator, cannot begin again.
        if iter(data) is data:
            raise DataError(
                f"the {split} data can be iterated once only; give a class whose __iter__ begins "
                "anew, or a dataset with len() and [], so that a resumed run can start again"
            )
        return Batches(data, split, micro)
    kind = type(data).__name__
    raise DataError(
        f"the {split} data are a {kind}; give a dataset (len and []), a DataLoader or an iterable "
        "of batches"
    )


def _is_dataset(data: Any) -> bool:
    return has_index(data) and hasattr(data, "__len__")


def source_of_items(
    dataset: Any, split: str, collate: Callable[[list[Any]], Any] | None = None
) -> Items:
    """Return a dataset as items. Raises DataError when it is empty."""
    if len(dataset) == 0:
        raise DataError(f"the {split} data are empty; give at least one sample")
    return Items(dataset, collate or default_collate)


def require_size(batch: Any, number: int, split: str, micro: int) -> tuple[Any, Any]:
    """Return a batch as inputs and targets. Raises DataError unless it has `micro` samples."""
    pair = _pair(batch)
    size = _count_samples(pair)
    if size != micro:
        raise DataError(
            f"batch {number} of the {split} data has {size} samples, but micro_batch_size = "
            f"{micro}; make them equal, and drop a last batch that is smaller"
        )
    return pair


def _pair(batch: Any) -> tuple[Any, Any]:
    kind = type(batch).__name__
    if isinstance(batch, (tuple, list)):
        if len(batch) == 2:
            return batch[0], batch[1]
        kind = f"{kind} of {len(batch)}"
    raise DataError(
        f"a batch is a {kind}, but must be a pair of inputs and targets; pack it as (inputs, "
        "targets)"
    )


def _count_samples(pair: tuple[Any, Any]) -> int:
    """Return a batch's number of samples: the length of the first tensor in inputs or targets."""
    for value in pair:
        # Follow the first part of nested tuples, dicts and stacks.
        while isinstance(value, (tuple, dict)) or _is_stack(value):
            parts = value.values() if isinstance(value, dict) else value
            value = next(iter(parts), None)
        if isinstance(value, (Tensor, np.ndarray)) and value.ndim:
            return len(value)
    inputs, _ = pair
    return len(inputs)


def _is_stack(value: Any) -> bool:
    """Whether a list holds tensors of one length, as default_collate makes it of tuples.

    Each tensor of such a list is a part of all samples.
    """
    if not isinstance(value, list):
        return False
    if not all(isinstance(part, Tensor) and part.dim() for part in value):
        return False
    return len({len(part) for part in value}) == 1


def _sample_of(value: Any, i: int, count: int) -> Any:
    """Return sample i of a batch of `count`."""
    if isinstance(value, dict):
        return {key: _sample_of(item, i, count) for key, item in value.items()}
    if isinstance(value, tuple) or (_is_stack(value) and len(value[0]) == count):
        return _like(value, [_sample_of(item, i, count) for item in value])
    return value[i]


def _to(value: Any, device: torch.device) -> Any:
    """Move tensors in nested lists, tuples and dicts to the device."""
    if isinstance(value, Tensor):
        # The copy is asynchronous only from pinned memory.
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {key: _to(item, device) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return _like(value, [_to(item, device) for item in value])
    return value


def _like(value: Any, parts: list[Any]) -> Any:
    """Return the parts as a list or tuple of the type of `value`."""
    if hasattr(value, "_fields"):  # a named tuple
        return type(value)(*parts)
    return type(value)(parts)

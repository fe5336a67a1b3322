"""Data that a script brings: a dataset with an index, or any iterable of batches, in an order that
can be resumed.

dataset[i]         sample k is number k mod N of a permutation that follows from (seed, k // N): one integer resumes it
iterable           batch k is the k-th that `iter(...)` yields, equal on every rank: a resume skips what was used
with state_dict()  every rank reads its own, whose state is saved with checkpoints (stateful.py)
DataLoader         its dataset and collate_fn are taken, not its sampler and workers
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

from nanoray.data.order import EpochOrder
from nanoray.data.stateful import KEPT, Stateful, has_index, is_stateful
from nanoray.data.tokens import evenly_spaced, mix
from nanoray.errors import DataError

LOADER = "loader"  # the name under which a checkpoint has the state of a rank's loader


class OwnData:
    """The two splits of a script, as the loop reads them. Items and batches are pairs (inputs,
    targets).
    """

    def __init__(
        self,
        train: Any,
        val: Any,
        seed: int,
        micro: int,
        device: torch.device,
        place: tuple[int, int] = (0, 1),
    ) -> None:
        """`micro` is the number of samples of a batch, `place` this rank among so many that share
        the batches.

        Raises DataError for data that cannot be read in this way.
        """
        self._train = Stateful(train) if is_stateful(train) else source_of(train, "train", micro)
        self._device, self._micro, self._place = device, micro, place
        self._val = source_of(val, "val", micro) if val is not None else None
        key = mix(np.array([seed], np.uint64))
        self._epochs = EpochOrder(len(self._train), key) if isinstance(self._train, Items) else None

    def train_batch(self, first_sample: int, count: int) -> tuple[Any, Any]:
        """Return inputs and targets of `count` samples, on the device."""
        if isinstance(self._train, Stateful):
            number = self._number(first_sample - self._place[0] * count)
            return self._moved(sized(self._train.batch(number), number, "train", self._micro))
        if isinstance(self._train, Batches):
            return self._moved(self._train.batch(first_sample // count))
        assert self._epochs
        return self._moved(self._train.items(self._epochs.indices(first_sample, count).tolist()))

    def val_windows(self, limit: int) -> np.ndarray:
        """Return the numbers of at most `limit` validation samples, evenly spaced, int64."""
        if self._val is None:
            return np.empty(0, np.int64)
        if isinstance(self._val, Batches):
            self._val = self._val.first(limit)
        return evenly_spaced(len(self._val) - 1, min(limit, len(self._val)))

    def val_batch(self, starts: np.ndarray) -> tuple[Any, Any]:
        """Return inputs and targets of these validation samples, on the device."""
        assert isinstance(self._val, Items)
        return self._moved(self._val.items(starts.tolist()))

    @property
    def in_batches(self) -> bool:
        """Whether the training data come in batches of a size of their own."""
        return not isinstance(self._train, Items)

    @property
    def stateful(self) -> bool:
        """Whether each rank reads a loader of its own, with a state."""
        return isinstance(self._train, Stateful)

    def state_at(self, samples: int) -> dict[str, Tensor]:
        """Return what this rank's loader needs to go on after so many samples of all ranks, by
        name.
        """
        return (
            {LOADER: self._train.state_before(self._number(samples))}
            if isinstance(self._train, Stateful)
            else {}
        )

    def load_state(self, saved: Mapping[str, Tensor], samples: int) -> None:
        """Go on from what `state_at` returned after so many samples."""
        assert isinstance(self._train, Stateful)
        self._train.load(saved[LOADER], self._number(samples))

    def _number(self, samples: int) -> int:
        """Return how many batches a rank has read after so many samples of all ranks."""
        return samples // (self._micro * self._place[1])

    def _moved(self, pair: tuple[Any, Any]) -> tuple[Any, Any]:
        return _to(pair[0], self._device), _to(pair[1], self._device)


class Items:
    """A dataset with an index."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] = default_collate) -> None:
        self._dataset, self._collate = dataset, collate

    def __len__(self) -> int:
        return len(self._dataset)

    def items(self, numbers: list[int]) -> tuple[Any, Any]:
        """Return the items of these numbers as one batch."""
        return _pair(self._collate([self._dataset[number] for number in numbers]))


class Batches:
    """An iterable of batches, read in its order; the newest ones are kept."""

    def __init__(self, batches: Iterable[Any], split: str, micro: int) -> None:
        self._batches, self._split, self._micro = batches, split, micro
        self._iterator: Iterator[Any] = iter(())
        self._next = -1  # the number of the batch that the iterator yields next; -1: not begun
        self._kept: OrderedDict[int, tuple[Any, Any]] = OrderedDict()

    def batch(self, number: int) -> tuple[Any, Any]:
        """Return batch `number`, counted over all passes through the iterable. Raises DataError
        when it has none.
        """
        if number in self._kept:
            return self._kept[number]
        if self._next < 0 or number < self._next:
            self._iterator, self._next = iter(self._batches), 0
        while self._next <= number:
            pair = self._advance()
            if self._next - 1 > number - KEPT:
                self._kept[self._next - 1] = pair
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return self._kept[number]

    def _advance(self) -> tuple[Any, Any]:
        found = next(self._iterator, None)
        if found is None:  # the next epoch
            self._iterator = iter(self._batches)
            found = next(self._iterator, None)
        if found is None:
            raise DataError(
                f"the {self._split} data yield no batch; give an iterable that can be iterated "
                "again"
            )
        self._next += 1
        return sized(found, self._next - 1, self._split, self._micro)

    def first(self, limit: int) -> Items:
        """Return about `limit` samples from the start as a dataset with an index."""
        pairs = [
            _pair(found)
            for found in itertools.islice(iter(self._batches), -(-limit // self._micro))
        ]
        if not pairs:
            raise DataError(f"the {self._split} data yield no batch")
        sizes = [_samples(pair) for pair in pairs]
        samples = [
            tuple(_at(of, i, n) for of in pair)
            for pair, n in zip(pairs, sizes, strict=True)
            for i in range(n)
        ]
        return Items(samples[:limit])


def source_of(data: Any, split: str, micro: int) -> Items | Batches:
    """Return data as something with an index, or as batches. Raises DataError when it is neither."""
    if (
        isinstance(data, DataLoader)
        and has_index(data.dataset)
        and hasattr(data.dataset, "__len__")
    ):
        return source_of_items(data.dataset, split, data.collate_fn)
    if has_index(data) and hasattr(data, "__len__"):
        return source_of_items(data, split)
    if isinstance(data, Iterable):
        if iter(data) is data:
            raise DataError(
                f"the {split} data can be iterated once only; give a class whose __iter__ begins "
                "anew, or a dataset "
                "with len() and [], so that a resumed run can start again"
            )
        return Batches(data, split, micro)
    kind = type(data).__name__
    raise DataError(
        f"the {split} data are a {kind}; give a dataset (len and []), a DataLoader or an iterable "
        "of batches"
    )


def source_of_items(
    dataset: Any, split: str, collate: Callable[[list[Any]], Any] | None = None
) -> Items:
    if len(dataset) == 0:
        raise DataError(f"the {split} data are empty; give at least one sample")
    return Items(dataset, collate or default_collate)


def sized(batch: Any, number: int, split: str, micro: int) -> tuple[Any, Any]:
    """Return a batch as inputs and targets. Raises DataError unless it has `micro` samples."""
    pair = _pair(batch)
    if (size := _samples(pair)) != micro:
        raise DataError(
            f"batch {number} of the {split} data has {size} samples, but micro_batch_size = "
            f"{micro}; make them equal, "
            "and drop a last batch that is smaller"
        )
    return pair


def _pair(batch: Any) -> tuple[Any, Any]:
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        kind = (
            f"{type(batch).__name__} of {len(batch)}"
            if isinstance(batch, (tuple, list))
            else type(batch).__name__
        )
        raise DataError(
            f"a batch is a {kind}, but must be a pair of inputs and targets; pack it as (inputs, "
            "targets)"
        )
    return batch[0], batch[1]


def _samples(pair: tuple[Any, Any]) -> int:
    """Return how many samples a batch has, by the first tensor of its inputs, else of its targets."""
    for value in pair:
        while isinstance(value, (tuple, dict)) or _is_stack(value):
            value = next(iter(value.values() if isinstance(value, dict) else value), None)
        if isinstance(value, (Tensor, np.ndarray)) and value.ndim:
            return len(value)
    return len(pair[0])


def _is_stack(value: Any) -> bool:
    """Whether a list has parts of all samples, as default_collate makes it of tuples: tensors of
    one length.
    """
    parts = isinstance(value, list) and all(
        isinstance(part, Tensor) and part.dim() for part in value
    )
    return parts and len({len(part) for part in value}) == 1


def _at(value: Any, i: int, n: int) -> Any:
    """Return sample i of a batch of n."""
    if isinstance(value, dict):
        return {key: _at(item, i, n) for key, item in value.items()}
    if isinstance(value, tuple) or (_is_stack(value) and len(value[0]) == n):
        return _like(value, [_at(item, i, n) for item in value])
    return value[i]


def _to(value: Any, device: torch.device) -> Any:
    """Move tensors in nested lists, tuples and dicts to the device."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {key: _to(item, device) for key, item in value.items()}
    return (
        _like(value, [_to(item, device) for item in value])
        if isinstance(value, (tuple, list))
        else value
    )


def _like(value: Any, parts: list[Any]) -> Any:
    """Return the parts as a list or tuple of the kind that `value` is, say a named tuple."""
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)

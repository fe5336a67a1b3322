"""A script's loader with a state: each rank saves the state of its own loader with a checkpoint.

    rank 0   its loader ─► batch 0 ─► batch 1 ─► batch 2 ─► ...
    rank 1   its loader ─► batch 0 ─► batch 1 ─► batch 2 ─► ...
                        └ state 0  └ state 1  └ state 2           taken before each batch

Batch k of a rank is the k-th that its loader yields, over all epochs. From the state before an
earlier batch, a rank reads the same batches again: after a resume, in a repeated step, and as the
replacement of a lost rank.
"""

from __future__ import annotations

import copy
import json
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from nanoray.data.seeding import generators_kept, seed_generators_for
from nanoray.errors import DataError
from nanoray.own.data.reader import END
from nanoray.state.values import Unsupported, put_together, take_apart

KEPT = 64  # batches that a rank keeps, with the state before each, to repeat a step


def is_stateful(data: Any) -> bool:
    """Whether data are an iterable without an index that can save and load its state."""
    methods = ("__iter__", "state_dict", "load_state_dict")
    return all(callable(getattr(data, name, None)) for name in methods) and not has_index(data)


def has_index(data: Any) -> bool:
    """Whether data have samples by number. torch's IterableDataset has [] and raises there."""
    return hasattr(data, "__getitem__") and not isinstance(data, IterableDataset)


class Stateful:
    """The batches of one rank's loader, by their numbers. The newest ones are kept."""

    def __init__(self, loader: Any, seed: int = 0, rank: int = 0) -> None:
        """`seed` and `rank`: what the loader draws from global generators follows from them."""
        self._loader = loader
        self._seed = seed
        self._rank = rank
        # None: not begun, or to be begun again from a state
        self._iterator: Iterator[Any] | None = None
        self._next = 0  # the number of the batch that the iterator yields next
        self._states: dict[int, Any] = {}  # before a batch, by its number
        self._kept: OrderedDict[int, Any] = OrderedDict()
        self._anchor = 0  # the batch before which the newest saved or loaded state was taken

    def batch(self, number: int) -> Any:
        """Return batch `number`.

        Raises DataError when the loader yields none, or when the states before it were dropped.
        """
        # Going back needs a state; going forward only reads on.
        if number not in self._kept and (self._iterator is None or number < self._next):
            self._seek(number)
        while number not in self._kept:
            self._advance()
        return self._kept[number]

    def state_before(self, number: int) -> Tensor:
        """Return the loader's state before a batch, as bytes: (n,) uint8."""
        # Reading the batch keeps the state before it.
        if number not in self._states:
            self.batch(number)
        self._anchor = number
        return pack(self._states[number])

    def load(self, state: Tensor, number: int) -> None:
        """Continue from the state before batch `number`."""
        self._states = {number: unpack(state)}
        self._anchor = number
        self._iterator = None
        self._kept.clear()

    def _seek(self, number: int) -> None:
        """Begin at the newest known state that is not after batch `number`."""
        known = [k for k in self._states if k <= number]
        # Without any state and without an iterator, the loader begins at batch 0.
        if not known and (self._states or self._iterator):
            oldest = min(self._states, default=self._next)
            raise DataError(
                f"batch {number} of the train data is needed again, but the oldest known state of "
                f"the loader is that before batch {oldest}; give a dataset with len() and []"
            )
        if known:
            self._loader.load_state_dict(copy.deepcopy(self._states[max(known)]))
        self._next = max(known, default=0)
        with generators_kept():
            seed_generators_for(self._seed, self._rank, self._next, -1)
            self._iterator = iter(self._loader)

    def _advance(self) -> None:
        """Read the next batch, and keep the state before it."""
        assert self._iterator is not None
        # A copy, because a loader may return the object that it goes on to change.
        self._states[self._next] = copy.deepcopy(self._loader.state_dict())
        with generators_kept():
            seed_generators_for(self._seed, self._rank, self._next)
            batch = next(self._iterator, END)
            if batch is END:  # the next epoch
                self._iterator = iter(self._loader)
                batch = next(self._iterator, END)
        if batch is END:
            raise DataError(
                "the loader of the train data yields no batch in a whole epoch; give it at least "
                "one"
            )
        self._kept[self._next] = batch
        self._next += 1

        # Drop old batches, and the states before them, but for the anchor.
        while len(self._kept) > KEPT:
            dropped, _ = self._kept.popitem(last=False)
            if dropped != self._anchor:
                self._states.pop(dropped, None)
        oldest = next(iter(self._kept))
        for number in list(self._states):
            if number < oldest and number != self._anchor:
                del self._states[number]


def pack(state: Any) -> Tensor:
    """Return a loader's state as bytes of JSON, (n,) uint8.

    Raises DataError for types other than numbers, text, lists, dicts, bytes, tensors and arrays.
    """
    try:
        plain = take_apart(state, "state", loose=True)
    except Unsupported as error:
        raise DataError(
            f"the state of the train data's loader has a {error.kind} at {error.where}, which a "
            "checkpoint cannot hold; let state_dict() return numbers, text, lists, dicts, bytes, "
            "tensors or arrays"
        ) from None
    return torch.frombuffer(bytearray(json.dumps(plain).encode()), dtype=torch.uint8)


def unpack(packed: Tensor) -> Any:
    """Return the state that was given to `pack`."""
    return put_together(json.loads(packed.cpu().contiguous().numpy().tobytes()))

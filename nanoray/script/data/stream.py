"""A stream of batches, which every rank reads; the batches are dealt to the ranks in turn.

    the iterable, on every rank    0   1   2   3   4   5   ...
    rank 0 of 2 trains on          0       2       4
    rank 1 of 2 trains on              1       3       5

Batch k is the k-th that the iterable yields, over all its passes. So the stream has one position,
whatever the number of ranks. To go on from there, a process loads the stream's state where it has one
(state_dict and load_state_dict), and else reads past the batches before.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from nanoray.data.seeding import generators_kept, seed_generators_for
from nanoray.errors import DataError
from nanoray.models.values import Unsupported, put_together, take_apart
from nanoray.script.data.batch import Counted, Pair, counted, hash_of
from nanoray.script.data.reader import EndsWithRank

KEPT = 64  # batches that a rank keeps to repeat a step
END = object()  # of a pass: a batch may be anything, also None


class Stream:
    """The batches of an iterable, by their numbers. The newest ones that were asked for are kept."""

    def __init__(self, data: Any, split: str, seed: int = 0) -> None:
        """`seed`: what the iterable draws from global generators follows from it."""
        if isinstance(data, DataLoader) and data.num_workers:
            data.worker_init_fn = EndsWithRank(data.worker_init_fn)
        self._data = data
        self._split = split
        self._seed = seed
        methods = ("state_dict", "load_state_dict")
        self.has_state = all(callable(getattr(data, name, None)) for name in methods)
        self._iterator: Iterator[Any] | None = None  # None: not begun
        self._next = 0  # the number of the batch that the iterator yields next
        self._kept: dict[int, tuple[Pair, int]] = {}  # in the order in which they were asked for
        self._states: dict[int, Any] = {}  # before a batch, by its number
        self._first = 0  # the batch before which this process began: its state is kept
        # Of batch 0: its number of samples, and a hash of it
        self._size: int | None = None
        self._hash = 0

    def first(self) -> tuple[int, int]:
        """Return the number of samples of the first batch, and a hash of it.

        No other batch has more samples. All ranks must have the same first batch. Raises DataError
        where the stream has a state after it that no checkpoint could keep.
        """
        if self._size is None:
            self.batch(0)
            if self.has_state:
                pack(self._data.state_dict())
        assert self._size is not None
        return self._size, self._hash

    def batch(self, number: int) -> tuple[Pair, int]:
        """Return batch `number`, and its number of samples.

        Raises DataError where the iterable has none, or another first batch than before.
        """
        if number in self._kept:
            return self._kept[number]
        if self._iterator is None or number < self._next:
            self._seek(number)
        read = self._advance()
        while self._next <= number:
            read = self._advance()
        self._kept[number] = read
        self._forget()
        return read

    def state_before(self, number: int) -> Tensor:
        """Return the stream's state before a batch, as bytes: (n,) uint8."""
        # Reading the batch keeps the state before it.
        if number not in self._states:
            self.batch(number)
        return pack(self._states[number])

    def load(self, state: Tensor, number: int) -> None:
        """Continue from the state before batch `number`."""
        self.first()  # the ranks compare it
        self._states = {number: unpack(state)}
        self._first = number
        self._iterator = None
        self._kept.clear()

    def batches(self, limit: int) -> list[Counted]:
        """Return the batches of the first pass that have about `limit` samples, and end the pass."""
        found = []
        samples = 0
        self._seek(0)
        while samples < limit:
            batch = self._read()
            if batch is END:
                break
            pair, size = counted(batch)
            found.append(Counted(pair, size))
            samples += size
            self._next += 1
        self.close()
        return found

    def close(self) -> None:
        """Let go of the iterator; torch ends its worker processes then."""
        self._iterator = None

    def _seek(self, number: int) -> None:
        """Begin at the newest known state that is not after batch `number`, else at batch 0."""
        known = [of for of in self._states if of <= number]
        assert known or not self._states, "no batch before that of a loaded state is read"
        self._next = max(known, default=0)
        if known:
            self._data.load_state_dict(copy.deepcopy(self._states[self._next]))
        self._begin_pass()

    def _begin_pass(self) -> None:
        # What it draws when it begins, such as an order, follows from the number of the batch.
        with generators_kept():
            seed_generators_for(self._seed, self._next, -1)
            self._iterator = iter(self._data)

    def _read(self) -> Any:
        """Return the next batch of this pass, or END."""
        assert self._iterator is not None
        with generators_kept():
            seed_generators_for(self._seed, self._next, 0)
            return next(self._iterator, END)

    def _advance(self) -> tuple[Pair, int]:
        """Return the next batch, of the next pass where this one is at its end, and its samples."""
        if self.has_state:
            # A copy, because a stream may return the object that it goes on to change.
            self._states[self._next] = copy.deepcopy(self._data.state_dict())
        batch = self._read()
        if batch is END:
            self._begin_pass()
            batch = self._read()
        if batch is END:
            raise DataError(
                f"the {self._split} data yield no batch; give an iterable that can be iterated "
                "again"
            )
        pair, samples = counted(batch)
        if self._next == 0:
            self._note_first(pair, samples)
        if self._size is not None and samples > self._size:
            raise DataError(
                f"batch {self._next} of the {self._split} data has {samples} samples, more than "
                f"micro_batch_size = {self._size}, which the first one had; give batches of at most "
                "that size"
            )
        self._next += 1
        return pair, samples

    def _note_first(self, pair: Pair, samples: int) -> None:
        """Note what batch 0 is. Raises DataError where it was another one before."""
        found = hash_of(pair)
        if self._size is not None and found != self._hash:
            raise DataError(
                f"the {self._split} data yield another first batch when they are iterated again, so "
                "no earlier batch can be read again; draw from torch's, numpy's or Python's global "
                "generator, which nanoray seeds, or give a dataset with len() and []"
            )
        self._size = samples
        self._hash = found

    def _forget(self) -> None:
        """Drop old batches, and the states before them."""
        while len(self._kept) > KEPT:
            del self._kept[next(iter(self._kept))]
        oldest = min(self._kept)
        for number in list(self._states):
            if number < oldest and number != self._first:
                del self._states[number]


def pack(state: Any) -> Tensor:
    """Return a stream's state as bytes of JSON, (n,) uint8.

    Raises DataError for types other than numbers, text, lists, tuples, dicts and tensors.
    """
    try:
        plain = take_apart(state, "state")
    except Unsupported as error:
        raise DataError(
            f"the state of the train data has a {error.kind} at {error.where}, which a checkpoint "
            "cannot hold; let state_dict() return numbers, text, tensors, and lists, tuples and dicts "
            "of them"
        ) from None
    return torch.frombuffer(bytearray(json.dumps(plain).encode()), dtype=torch.uint8)


def unpack(packed: Tensor) -> Any:
    """Return the state that was given to `pack`."""
    return put_together(json.loads(packed.cpu().contiguous().numpy().tobytes()))

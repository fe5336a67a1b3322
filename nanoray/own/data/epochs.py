"""The samples of a run, epoch after epoch, in places that anyone can compute.

    DataLoader of 10 items, batch_size 4   │ 0 1 2 3 │ 4 5 6 7 │ 8 9 - - │ 0 1 2 3 │ ...
                                           └──────── epoch 0 ────────────┘└ epoch 1
    with drop_last                         │ 0 1 2 3 │ 4 5 6 7 │ 0 1 2 3 │ ...
    a dataset alone                        │ 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 ...

A step takes the next places. The last batch of an epoch may end in empty places, so that steps stay
equally long in places, and an epoch begins where torch's own loader begins one.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from nanoray.data.order import EpochOrder
from nanoray.data.seeding import generators_kept, seed_generators_for
from nanoray.errors import DataError

Draw = Callable[[int], Any]  # epoch -> its items in their order: an array, or a list
KEPT = 3  # epochs whose order is kept: a step may begin in one and end in the next
PART = 2**18  # the most items of a sampler that are drawn ahead
PART_OF_BATCHES = 2**13  # the same of a batch_sampler


class Sample(NamedTuple):
    """One sample of a run."""

    number: int  # its place: no other sample of the run has it
    item: Any  # what the dataset's [] takes; with a batch_sampler, a BatchOfItems


class BatchOfItems(list[Any]):
    """The items of a batch that a batch_sampler has drawn."""


class Epochs:
    """Maps the places of a run to samples."""

    def __init__(
        self, draw: Draw, size: int | None, batch: int = 1, drop_last: bool = False
    ) -> None:
        """`size`: the items of every epoch; None where `draw` decides, epoch by epoch.

        Raises DataError where an epoch has no place.
        """
        self._draw = draw
        self._size = size
        self.batch = batch
        self.drop_last = drop_last
        self._orders: dict[int, Any] = {}
        self._ends: list[int] = []  # the place after each epoch's last; empty with a known size
        self.samples(0, 1)

    @property
    def may_have_gaps(self) -> bool:
        """Whether the last batch of an epoch may have fewer samples than the others."""
        if self.drop_last or self.batch == 1:
            return False
        return self._size is None or self._size % self.batch > 0

    def samples(self, first: int, count: int) -> list[Sample]:
        """Return the samples in places first ... first + count - 1; empty places have none."""
        found = []
        place = first
        while place < first + count:
            epoch, start, end = self._epoch_of(place)
            order = self._order(epoch)
            stop = min(first + count, end)
            items = order[place - start : stop - start]
            if isinstance(items, np.ndarray):
                items = items.tolist()
            for number, item in enumerate(items, place):
                found.append(Sample(number, item))
            place = stop
        return found

    @property
    def first_size(self) -> int:
        """The samples of epoch 0; sample i of them has place i."""
        items = len(self._order(0))
        return items - items % self.batch if self.drop_last else items

    def first_epoch(self) -> list[Sample]:
        """Return the samples of epoch 0."""
        _, _, end = self._epoch_of(0)
        return self.samples(0, end)

    @property
    def beginning(self) -> list[Any]:
        """The first items of epoch 0."""
        return list(self._order(0)[:4096])

    def _epoch_of(self, place: int) -> tuple[int, int, int]:
        """Return the epoch of a place, its first place, and the one after its last."""
        if self._size is not None:
            length = self._places(self._size, 0)
            epoch = place // length
            return epoch, epoch * length, (epoch + 1) * length

        # Epochs of different lengths are counted from the first on.
        while not self._ends or self._ends[-1] <= place:
            epoch = len(self._ends)
            begin = self._ends[-1] if self._ends else 0
            self._ends.append(begin + self._places(len(self._order(epoch)), epoch))
        epoch = bisect_right(self._ends, place)
        begin = self._ends[epoch - 1] if epoch else 0
        return epoch, begin, self._ends[epoch]

    def _places(self, items: int, epoch: int) -> int:
        """Return the places of an epoch of this number of items."""
        batches = items // self.batch
        if items % self.batch and not self.drop_last:
            batches += 1
        if batches == 0:
            reason = "the sampler draws no item"
            if items:
                reason = f"drop_last leaves out {items} samples, fewer than batch_size {self.batch}"
            raise DataError(f"epoch {epoch} of the data has no batch: {reason}; give more samples")
        return batches * self.batch

    def _order(self, epoch: int) -> Any:
        if epoch not in self._orders:
            self._orders[epoch] = self._draw(epoch)
            if len(self._orders) > KEPT:
                del self._orders[next(iter(self._orders))]  # the one that was drawn first
        return self._orders[epoch]


class Drawn:
    """What a sampler of torch's or of the script's draws, in parts of at most `part` items.

    A part is an epoch, unless `__iter__` yields more items: then the next part begins where this one
    stopped. So a sampler may have no end.
    """

    def __init__(self, sampler: Iterable[Any], seed: int, part: int = PART) -> None:
        self._sampler = sampler
        self._seed = seed
        self._part = part
        # The generators that it draws from, with the seeds that the script has given them
        self._generators = {}
        for owner in (sampler, getattr(sampler, "sampler", None)):
            generator = getattr(owner, "generator", None)
            if isinstance(generator, torch.Generator):
                self._generators[generator] = generator.initial_seed()
        self._epochs: list[int] = []  # the epoch of each part that was drawn
        self._epoch = 0
        self._iterator: Iterator[Any] | None = None  # of this epoch; None: it has not begun

    def __call__(self, part: int) -> Sequence[Any]:
        """Return a part's items. The parts before it are drawn first, in their order."""
        # Going back means to begin the part's epoch anew.
        if part < len(self._epochs):
            self._epoch = self._epochs[part]
            self._iterator = None
            del self._epochs[self._epochs.index(self._epoch) :]

        # A sampler may have a state of its own, which is the same in every process.
        items: Sequence[Any] = ()
        while len(self._epochs) <= part:
            with generators_kept():
                items = self._next_part()
        return items

    def _next_part(self) -> Sequence[Any]:
        items: Sequence[Any] = ()
        if self._iterator is not None:
            seed_generators_for(self._seed, self._epoch, len(self._epochs))
            items = list(islice(self._iterator, self._part))
            if not items:
                self._epoch += 1
        if not items:
            self._iterator = self._begin(self._epoch)
            items = list(islice(self._iterator, self._part))
        self._epochs.append(self._epoch)
        return items

    def _begin(self, epoch: int) -> Iterator[Any]:
        set_epoch = getattr(self._sampler, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        seed_generators_for(self._seed, epoch)
        for generator, initial in self._generators.items():
            generator.manual_seed(_seed_of_epoch(initial, epoch))
        return iter(self._sampler)


class DrawnBatches(Drawn):
    """The parts of a batch_sampler: lists of items."""

    def __init__(self, sampler: Iterable[Any], seed: int) -> None:
        super().__init__(sampler, seed, PART_OF_BATCHES)

    def __call__(self, part: int) -> Sequence[Any]:
        return [BatchOfItems(batch) for batch in super().__call__(part) if len(batch)]


def _seed_of_epoch(initial: int, epoch: int) -> int:
    """Return a generator's seed for an epoch: the script's own for the first one."""
    return (initial + epoch * 0x9E3779B97F4A7C15) % 2**63


def draw_of(
    sampler: Iterable[Any], seed: int, own: EpochOrder, batch: int
) -> tuple[Draw, int | None]:
    """Return how a sampler's epochs are drawn, and their size where it is the same for all.

    `own`: nanoray's order of the dataset, for a shuffle that the script leaves to the loader.
    `batch`: the samples of a batch; one with samples of two parts would be cut.
    """
    if type(sampler) is SequentialSampler:
        return lambda epoch: range(own.count), own.count

    if type(sampler) is RandomSampler:
        is_plain = not sampler.replacement and sampler.num_samples == own.count
        if is_plain and sampler.generator is None:
            return own.order, own.count

    if isinstance(sampler, DistributedSampler):
        # It leaves out what is another rank's: here the ranks share each step of the whole order.
        whole = copy.copy(sampler)
        whole.num_replicas = 1
        whole.rank = 0
        whole.num_samples = own.count
        whole.total_size = own.count
        return Drawn(whole, seed, own.count), own.count
    return Drawn(sampler, seed, batch * max(PART // batch, 1)), None

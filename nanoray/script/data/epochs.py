"""The samples of a run, epoch after epoch, in places that anyone can compute.

    DataLoader of 10 items, batch_size 4   │ 0 1 2 3 │ 4 5 6 7 │ 8 9 - - │ 0 1 2 3 │ ...
                                           └──────── epoch 0 ────────────┘└ epoch 1
    with drop_last                         │ 0 1 2 3 │ 4 5 6 7 │ 0 1 2 3 │ ...
    a dataset alone                        │ 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 ...

A step takes the next places. The last batch of an epoch may end in empty places, so that steps stay
equally long in places, and an epoch begins where torch's own loader begins one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from nanoray.data.order import EpochOrder, mix
from nanoray.errors import DataError

Order = Callable[[int], Any]  # epoch -> the dataset's items in their order, which a slice reads
KEPT = 3  # epochs whose order is kept: a step may begin in one and end in the next


class Sample(NamedTuple):
    """One sample of a run."""

    number: int  # its place: no other sample of the run has it
    item: int  # what the dataset's [] takes


class Epochs:
    """Maps the places of a run to samples."""

    def __init__(self, order: Order, count: int, batch: int = 1, drop_last: bool = False) -> None:
        """`count`: the items of the dataset; `batch`: the samples of a loader's batch.

        Raises DataError where an epoch has no batch.
        """
        self._order = lru_cache(maxsize=KEPT)(order)
        self.items = count - count % batch if drop_last else count  # that an epoch trains on
        if not self.items:
            raise DataError(
                f"drop_last leaves out all {count} samples, fewer than batch_size {batch}; give more "
                "samples"
            )
        batches = -(-self.items // batch)
        self._places = batches * batch  # of an epoch

    @property
    def may_have_gaps(self) -> bool:
        """Whether the last batch of an epoch has fewer samples than the others."""
        return self._places > self.items

    def samples(self, first: int, count: int) -> list[Sample]:
        """Return the samples in places first ... first + count - 1; empty places have none."""
        found = []
        place = first
        while place < first + count:
            epoch, begin = divmod(place, self._places)
            end = min(begin + first + count - place, self._places)
            items = np.asarray(self._order(epoch)[begin : min(end, self.items)]).tolist()
            for number, item in enumerate(items, place):
                found.append(Sample(number, item))
            place += end - begin
        return found


def order_of(dataset: Any, seed: int, shuffled: bool) -> Order:
    """Return the order of a dataset's items: as they lie, or by a permutation from (seed, epoch)."""
    if not shuffled:
        in_order = range(len(dataset))
        return lambda epoch: in_order
    return EpochOrder(len(dataset), mix(np.array([seed], np.uint64))).order

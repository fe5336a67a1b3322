"""The order of samples from a dataset of N items: each epoch is a permutation, from a key."""

from __future__ import annotations

import numpy as np


class EpochOrder:
    """Sample i is an item of epoch i // N.

    There is no state: one integer resumes the order, and any rank can compute any part of it.
    """

    def __init__(self, count: int, key: np.ndarray) -> None:
        """Order `count` = N items; `key`, (1,) uint64, follows from the seed."""
        self.count = count
        self._key = key
        self._orders: dict[int, np.ndarray] = {}  # of the newest epochs

    def order(self, epoch: int) -> np.ndarray:
        """Return an epoch's items in their order, (N,) int64: sorted by hash (key, epoch, item)."""
        if epoch not in self._orders:
            first = np.array([epoch * self.count + 1], np.uint64)
            hashes = mix(self._key + (first + np.arange(self.count, dtype=np.uint64)) * GOLDEN)
            # Keep two epochs: a batch may hold the end of one and the start of the next.
            newest = dict(sorted(self._orders.items())[-1:])
            self._orders = newest | {epoch: np.argsort(hashes, kind="stable")}
        return self._orders[epoch]

    def indices(self, first_sample: int, count: int) -> np.ndarray:
        """Return the items of samples first_sample ... first_sample + count - 1, (count,) int64."""
        epochs, places = np.divmod(np.arange(first_sample, first_sample + count), self.count)
        return np.concatenate(
            [self.order(int(epoch))[places[epochs == epoch]] for epoch in np.unique(epochs)]
        )


def validation_batches(
    windows: np.ndarray, rank: int, ranks: int, at_once: int
) -> list[tuple[np.ndarray, bool]]:
    """Return a rank's batches of an evaluation: their windows, and whether their scores count.

    Ranks take windows in turn. All have equally many batches, because sharded weights are gathered in
    each forward; a rank that has run out of windows computes the first one, which does not count.
    """
    own = windows[rank::ranks]
    longest = -(-len(windows) // ranks)
    batches = []
    for first in range(0, longest, at_once):
        batch = own[first : first + at_once]
        counts = len(batch) > 0
        batches.append((batch if counts else windows[:1], counts))
    return batches


# The hash from which orders of samples and generated data follow. numpy only: the driver imports it.


GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64's step: 2**64 / the golden ratio, made odd


def mix(z: np.ndarray) -> np.ndarray:
    """Return SplitMix64's hash of each uint64 (Steele et al. 2014)."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))

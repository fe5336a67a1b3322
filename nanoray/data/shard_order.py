"""The order of a stream: whole shards in an order of their own in each epoch, and windows of samples.

    epoch 0   shard 2 ──────────► shard 0 ────► shard 1 ────────►      drawn from (seed, epoch)
              0 1 2 3 │ 4 5 6 7 │ 8 9 ...                              places, in windows of 4
              2 0 3 1 │ 7 4 5 6 │ 9 8 ...                              each window is shuffled

A place of the run leads to its record by arithmetic, so there is no state: any rank computes any part
of the order, and the number of samples consumed resumes it. What a rank reads within a short time lies
in one window, which is a stretch of a shard, or of a few.
"""

from __future__ import annotations

import numpy as np

from nanoray.data.hashing import GOLDEN, mix

WINDOW = 10_000  # samples that are shuffled together
_KEPT = 3  # windows: a batch may hold the end of one and the start of the next


class ShardOrder:
    """The epochs of a stream over shards with these numbers of records."""

    def __init__(self, counts: list[int], seed: int, window: int) -> None:
        """`window`: the samples that are shuffled together; 0: the order of the files."""
        self._counts = np.array(counts, np.int64)
        self._key = mix(np.array([seed], np.uint64))  # (1,): arrays overflow without a warning
        self._window = window

    def epoch(self, number: int) -> EpochOfShards | range:
        """Return the records of an epoch in their order, as a sequence."""
        if not self._window:
            return range(int(self._counts.sum()))
        key = mix(self._key + _numbers(number, number + 1) * GOLDEN)
        return EpochOfShards(self._counts, key, self._window)


class EpochOfShards:
    """One epoch: a slice of it is an array of records, numbered through all shards, int64."""

    def __init__(self, counts: np.ndarray, key: np.ndarray, window: int) -> None:
        """`key`, (1,) uint64, follows from the seed and the epoch."""
        shards = np.argsort(mix(key + _numbers(0, len(counts)) * GOLDEN), kind="stable")
        firsts = np.cumsum(counts) - counts
        self._firsts = firsts[shards]  # the first record of each shard, in the epoch's order
        self._ends = np.cumsum(counts[shards])  # the place after each shard's last one
        self._begins = self._ends - counts[shards]
        self._key = mix(key)  # so that places draw other numbers than shards
        self._window = window
        self._windows: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, places: slice) -> np.ndarray:
        """Return the records of these places, (n,) int64."""
        start, stop, _ = places.indices(len(self))
        parts = []
        place = start
        while place < stop:
            window = place // self._window
            first = window * self._window
            end = min(stop, first + self._window)
            parts.append(self._shuffled(window)[place - first : end - first])
            place = end
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _shuffled(self, window: int) -> np.ndarray:
        """Return the records of a window in their order."""
        if window in self._windows:
            return self._windows[window]

        # Sort the places of the window by their hashes.
        first = window * self._window
        end = min(first + self._window, len(self))
        hashes = mix(self._key + _numbers(first, end) * GOLDEN)
        places = first + np.argsort(hashes, kind="stable")

        # A place lies in the first shard that ends behind it, which skips shards without a record.
        shards = np.searchsorted(self._ends, places, side="right")
        records = self._firsts[shards] + places - self._begins[shards]
        self._windows[window] = records
        if len(self._windows) > _KEPT:
            del self._windows[next(iter(self._windows))]
        return records


def _numbers(first: int, end: int) -> np.ndarray:
    """Return first + 1 ... end, uint64: none is 0, whose hash would be that of the key alone."""
    return np.arange(first + 1, end + 1, dtype=np.uint64)

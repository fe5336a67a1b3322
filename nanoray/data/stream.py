"""A stream over numbered shards: exact after a resume, at any number of ranks and worker processes.

    files ──► index: records of each file ──► order (ShardOrder): place of the run ──────► record
                                                                                            │
    the model ◄── collation ◄── transform, seeded by the place of the run ◄── read (shards.py)

The order is a function of (seed, place), and records are found by the index. So the one integer that a
checkpoint has for every data set, the samples consumed, is the position of the stream as well.
"""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from nanoray.data.order import GOLDEN, mix
from nanoray.data.shards import (
    KINDS,
    Lines,
    ShardFile,
    Tokens,
    find_files,
    kind_of,
    parse_json,
    parse_text,
)
from nanoray.errors import DataError

Files = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
_PAGE = 4096  # bytes from both ends of a file that its hash covers


class ShardStream(IterableDataset[Any]):
    """Samples from files that are read in sequence: JSON lines, text or tokens.

    `RuntimeEngine.fit` reads it in an order that follows from the run's seed: the files are shuffled
    in each epoch, and their samples within a window. A run continues in the middle of an epoch with
    any number of ranks and of worker processes, and repeats or skips no sample. Iterated by other
    code, it yields the samples in the order of the files.
    """

    files: list[Path]
    """the files, in the order of their names or of the list"""

    kind: str
    """jsonl, text or tokens"""

    counts: list[int]
    """the number of samples in each file"""

    transform: Callable[[Any], Any] | None
    """makes an item of a record"""

    window: int
    """how many samples are shuffled together; 0: none are"""

    block_size: int
    """the length of a sample in tokens; 0: the files are no tokens"""

    def __init__(
        self,
        files: Files,
        transform: Callable[[Any], Any] | None = None,
        *,
        kind: str = "auto",
        block_size: int = 0,
        shuffle: bool = True,
        window: int | None = None,
    ) -> None:
        """Find the files, and count their samples.

        `files`: a file, a folder, a pattern, or a list of them. `transform`: makes an item, a pair
        or a dict, of a record; the generators of torch, numpy and Python that it draws from are
        seeded for each sample. `kind`: jsonl (a record is a line's value), text (a line), or tokens
        (`block_size` + 1 ids; without a `transform`, inputs and targets); auto: by the names of the
        files. `window`: how many samples are shuffled together. The first time, files of lines are
        read once for their index, which stays beside them. Raises DataError for files that cannot be
        read so.
        """
        if kind not in ("auto", *KINDS):
            raise DataError(f"kind = {kind!r} is none of auto, {', '.join(KINDS)}; choose of these")
        if window is not None and (not isinstance(window, int) or window < 1):
            raise DataError(f"window = {window!r} is no number above 0; without one it is {WINDOW}")
        if window is not None and not shuffle:
            raise DataError(
                f"window = {window} would be ignored: the stream is not shuffled; drop it, or "
                "shuffle=False"
            )
        self.files = find_files(files)
        self.kind = kind_of(self.files) if kind == "auto" else kind
        self._require_options(block_size)
        self.transform = transform
        self.window = (window or WINDOW) if shuffle else 0
        self.block_size = block_size

        make = self._maker(block_size)
        self._shards: list[ShardFile] = []
        for path in self.files:
            try:
                self._shards.append(make(path))
            except OSError as error:
                raise DataError(
                    f"cannot read {path}: {error.strerror}; check the path and its permissions"
                ) from None
        self.counts = [shard.records for shard in self._shards]
        self._ends = list(accumulate(self.counts))
        self._identity: dict[str, Any] = {}

    def _require_options(self, block_size: int) -> None:
        """Raise DataError for options that the kind of files does not have, or lacks."""
        if block_size and self.kind != "tokens":
            raise DataError(
                f"block_size = {block_size} would be ignored: the files are {self.kind}; prepare "
                "token shards with nanoray data tokenize, or cut in transform"
            )
        if self.kind == "tokens" and not (isinstance(block_size, int) and block_size > 0):
            raise DataError(
                "files of tokens need block_size, the tokens of a sample; give block_size=1024 or "
                "what the model takes"
            )

    def _maker(self, block_size: int) -> Callable[[Path], ShardFile]:
        """Return the function that opens a file of the stream's kind."""
        if self.kind == "jsonl":
            return partial(Lines, parse=parse_json, what="JSON")
        if self.kind == "text":
            return partial(Lines, parse=parse_text, what="UTF-8 text")
        return partial(Tokens, block_size=block_size)

    def __len__(self) -> int:
        """Return the samples of an epoch."""
        return self._ends[-1]

    def __getitem__(self, number: int) -> Any:
        """Return a sample by its number, counted through the files in their order."""
        if not 0 <= number < len(self):
            raise IndexError(f"the stream has {len(self)} samples, and no number {number}")
        # The first file that ends behind it, which skips files without a record.
        shard = bisect_right(self._ends, number)
        record = int(number) - (self._ends[shard] - self.counts[shard])
        value = self._shards[shard].read(record)
        if self.transform is None:
            if self.kind == "tokens":
                tokens = torch.from_numpy(value)
                return tokens[:-1], tokens[1:]
            return value

        item = self.transform(value)
        if item is None:
            raise DataError(
                f"transform returned None for record {record} of {self.files[shard]}, but a stream "
                "has no gaps; leave records out when the files are written, or give their loss no "
                "weight (nanoray.Weighted)"
            )
        return item

    def __iter__(self) -> Iterator[Any]:
        """Yield the samples once, in the order of the files; workers of a DataLoader share them."""
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for number in range(first, len(self), step):
            yield self[number]

    def order(self, seed: int) -> ShardOrder:
        """Return the order of the samples in a run with this seed."""
        return ShardOrder(self.counts, seed, self.window)

    def describe(self) -> str:
        """Return in a few words what is read."""
        what = f"{len(self.files)} {self.kind} files"
        if len(self.files) == 1:
            what = f"one {self.kind} file"
        how = (
            f"shuffled in windows of {self.window}" if self.window else "in the order of the files"
        )
        return f"a stream of {len(self)} samples in {what}, {how}"

    def identity(self) -> dict[str, Any]:
        """Return what the order of the samples depends on beside the seed, as JSON types.

        A hash covers the names, sizes and counts of the files and both ends of their content. The
        first call reads these, and costs an open of each file.
        """
        if self._identity:
            return self._identity
        digest = hashlib.sha256()
        for shard in self._shards:
            digest.update(f"{shard.path.name} {shard.size} {shard.records}\n".encode())
            digest.update(_ends_of(shard))
        self._identity = {
            "files": len(self.files),
            "samples": len(self),
            "kind": self.kind,
            "block_size": self.block_size,
            "window": self.window,
            "content": digest.hexdigest()[:16],
        }
        return self._identity


def _ends_of(shard: ShardFile) -> bytes:
    """Return the first and the last bytes of a file. Raises DataError when it has changed."""
    try:
        with shard.path.open("rb") as file:
            shard.require_size(os.fstat(file.fileno()).st_size)
            first = file.read(_PAGE)
            file.seek(max(0, shard.size - _PAGE))
            return first + file.read(_PAGE)
    except OSError as error:
        raise DataError(f"cannot open {shard.path}: {error.strerror}; restore the file") from None


# The order of a stream: whole shards in an order of their own in each epoch, and windows of samples.
#
#     epoch 0   shard 2 ──────────► shard 0 ────► shard 1 ────────►      drawn from (seed, epoch)
#               0 1 2 3 │ 4 5 6 7 │ 8 9 ...                              places, in windows of 4
#               2 0 3 1 │ 7 4 5 6 │ 9 8 ...                              each window is shuffled
#
# A place of the run leads to its record by arithmetic, so there is no state: any rank computes any part
# of the order, and the number of samples consumed resumes it. What a rank reads within a short time lies
# in one window, which is a stretch of a shard, or of a few.


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

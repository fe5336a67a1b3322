"""Read batches of tokens in an order that depends only on the seed.

Sample i is a pure function of (seed, i): the number of ranks does not matter, and one integer
resumes the order.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from nanoray.config import Batch
from nanoray.data.dataset import DatasetInfo, TokenFile
from nanoray.data.order import GOLDEN, mix
from nanoray.data.sequence_part import SequencePart, own_parts
from nanoray.errors import DataError


class TokenData:
    """The two splits, memory-mapped: all ranks of a node share the page cache."""

    def __init__(
        self, info: DatasetInfo, block_size: int, seed: int, device: torch.device | None = None
    ) -> None:
        """Open `info`. Raises DataError when its files' sizes are not the recorded ones."""
        self._files = {"train": open_tokens(info, "train"), "val": open_tokens(info, "val")}
        assert min(info.train_tokens, info.val_tokens) > block_size, "prepare refuses this"
        self.block_size = block_size
        self.device = device
        # (1,): numpy warns of overflow in scalars, not in arrays
        self._key = mix(np.array([seed], np.uint64))

    def offsets(self, first_sample: int, count: int) -> np.ndarray:
        """Return the starts in the train tokens of `count` samples from `first_sample` on, (count,) int64.

        They are drawn with replacement, as in nanoGPT. Sample i is output i of SplitMix64 (Steele et
        al. 2014), started at a hash of the seed. There is no state: any rank can compute any sample.
        The bias of `%` is below 2**-24.
        """
        index = np.arange(first_sample, first_sample + count, dtype=np.uint64)
        windows = np.uint64(len(self._files["train"].numbers) - self.block_size)
        return (mix(self._key + (index + np.uint64(1)) * GOLDEN) % windows).astype(np.int64)

    def train_batch(self, first_sample: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets of `count` samples, both (B, T) int64 on the device."""
        return self._batch("train", self.offsets(first_sample, count))

    def val_windows(self, limit: int) -> np.ndarray:
        """Return at most `limit` starts in the val tokens, evenly spaced and not overlapping, int64.

        The ranks split these windows, so the validation loss is the same at any world size.
        """
        last_start = len(self._files["val"].numbers) - self.block_size - 1
        count = min(limit, last_start // self.block_size + 1)
        return evenly_spaced(last_start, count)

    def val_batch(self, starts: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets at `starts`, both (B, T) int64 on the device."""
        return self._batch("val", starts)

    def _batch(self, split: str, starts: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        file = self._files[split]
        file.require_whole()
        window = np.arange(self.block_size + 1)
        numbers = file.numbers[starts[:, None] + window]  # (B, T + 1)
        tokens = on_device(numbers.astype(np.int64), self.device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def on_device(numbers: np.ndarray, device: torch.device | None) -> torch.Tensor:
    """Return numbers as a tensor on a device; None: the CPU."""
    tensor = torch.from_numpy(numbers)
    if device is not None and device.type == "cuda":
        # From pageable memory the copy would block the host.
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def evenly_spaced(last: int, count: int) -> np.ndarray:
    """Return `count` numbers from 0 to `last`, (count,) int64."""
    return np.arange(count, dtype=np.int64) * last // max(1, count - 1)


class Samples(Protocol):
    """A dataset as the loop sees it: batches of inputs and targets, on the device."""

    def train_batch(self, first_sample: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets (B, ...) of `count` samples.

        Sample i depends on the seed and on i only.
        """

    def val_windows(self, limit: int) -> np.ndarray:
        """Return the places of at most `limit` validation samples, equal at every world size."""

    def val_batch(self, starts: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets (B, ...) at some of the places that `val_windows` returned."""


class MicroBatches:
    """This rank's share of each step's samples, read one micro batch ahead of the loop.

    A step takes the next global_batch_size samples, whatever the number of ranks. Micro batch m of
    rank r holds the samples from (m * dp + r) * micro_batch_size on. The caller keeps the cursor,
    and may move it at will.
    """

    def __init__(
        self,
        data: Samples,
        batch: Batch,
        rank: int,
        length_at: Callable[[int], int] | None = None,
        part: SequencePart | None = None,
    ) -> None:
        """Read for `rank` of the data ranks, of which `batch` has dp.

        With `length_at`, samples (T,) of step s become sequences (length_at(s),). The step is
        counted by the samples before it. With `part`, this rank has some positions of each sequence,
        and T stands for their number in what the methods return.
        """
        self.data = data
        self.batch = batch
        self.rank = rank
        self.length_at = length_at
        self.part = part
        self._samples_per_step = batch.global_size
        # At most one micro batch, by (first sample of its step, its number)
        self._ahead: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self.seconds = 0.0  # of host time spent on reading, so far

    def step(self, samples: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the micro batches (B, T), targets too, of the step that begins at `samples`."""
        for micro in range(self.batch.accum):
            start = time.perf_counter()
            batch = self._ahead.pop((samples, micro), None)
            if batch is None:
                batch = self.get(samples, micro)

            # Read the following one now, while a GPU still computes.
            # A repeated or skipped step needs another one; then this one was read for nothing.
            following = (samples, micro + 1)
            if micro + 1 == self.batch.accum:
                following = (samples + self._samples_per_step, 0)
            self._ahead = {following: self.get(*following)}
            self.seconds += time.perf_counter() - start
            yield batch

    def get(
        self, samples: int, micro: int, rank: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one micro batch (B, T), targets too, of the step that begins at `samples`.

        It is this rank's, or that of another data rank.
        """
        size, _, dp = self.batch
        if rank is None:
            rank = self.rank
        # The ranks' micro batches are interleaved, so that a step takes the same samples at every dp.
        x, y = self.data.train_batch(samples + (micro * dp + rank) * size, size)
        if self.length_at is not None:
            length = self.length_at(samples // self.batch.global_size)
            x = x.view(-1, length)  # (B * T / length, length)
            y = y.view(-1, length)
        if self.part is None:
            return x, y
        return own_parts(self.part, x, y)

    def val_batch(self, starts: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets (B, T) at some of the places that the data's `val_windows`
        returned.
        """
        x, y = self.data.val_batch(starts)
        if self.part is None:
            return x, y
        return own_parts(self.part, x, y)

    def describe(self, samples: int, micro: int | None) -> str:
        """Return this rank's samples of a step, or of one of its micro batches, as text."""
        size, accum, dp = self.batch
        ranges = []
        for m in range(accum):
            if micro in (None, m):
                first = samples + (m * dp + self.rank) * size
                ranges.append(f"{first} to {first + size - 1}")
        return ", ".join(ranges)


class MemoryMap:
    """A memory-mapped file, which must keep the size that it had when it was prepared.

    Reading beyond the end of one that shrank would be a SIGBUS, so call `require_whole` before.
    """

    def __init__(self, path: Path, dtype: str, size: int, offset: int = 0) -> None:
        """Open it. Raises DataError when it is missing or has another size."""
        self.path = path
        self._size = size
        self.require_whole()
        # numpy indexes a plain array faster than a memmap.
        self.numbers = np.asarray(np.memmap(path, dtype=dtype, mode="r", offset=offset))

    def require_whole(self) -> None:
        """Raise DataError when the file does not have the prepared size."""
        try:
            size = os.stat(self.path).st_size
        except OSError as error:
            raise DataError(
                f"dataset changed: cannot open {self.path}: {error.strerror}; prepare it again, and "
                "with several nodes keep --data_dir on shared storage"
            ) from None
        if size != self._size:
            raise DataError(
                f"dataset changed: {self.path} has {size} bytes, but {self._size} were prepared; "
                "prepare it again"
            )


class JoinedFiles:
    """Several files that are read as one: a window may begin in one and end in the next.

    So the samples are those of one file with all tokens.
    """

    def __init__(self, folder: Path, files: Sequence[TokenFile], dtype: str) -> None:
        """Map each file. Raises DataError when one is missing or has another size."""
        itemsize = np.dtype(dtype).itemsize
        self._maps = []
        for file in files:
            size = file.offset + file.tokens * itemsize
            self._maps.append(MemoryMap(folder / file.name, dtype, size, file.offset))
        self._dtype = np.dtype(dtype)
        counts = np.array([file.tokens for file in files])
        self._ends = np.cumsum(counts)  # (files,)
        self._starts = self._ends - counts  # (files,)
        self.numbers = self  # as of a MemoryMap: to be indexed

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, places: np.ndarray) -> np.ndarray:
        """Return the tokens of windows, in the shape of `places`: each row counts up by 1."""
        rows = places.reshape(-1, places.shape[-1])  # (B, T + 1)
        tokens = np.empty(rows.shape, self._dtype)
        starts = rows[:, 0].tolist()
        files = np.searchsorted(self._ends, rows[:, 0], side="right").tolist()
        for row, (start, file) in enumerate(zip(starts, files, strict=True)):
            tokens[row] = self._read(start, rows.shape[1], file)
        return tokens.reshape(places.shape)

    def require_whole(self) -> None:
        """Do nothing: each file is checked when it is read."""

    def _read(self, start: int, count: int, number: int) -> np.ndarray:
        """Return `count` tokens from `start` on, which is in file `number`."""
        parts = []
        while count:
            take = min(count, int(self._ends[number]) - start)
            first = start - int(self._starts[number])
            self._maps[number].require_whole()
            parts.append(self._maps[number].numbers[first : first + take])
            start += take
            count -= take
            number += 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def open_tokens(info: DatasetInfo, split: str) -> MemoryMap | JoinedFiles:
    """Open the tokens of a split. Raises DataError as `open_mapped` does."""
    files = info.files(split)
    if len(files) > 1:
        return JoinedFiles(info.path, files, info.dtype)
    return open_mapped(info, split, np.dtype(info.dtype).itemsize)


def open_mapped(info: DatasetInfo, split: str, itemsize: int) -> MemoryMap:
    """Open a split of one file, with tokens or images of `itemsize` bytes.

    Raises DataError when it is missing or has another size than the prepared one.
    """
    (file,) = info.files(split)
    size = file.offset + file.tokens * itemsize
    return MemoryMap(info.path / file.name, info.dtype, size, file.offset)

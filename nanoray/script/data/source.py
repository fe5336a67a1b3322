"""Read the data of a script in an order that can be resumed. There are three kinds.

dataset       len() and []: sample k is number k mod N of a permutation that follows from
              (seed, k // N), so one integer resumes it (epochs.py)
DataLoader    torch's own around such a dataset, in order or shuffled: its batch_size, drop_last,
              collate_fn and worker processes are used, and the order is as above (reader.py)
stream        everything else that yields batches: every rank reads it, and the batches are dealt to
              the ranks in turn (stream.py)
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from nanoray.config import Batch
from nanoray.data.fallible import DataFailure, FallibleSamples
from nanoray.data.order import validation_batches
from nanoray.data.tokens import evenly_spaced
from nanoray.errors import DataError
from nanoray.script.data.batch import (
    Counted,
    CountedTargets,
    NamedBatch,
    Pair,
    as_pair,
    to_device,
)
from nanoray.script.data.epochs import Epochs, Sample, order_of
from nanoray.script.data.reader import Ahead, Reader
from nanoray.script.data.stream import Stream, pack, unpack

STREAM = "stream"  # the name of a stream's state in a checkpoint
ORDER = "order"  # the name of what the order of samples depends on
VALIDATION = 0x76616C  # keeps the draws of validation samples apart from those of training


class ScriptData(FallibleSamples):
    """The two splits of a script; items and batches are pairs (inputs, targets), or dicts."""

    def __init__(
        self,
        train: Any,
        val: Any,
        seed: int,
        micro: int,
        device: torch.device,
        place: tuple[int, int] = (0, 1),
        begun: Stream | None = None,
    ) -> None:
        """Choose how to read each split.

        `micro` is the number of samples of a batch, `place` the (index, number) of the data ranks,
        `begun` the training stream where its first batch was read already. Raises DataError for data
        that are of none of the three kinds.
        """
        self._device = device
        self._micro = micro
        self._rank, self._ranks = place
        self._counts = False  # whether targets come with their number of samples
        self._newest: tuple[Any, int] | None = None  # the newest batch, and its first sample

        self._train = begun or source_of(train, "train", seed)
        self._val: Items | Stream | Kept | None = None
        if val is not None:
            self._val = source_of(val, "val", seed ^ VALIDATION)
        self._val_plan: list[list[int]] = []  # the samples of each batch of an evaluation
        self._ahead: Ahead | None = None
        self._val_ahead: Ahead | None = None

        self._pins = False
        if isinstance(self._train, Items):
            self._pins = self._train.pins and device.type == "cuda"
            if self._train.workers:
                self._ahead = Ahead(self._train.reader, self._train.workers, self._samples_of_batch)

    def divide(self, batch: Batch, rank: int) -> None:
        """Note how the data ranks share a step from now on, and which one of them this is."""
        # The workers of another division have read ahead what this rank does not need.
        if (batch.micro, rank, batch.dp) != (self._micro, self._rank, self._ranks):
            self._close_ahead()
        self._micro = batch.micro
        self._rank = rank
        self._ranks = batch.dp
        # Alone in its step, a batch with fewer samples has the right mean already.
        self._counts = self.may_have_short_batches and batch.accum * batch.dp > 1

    @property
    def may_have_short_batches(self) -> bool:
        """Whether a batch of the training data may have fewer samples than micro_batch_size."""
        return isinstance(self._train, Stream) or self._train.epochs.may_have_gaps

    def train_batch(self, first_sample: int, count: int) -> tuple[Any, Any]:
        """Return inputs and targets of `count` samples, on the device.

        Where batches may be short, targets are CountedTargets. After an error, with `keeps_errors`, the
        newest batch is returned again, and `failure` has the error.
        """
        if self.failure is not None:
            return self._on_device(self._repeated())
        try:
            pair, samples = self._read(first_sample, count)
        except Exception as error:
            if not (self.keeps_errors and self._newest):
                raise
            self.failure = DataFailure(first_sample, error)
            return self._on_device(self._repeated())
        if self._counts:
            inputs, targets = pair
            pair = inputs, CountedTargets(targets, samples)
        self._newest = pair, first_sample
        return self._on_device(pair)

    def _repeated(self) -> tuple[Any, Any]:
        assert self._newest
        pair, _ = self._newest
        return pair

    def _read(self, first_sample: int, count: int) -> tuple[Pair, int]:
        """Return a micro batch, and its number of samples."""
        source = self._train
        if isinstance(source, Stream):
            return source.batch(first_sample // count)

        samples = source.epochs.samples(first_sample, count)
        if not samples:
            # A gap at the end of an epoch: any sample, which counts as none.
            return as_pair(source.reader.read(source.epochs.samples(0, 1))), 0
        if self._ahead is not None and self._is_own(first_sample, count):
            batch = self._ahead.batch(first_sample // (count * self._ranks))
        else:
            batch = source.reader.read(samples)
        return as_pair(batch), len(samples)

    def _is_own(self, first_sample: int, count: int) -> bool:
        """Whether a micro batch is one of this rank's."""
        return count == self._micro and first_sample // count % self._ranks == self._rank

    def _samples_of_batch(self, number: int) -> list[Sample]:
        """Return the samples of this rank's micro batch of this number; for worker processes."""
        assert isinstance(self._train, Items)
        first = (number * self._ranks + self._rank) * self._micro
        epochs = self._train.epochs
        return epochs.samples(first, self._micro) or epochs.samples(0, 1)

    def val_windows(self, limit: int) -> np.ndarray:
        """Return the numbers of at most `limit` validation samples, evenly spaced, int64."""
        if self._val is None:
            return np.empty(0, np.int64)
        if isinstance(self._val, Stream):
            # Validation batches are read once and kept: every evaluation uses the same samples.
            self._val = Kept(self._val.batches(limit))
        windows = evenly_spaced(len(self._val) - 1, min(limit, len(self._val)))
        if isinstance(self._val, Items) and self._val.workers:
            self._val_ahead = self._begin_evaluation(windows, self._val, self._val.workers)
        return windows

    def _begin_evaluation(
        self, windows: np.ndarray, source: Items, given: DataLoader[Any]
    ) -> Ahead:
        """Let worker processes read this rank's batches of an evaluation."""
        batches = validation_batches(windows, self._rank, self._ranks, self._micro)
        plan = [numbers.tolist() for numbers, _ in batches]
        self._val_plan = plan

        def samples_of(number: int) -> list[Sample] | None:
            return source.samples_of(plan[number]) if number < len(plan) else None

        return Ahead(source.reader, given, samples_of)

    def val_batch(self, starts: np.ndarray) -> tuple[Any, Any]:
        """Return inputs and targets of these validation samples, on the device."""
        assert isinstance(self._val, Items | Kept)
        numbers = starts.tolist()
        try:
            pair = self._read_validation(self._val, numbers)
        except Exception as error:
            if not (self.keeps_errors and self._newest):
                raise
            self.failure = self.failure or DataFailure(-1, error)
            inputs, targets = self._repeated()
            pair = inputs, targets.targets if isinstance(targets, CountedTargets) else targets
        return self._on_device(pair)

    def _read_validation(self, source: Items | Kept, numbers: list[int]) -> tuple[Any, Any]:
        if self._val_ahead is None:
            return source.items(numbers)
        return as_pair(self._val_ahead.batch(self._val_plan.index(numbers)))

    @property
    def windows_at_once(self) -> int:
        """The most validation windows that one call of `val_batch` reads."""
        return 1 if isinstance(self._val, Kept) else self._micro

    @property
    def in_batches(self) -> bool:
        """Whether the training data come in batches of a size of their own."""
        return isinstance(self._train, Stream)

    @property
    def has_state(self) -> bool:
        """Whether a checkpoint keeps the state of the script's stream."""
        return isinstance(self._train, Stream) and self._train.has_state

    @property
    def fingerprint(self) -> int:
        """A hash of a stream's first batch, else of what the order of samples depends on."""
        if isinstance(self._train, Stream):
            _, fingerprint = self._train.first()
            return fingerprint
        return zlib.crc32(repr(self.order).encode())

    def compare(self, fingerprints: Sequence[int]) -> None:
        """Raise DataError where the data of the ranks differ. `fingerprints` are those of all ranks."""
        if len(set(fingerprints)) == 1:
            return
        if isinstance(self._train, Stream):
            raise DataError(
                "the first batch of the train data differs between the ranks, but every rank reads "
                "all batches of a stream, and trains on its share of them; do not cut it by rank "
                "(DistributedSampler, split_dataset_by_node, islice), and seed what it draws"
            )
        raise DataError(
            "the train data have another length on some rank, so samples would be repeated and "
            "others left out; give every rank the same dataset"
        )

    def describe(self) -> str:
        """Return in a few words how the training data are read."""
        if isinstance(self._train, Items):
            return self._train.description
        with_state = " with a state" if self._train.has_state else ""
        return f"a stream of batches{with_state}, which every rank reads"

    def state_at(self, samples: int) -> dict[str, Tensor]:
        """Return what a checkpoint after `samples` samples of all ranks keeps of the data, by name."""
        state = {ORDER: pack(self.order)}
        if isinstance(self._train, Stream) and self._train.has_state:
            state[STREAM] = self._train.state_before(samples // self._micro)
        return state

    def load_state(self, saved: Mapping[str, Tensor], samples: int) -> None:
        """Let a stream with a state continue from the result of `state_at(samples)`."""
        assert isinstance(self._train, Stream)
        self._train.load(saved[STREAM], samples // self._micro)

    @property
    def order(self) -> dict[str, Any]:
        """What the order of samples depends on beside the seed."""
        if isinstance(self._train, Stream):
            return {"kind": "stream"}
        return {"kind": "dataset", "samples": len(self._train.reader.dataset)}

    def require_same_order(self, saved: Tensor) -> None:
        """Raise DataError where a checkpoint was saved with data whose order was another one."""
        was = unpack(saved)
        for key, now in self.order.items():
            if was.get(key) != now:
                raise DataError(
                    f"the train data have {key} = {now}, but the checkpoint was saved with "
                    f"{was.get(key)}, so some samples would be repeated and others left out; give the "
                    "data of then, or start a new run"
                )

    def close(self) -> None:
        """End the worker processes."""
        self._close_ahead()
        if isinstance(self._train, Stream):
            self._train.close()

    def _close_ahead(self) -> None:
        for ahead in (self._ahead, self._val_ahead):
            if ahead is not None:
                ahead.close()

    def _on_device(self, pair: tuple[Any, Any]) -> tuple[Any, Any]:
        inputs, targets = pair
        if isinstance(inputs, NamedBatch):
            inputs = NamedBatch(to_device(dict(inputs), self._device, self._pins))
            if isinstance(targets, CountedTargets):
                return inputs, CountedTargets(inputs, targets.samples)
            return inputs, inputs
        # A named tuple, so the parts of CountedTargets move as well.
        targets = to_device(targets, self._device, self._pins)
        return to_device(inputs, self._device, self._pins), targets


class Items:
    """A dataset, as it is or as torch's DataLoader reads it."""

    def __init__(self, data: Any, split: str, seed: int) -> None:
        """Raises DataError for a dataset without samples."""
        loader = data if isinstance(data, DataLoader) else None
        dataset: Any = data if loader is None else loader.dataset
        if not len(dataset):
            raise DataError(f"the {split} data are empty; give at least one sample")
        self.description = f"a dataset of {len(dataset)} samples"

        # Validation data stay in their order: which samples are evaluated does not depend on the seed.
        shuffled = split == "train"
        batch = 1
        drop_last = False
        collate = default_collate
        self.workers: DataLoader[Any] | None = None  # whose options worker processes have
        self.pins = False  # whether batches are copied to a GPU from pinned memory
        if loader is not None:
            shuffled &= not isinstance(loader.sampler, SequentialSampler)
            batch = loader.batch_size or 1
            drop_last = loader.drop_last
            collate = loader.collate_fn
            self.description = f"a DataLoader of batch_size {batch} over {self.description}"
            if loader.num_workers:
                self.workers = loader
                self.description += f", {loader.num_workers} worker processes"
            self.pins = loader.pin_memory and not loader.num_workers  # workers' are pinned already

        self.epochs = Epochs(order_of(dataset, seed, shuffled), len(dataset), batch, drop_last)
        self.reader = Reader(dataset, collate, seed)

    # As validation data: the items of one epoch.

    def __len__(self) -> int:
        return self.epochs.items

    def samples_of(self, numbers: list[int]) -> list[Sample]:
        """Return validation samples by their numbers."""
        samples = []
        for number in numbers:
            samples += self.epochs.samples(number, 1)
        return samples

    def items(self, numbers: list[int]) -> tuple[Any, Any]:
        """Return validation samples by their numbers, as one batch."""
        return as_pair(self.reader.read(self.samples_of(numbers)))


class Kept:
    """Validation batches of a stream, which are kept as they are."""

    def __init__(self, batches: list[Counted]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def items(self, numbers: list[int]) -> tuple[Any, Any]:
        """Return a batch by its number."""
        batch = self._batches[numbers[0]]
        inputs, targets = batch.batch
        return inputs, CountedTargets(targets, batch.samples)


def source_of(data: Any, split: str, seed: int = 0) -> Items | Stream:
    """Return data as items with an index, or as a stream.

    Raises DataError for what is neither, and for data that no resume could read again.
    """
    if is_plain_loader(data) or is_dataset(data):
        return Items(data, split, seed)
    # Python would also iterate over a dataset that lacks len(): its items are no batches.
    if not isinstance(data, Iterable):
        raise DataError(
            f"the {split} data are a {type(data).__name__}; give a dataset (len and []), a "
            "DataLoader or an iterable of batches"
        )
    stream = Stream(data, split, seed)
    # A generator, or another iterator, cannot begin again.
    if not stream.has_state and not isinstance(data, DataLoader) and iter(data) is data:
        raise DataError(
            f"the {split} data can be iterated once only; give a class whose __iter__ begins "
            "anew, or a dataset with len() and [], so that a resumed run can start again"
        )
    return stream


def is_dataset(data: Any) -> bool:
    """Whether data have samples by number. torch's IterableDataset has [], which raises."""
    if isinstance(data, (DataLoader, IterableDataset)):
        return False
    return hasattr(data, "__getitem__") and hasattr(data, "__len__")


def is_plain_loader(data: Any) -> bool:
    """Whether data are torch's own DataLoader around a dataset, which reads it in order or shuffled."""
    # Without a batch_size the script gives the batches, by a batch_sampler or by the dataset.
    if type(data) is not DataLoader or data.batch_size is None:
        return False
    if not is_dataset(data.dataset):
        return False
    sampler: Any = data.sampler
    if type(sampler) is RandomSampler and (sampler.replacement or sampler.generator):
        return False
    # A sampler that the script has made may draw a part of the dataset.
    is_known = type(sampler) in (RandomSampler, SequentialSampler)
    return is_known and len(sampler) == len(data.dataset)  # type: ignore[arg-type]


def batch_size_of(data: Any, seed: int) -> tuple[int | None, Stream | None]:
    """Return the samples of a batch, where the training data decide it; else None.

    Of a stream this is the size of its first batch, and the stream is returned as well: it has begun.
    """
    if is_plain_loader(data):
        return data.batch_size, None
    source = source_of(data, "train", seed)
    if isinstance(source, Items):
        return None, None
    samples, _ = source.first()
    return samples, source

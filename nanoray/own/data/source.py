"""Read the data of a script's user in an order that can be resumed.

dataset[i]         sample k is number k mod N of a permutation that follows from (seed, k // N): one
                   integer resumes it
DataLoader         over such a dataset: its batches, order and worker processes (loader.py)
iterable           batch k is the k-th that `iter(...)` yields, equal on every rank: a resume skips
                   the batches that were used
with state_dict()  every rank reads its own loader, whose state is saved with checkpoints
                   (stateful.py)
ShardStream        sample k follows from (seed, k) as well, and its files are read in sequence
                   (stream.py)
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from nanoray.config import Batch
from nanoray.data.fallible import DataFailure, FallibleSamples
from nanoray.data.seeding import generators_kept, seed_generators_for
from nanoray.data.stream import ShardStream
from nanoray.data.tokens import evenly_spaced
from nanoray.errors import DataError
from nanoray.own.data.batch import (
    Counted,
    CountedTargets,
    NamedBatch,
    Pair,
    as_pair,
    counted,
    hash_of,
    to_device,
)
from nanoray.own.data.epochs import Epochs, Sample
from nanoray.own.data.loader import draw_of_stream, own_order, plan_of, stream_of
from nanoray.own.data.reader import (
    END,
    Ahead,
    Collate,
    Reader,
    Workers,
    begin,
    end_workers,
    next_of,
)
from nanoray.own.data.stateful import KEPT, Stateful, has_index, is_stateful, pack, unpack

LOADER = "loader"  # the name of a loader's state in a checkpoint
ORDER = "order"  # the name of what the order of samples depends on
VALIDATION = 0x76616C  # keeps the draws of validation samples apart from those of training


class OwnData(FallibleSamples):
    """The two splits of a script; items and batches are pairs (inputs, targets), or dicts."""

    def __init__(
        self,
        train: Any,
        val: Any,
        seed: int,
        micro: int,
        device: torch.device,
        place: tuple[int, int] = (0, 1),
        begun: Batches | None = None,
    ) -> None:
        """Choose how to read each split.

        `micro` is the number of samples of a batch, `place` the (index, number) of the data ranks,
        `begun` the training batches where the first one was read already. Raises DataError for data
        that cannot be read in any of these ways.
        """
        self._device = device
        self._micro = micro
        self._rank, self._ranks = place
        self._counts = False  # whether targets come with their number of samples
        self._newest: tuple[Any, int] | None = None  # the newest batch, and its first sample

        self._stream = stream_of(train)
        self._train: Stateful | Items | Batches
        if is_stateful(train):
            self._train = Stateful(train, seed, self._rank)
        elif begun is not None:
            self._train = begun
        else:
            self._train = source_of(train, "train", micro, seed)
        self._val: Items | Batches | Kept | None = None
        if val is not None:
            self._val = source_of(val, "val", micro, seed ^ VALIDATION)
        self._val_plan: list[list[int]] = []  # the samples of each batch of an evaluation
        self._ahead: Ahead | None = None
        self._val_ahead: Ahead | None = None

        self._pins = False
        if isinstance(self._train, Items):
            self._pins = self._train.pins and device.type == "cuda"
        if isinstance(self._train, Items) and self._train.workers:
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
        if isinstance(self._train, Items):
            return self._train.epochs.may_have_gaps or self._train.in_batches
        return isinstance(self._train, Stateful) or not self._train.drops_last

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
        if isinstance(source, Stateful):
            # Rank 0's first sample of this micro batch has the same number on every rank.
            number = self._batches_of_rank(first_sample - self._rank * count)
            read = counted(source.batch(number))
            require_size(read, number, "train", self._micro)
            return read
        if isinstance(source, Batches):
            return source.batch(first_sample // count)

        samples = source.samples_at(first_sample, count)
        if not samples:
            # A gap at the end of an epoch: any sample, which counts as none.
            return as_pair(source.read(source.samples_at(0, 1))), 0
        if self._ahead is not None and self._is_own(first_sample, count):
            batch = self._ahead.batch(self._batches_of_rank(first_sample))
        else:
            batch = source.read(samples)
        if source.in_batches:
            return counted(batch)
        return as_pair(batch), len(samples)

    def _is_own(self, first_sample: int, count: int) -> bool:
        """Whether a micro batch is one of this rank's."""
        return count == self._micro and first_sample // count % self._ranks == self._rank

    def _samples_of_batch(self, number: int) -> list[Sample]:
        """Return the samples of this rank's micro batch of this number; for worker processes."""
        assert isinstance(self._train, Items)
        first = (number * self._ranks + self._rank) * self._micro
        return self._train.samples_at(first, self._micro) or self._train.samples_at(0, 1)

    def val_windows(self, limit: int) -> np.ndarray:
        """Return the numbers of at most `limit` validation samples, evenly spaced, int64."""
        if self._val is None:
            return np.empty(0, np.int64)
        if isinstance(self._val, Batches):
            # Validation batches are read once and kept: every evaluation uses the same samples.
            self._val = self._val.first(limit)
        windows = evenly_spaced(len(self._val) - 1, min(limit, len(self._val)))
        if isinstance(self._val, Items) and self._val.workers:
            own = windows[self._rank :: self._ranks].tolist()
            plan = [own[i : i + self._micro] for i in range(0, len(own), self._micro)]
            self._begin_evaluation(plan, self._val)
        return windows

    def _begin_evaluation(self, plan: list[list[int]], source: Items) -> None:
        """Let worker processes read the batches of an evaluation, by the numbers of its samples."""
        assert source.workers
        self._val_plan = plan

        def samples_of(number: int) -> list[Sample] | None:
            if number >= len(self._val_plan):
                return None
            return source.samples_of(self._val_plan[number])

        self._val_ahead = Ahead(source.reader, source.workers, samples_of)

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
        if isinstance(source, Kept) or not source.workers:
            return source.items(numbers)
        # In a worker also what is read alone: a dataset may open its files in its first process.
        if self._val_ahead is None or numbers not in self._val_plan:
            self._begin_evaluation([numbers], source)
        assert self._val_ahead
        return _for_validation(self._val_ahead.batch(self._val_plan.index(numbers)))

    @property
    def windows_at_once(self) -> int:
        """The most validation windows that one call of `val_batch` reads."""
        return 1 if isinstance(self._val, Kept) else self._micro

    @property
    def in_batches(self) -> bool:
        """Whether the training data come in batches of a size of their own."""
        return not isinstance(self._train, Items) or self._train.in_batches

    @property
    def stateful(self) -> bool:
        """Whether each rank reads a loader of its own, with a state."""
        return isinstance(self._train, Stateful)

    @property
    def fingerprint(self) -> int:
        """A hash of the order of a dataset's samples, else of a batch, for `compare`."""
        if isinstance(self._train, Batches):
            return self._train.fingerprint
        if isinstance(self._train, Stateful):
            return hash_of(self._newest[0]) if self._newest else 0
        own = repr(self._train.epochs.beginning)
        if self._stream is not None:
            own += repr(self._stream.identity())
        return zlib.crc32(own.encode())

    def compare(self, fingerprints: Sequence[int]) -> None:
        """Raise DataError where the data of the ranks do not go together.

        `fingerprints` are those of all ranks, each after the read of its first batch.
        """
        if isinstance(self._train, Stateful):
            self._require_other_batches(fingerprints)
        elif len(set(fingerprints)) > 1:
            raise DataError(self._what_differs)

    def _require_other_batches(self, fingerprints: Sequence[int]) -> None:
        """Raise DataError where two ranks' loaders yield the same batch."""
        rank_of: dict[int, int] = {}
        for rank, fingerprint in enumerate(fingerprints):
            other = rank_of.setdefault(fingerprint, rank)
            # 0: the batch has nothing to compare
            if other != rank and fingerprint:
                raise DataError(
                    f"the loaders of ranks {other} and {rank} yield the same first batch, but each "
                    "rank trains on all batches of its own loader, which has a state; let it read "
                    "another part of the data on each rank, by run.rank and run.world_size"
                )

    @property
    def _what_differs(self) -> str:
        """The error where the ranks do not share the fingerprint."""
        if isinstance(self._train, Batches):
            return (
                "the first batch of the train data differs between the ranks, but every rank reads "
                "all batches of an iterable, and trains on its share of them; do not cut it by rank "
                "(split_dataset_by_node, islice), and seed what it draws"
            )
        if self._stream is not None:
            return (
                "the files of the train data's stream differ between the ranks; give every node "
                "the same files, under the same names"
            )
        return (
            "the sampler of the train data draws another order on each rank; let it draw from "
            "torch's, numpy's or Python's global generator, which nanoray seeds, or give it a "
            "seed of its own"
        )

    def describe(self) -> str:
        """Return in a few words how the training data are read."""
        if isinstance(self._train, Items):
            return self._train.description
        if self.stateful:
            return "a loader with a state on each rank"
        return "an iterable of batches, which every rank reads"

    def state_at(self, samples: int) -> dict[str, Tensor]:
        """Return what a checkpoint after `samples` samples of all ranks keeps of the data, by name.

        That is the state of this rank's loader, or what the order of samples depends on.
        """
        if isinstance(self._train, Stateful):
            return {LOADER: self._train.state_before(self._batches_of_rank(samples))}
        return {ORDER: pack(self.order)}

    def load_state(self, saved: Mapping[str, Tensor], samples: int) -> None:
        """Continue from the result of `state_at(samples)`."""
        assert isinstance(self._train, Stateful)
        self._train.load(saved[LOADER], self._batches_of_rank(samples))

    @property
    def stream(self) -> ShardStream | None:
        """The stream that the training data are, if they are one."""
        return self._stream

    @property
    def order(self) -> dict[str, Any]:
        """What the order of samples depends on beside the seed."""
        if self._stream is not None:
            return self._stream.identity()
        if isinstance(self._train, Items):
            return {"kind": "dataset", "samples": len(self._train.reader.dataset)}
        return {"kind": "iterable"}

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
        if isinstance(self._train, Batches):
            self._train.close()

    def _close_ahead(self) -> None:
        for ahead in (self._ahead, self._val_ahead):
            if ahead is not None:
                ahead.close()

    def _batches_of_rank(self, samples: int) -> int:
        """Return the batches that a rank has read after `samples` samples of all ranks."""
        return samples // (self._micro * self._ranks)

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
    """A dataset with an index, as it is or as a DataLoader reads it."""

    def __init__(
        self,
        reader: Reader,
        epochs: Epochs,
        workers: Workers | None = None,
        in_batches: bool = False,
        pins: bool = False,
        description: str = "a dataset with an index",
    ) -> None:
        """`in_batches`: the loader decides which items form a batch, and a batch has one place.

        `pins`: batches are copied to a GPU from pinned memory.
        """
        self.reader = reader
        self.epochs = epochs
        self.workers = workers
        self.in_batches = in_batches
        self.pins = pins
        self.description = description
        self._of_validation: list[Sample] | None = None

    def samples_at(self, first: int, count: int) -> list[Sample]:
        """Return the samples in these places of the run; a gap at the end of an epoch has none."""
        if self.in_batches:
            return self.epochs.samples(first // count, 1)
        return self.epochs.samples(first, count)

    def read(self, samples: list[Sample]) -> Any:
        """Return samples as one batch."""
        return self.reader.read(samples)

    # As validation data: the items of one epoch, in the order of the sampler.

    def __len__(self) -> int:
        if self.in_batches:
            return len(self._of_batches)
        return self.epochs.first_size

    def samples_of(self, numbers: list[int]) -> list[Sample]:
        """Return validation samples by their numbers."""
        if self.in_batches:
            return [self._of_batches[number] for number in numbers]
        samples = []
        for number in numbers:
            samples += self.epochs.samples(number, 1)
        return samples

    def items(self, numbers: list[int]) -> tuple[Any, Any]:
        """Return validation samples by their numbers, as one batch."""
        return _for_validation(self.read(self.samples_of(numbers)))

    @property
    def _of_batches(self) -> list[Sample]:
        """The items of all batches of the first epoch."""
        if self._of_validation is None:
            items: list[Any] = []
            for sample in self.epochs.first_epoch():
                items += sample.item
            self._of_validation = [Sample(i, item) for i, item in enumerate(items)]
        return self._of_validation


class Kept:
    """Validation batches of an iterable, which are kept as they are."""

    def __init__(self, batches: list[Counted]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def items(self, numbers: list[int]) -> tuple[Any, Any]:
        """Return a batch by its number."""
        return _for_validation(self._batches[numbers[0]])


class Batches:
    """An iterable of batches, read in its order; the newest ones are kept."""

    def __init__(self, batches: Iterable[Any], split: str, micro: int, seed: int = 0) -> None:
        self._batches = batches
        self._split = split
        self._micro = micro
        self._seed = seed
        self._iterator: Iterator[Any] = iter(())
        self._next = -1  # the number of the batch that the iterator yields next; -1: not begun
        self._epoch = 0
        self._kept: OrderedDict[int, tuple[Pair, int]] = OrderedDict()
        # Of batch 0, which every rank has read: it must be equal on all of them
        self.fingerprint = 0
        # torch's loader leaves a last batch out that is smaller; of others it is not known
        self.drops_last = isinstance(batches, DataLoader) and batches.drop_last

    def batch(self, number: int) -> tuple[Pair, int]:
        """Return batch `number`, counted over all passes through the iterable, and its samples.

        Raises DataError when the iterable yields none.
        """
        if number in self._kept:
            return self._kept[number]

        # An iterable has no state, so going back means to begin again and to skip.
        if self._next < 0 or number < self._next:
            self._restart()
        while self._next <= number:
            index = self._next
            read = self._advance()
            require_size(read, index, self._split, self._micro)
            if index > number - KEPT:
                self._kept[index] = read
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return self._kept[number]

    def close(self) -> None:
        """End the worker processes of a loader; a later read begins again."""
        end_workers(self._iterator)
        self._iterator = iter(())
        self._next = -1

    def _restart(self) -> None:
        self._next = 0
        self._epoch = -1
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self._epoch += 1
        # What it draws when it begins, such as an order, follows from the epoch.
        with generators_kept():
            seed_generators_for(self._seed, self._epoch, -1)
            if isinstance(self._batches, DataLoader):
                self._iterator = begin(self._batches)
            else:
                self._iterator = iter(self._batches)

    def _advance(self) -> tuple[Pair, int]:
        """Return the next batch, of the next epoch where this one is at its end, and its samples."""
        read = self._next_with_samples()
        if read is None:
            self._begin_epoch()
            read = self._next_with_samples()
        if read is None:
            raise DataError(
                f"the {self._split} data yield no batch; give an iterable that can be iterated "
                "again"
            )
        pair, _ = read
        if self._next == 0:
            self.fingerprint = hash_of(pair)
        self._next += 1
        return read

    def _next_with_samples(self) -> tuple[Pair, int] | None:
        """Return the epoch's next batch that has a sample, and their number; None at its end."""
        while True:
            with generators_kept():
                seed_generators_for(self._seed, self._next, 0)
                batch = next_of(self._iterator)
            if batch is END:
                return None
            pair, samples = counted(batch)
            if samples > 0:
                return pair, samples

    def adopt_size(self) -> int:
        """Take the number of samples of the first batch for micro_batch_size, and return it."""
        self._restart()
        self._kept[0] = self._advance()
        _, self._micro = self._kept[0]
        return self._micro

    def first(self, limit: int) -> Kept:
        """Return the batches from the start that have about `limit` samples."""
        batches = []
        found = 0
        self._restart()
        while found < limit:
            read = self._next_with_samples()
            if read is None:
                break
            pair, samples = read
            batches.append(Counted(pair, samples))
            found += samples
            self._next += 1
        self.close()
        return Kept(batches)


def source_of(data: Any, split: str, micro: int, seed: int = 0) -> Items | Batches:
    """Return data as items with an index, or as batches.

    Raises DataError for what is neither, and for data that no resume could read again.
    """
    stream = stream_of(data)
    if stream is not None and len(stream) == 0:
        raise DataError(f"the stream of the {split} data has no sample; give files that have some")
    if isinstance(data, ShardStream):
        epochs = Epochs(draw_of_stream(data, split, seed), len(data))
        return Items(Reader(data, default_collate, seed), epochs, description=data.describe())
    if stream is not None:
        return _items_of_loader(data, split, micro, seed)

    # A loader that iterates in a way of its own is an iterable like any other.
    is_torchs = isinstance(data, DataLoader) and type(data).__iter__ is DataLoader.__iter__
    if is_torchs and _is_dataset(data.dataset):
        return _items_of_loader(data, split, micro, seed)
    if _is_dataset(data) and not isinstance(data, DataLoader):
        return items_of(data, split, seed)
    # Python would also iterate over a dataset that lacks len(): its items are no batches.
    if not isinstance(data, Iterable):
        raise DataError(
            f"the {split} data are a {type(data).__name__}; give a dataset (len and []), a "
            "DataLoader or an iterable of batches"
        )
    # A generator, or another iterator, cannot begin again.
    if not isinstance(data, DataLoader) and iter(data) is data:
        raise DataError(
            f"the {split} data can be iterated once only; give a class whose __iter__ begins "
            "anew, or a dataset with len() and [], so that a resumed run can start again"
        )
    return Batches(data, split, micro, seed)


def _is_dataset(data: Any) -> bool:
    return has_index(data) and hasattr(data, "__len__")


def items_of(dataset: Any, split: str, seed: int, collate: Collate = default_collate) -> Items:
    """Return a dataset as items in nanoray's order. Raises DataError when it is empty."""
    count = len(dataset)
    if count == 0:
        raise DataError(f"the {split} data are empty; give at least one sample")
    order = range(count)
    if split == "train":
        return Items(Reader(dataset, collate, seed), Epochs(own_order(count, seed).order, count))
    return Items(Reader(dataset, collate, seed), Epochs(lambda epoch: order, count))


def _items_of_loader(loader: DataLoader[Any], split: str, micro: int, seed: int) -> Items | Batches:
    if len(loader.dataset) == 0:  # type: ignore[arg-type]
        raise DataError(f"the {split} data are empty; give at least one sample")
    plan = plan_of(loader, split, seed)
    if split == "val" and loader.batch_sampler is None:
        return Batches(loader, split, micro, seed)
    return Items(
        plan.reader,
        plan.epochs,
        plan.workers,
        in_batches=plan.batch_size is None,
        pins=loader.pin_memory and not loader.num_workers,  # workers' batches are pinned already
        description=plan.description,
    )


def batch_size_of(data: Any, seed: int) -> tuple[int | None, Batches | None]:
    """Return the samples of a batch, where the training data decide it; else None.

    Of an iterable, and of a batch_sampler, this is the size of the first batch. An iterable is
    returned as well: it has begun.
    """
    if isinstance(data, DataLoader) and isinstance(data.batch_size, int):
        return data.batch_size, None
    # Reading a batch would move a loader with a state.
    if stream_of(data) is None and is_stateful(data):
        return None, None
    source = source_of(data, "train", 0, seed)
    if isinstance(source, Batches):
        return source.adopt_size(), source
    if source.in_batches:
        _, samples = counted(source.read(source.samples_at(0, 1)))
        return samples, None
    return None, None


def require_size(read: tuple[Pair, int], number: int, split: str, micro: int) -> None:
    """Raise DataError unless the first batch has `micro` samples; a later one may have fewer."""
    _, size = read
    if number == 0 and size != micro:
        raise DataError(
            f"batch {number} of the {split} data has {size} samples, but micro_batch_size = "
            f"{micro}; make them equal"
        )
    if size > micro:
        raise DataError(
            f"batch {number} of the {split} data has {size} samples, more than micro_batch_size = "
            f"{micro}, which the first one had; give batches of at most that size"
        )


def _for_validation(batch: Any) -> tuple[Any, Any]:
    """Return a validation batch as a pair; of one that is Counted, with CountedTargets."""
    if not isinstance(batch, Counted):
        return as_pair(batch)
    (inputs, targets), samples = counted(batch)
    return inputs, CountedTargets(targets, samples)

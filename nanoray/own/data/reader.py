"""Read samples of a dataset as one batch: in this process, or ahead of the loop in worker processes."""

from __future__ import annotations

import os
import select
import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset, default_collate

from nanoray.base.compat import close_loader_writer, end_loader, loader_expects, loader_has_ended
from nanoray.base.script_errors import one_line
from nanoray.data.seeding import generators_kept, seed_generators_for
from nanoray.data.stream import ShardStream
from nanoray.errors import DataError
from nanoray.own.data.epochs import BatchOfItems, Sample

Collate = Callable[[list[Any]], Any]
END = object()  # what `next_of` returns at the end: a batch may be anything, also None
END_S = 5.0  # how long a killed worker may take to be gone


class Reader:
    """Returns the samples of a list as one batch. Worker processes have a copy of it."""

    def __init__(self, dataset: Any, collate: Collate, seed: int, whole: bool = False) -> None:
        """`whole`: an item of the dataset is a batch already."""
        self.dataset = dataset
        self._collate = collate
        self._seed = seed
        self._whole = whole
        # Data that lie in memory draw no random numbers, nor do records as they are in their files.
        plain = isinstance(dataset, (TensorDataset, list, tuple, np.ndarray, Tensor))
        if isinstance(dataset, ShardStream):
            plain = dataset.transform is None
        self._draws = not (plain and collate is default_collate)

    def __getitem__(self, samples: Sequence[Sample]) -> Any:
        """Return these samples, collated. The generators of this process change."""
        items = []
        for number, item in samples:
            # A batch_sampler of the script gives the items of a whole batch at once.
            group = item if isinstance(item, BatchOfItems) else [item]
            for index, each in enumerate(group):
                items.append(self._item(number, index, each))

        # A collate_fn may draw, too, for masks or mixtures: once for a batch.
        if self._draws:
            seed_generators_for(self._seed, samples[0].number, -1)
        if self._whole:
            return self._collate(items[0])
        return self._collate(items)

    def read(self, samples: Sequence[Sample]) -> Any:
        """Return these samples, collated, and leave the generators of this process as they are."""
        if not self._draws:
            return self[samples]
        with generators_kept():
            return self[samples]

    def _item(self, number: int, index: int, item: Any) -> Any:
        if self._draws:
            seed_generators_for(self._seed, number, index)
        return self.dataset[item]


@dataclass(frozen=True)
class Workers:
    """The options of a script's DataLoader for its worker processes."""

    count: int
    options: dict[str, Any]

    @classmethod
    def of(cls, loader: DataLoader[Any]) -> Workers:
        """Return a loader's options."""
        options = {
            "num_workers": loader.num_workers,
            "pin_memory": loader.pin_memory,
            "timeout": loader.timeout,
            "worker_init_fn": loader.worker_init_fn,
            "multiprocessing_context": loader.multiprocessing_context,
            "prefetch_factor": loader.prefetch_factor,
        }
        return cls(loader.num_workers, options)


class Ahead:
    """Reads the batches of a sequence by number, each in a worker process before it is needed."""

    def __init__(
        self, reader: Reader, workers: Workers, samples_of: Callable[[int], list[Sample] | None]
    ) -> None:
        """`samples_of`: the samples of each batch of the sequence; None ends it."""
        self._reader = reader
        self._workers = workers
        self._samples_of = samples_of
        self._next = -1  # the number of the batch that the workers return next; -1: not begun
        self._iterator: Iterator[Any] | None = None
        self._newest: tuple[int, Any] = (-1, None)  # the number of the newest batch, and the batch

    def batch(self, number: int) -> Any:
        """Return a batch; in the order of their numbers the workers have read it already."""
        # The first batch is read several times: by the trial, the warm-up and the first step.
        if number == self._newest[0]:
            return self._newest[1]
        # A step that is repeated, a rollback, or a read after one that failed.
        if self._iterator is None or loader_has_ended(self._iterator) or number != self._next:
            self._begin(number)
        assert self._iterator is not None
        batch = next_of(self._iterator)
        self._newest = number, batch
        self._next += 1
        return batch

    def close(self) -> None:
        """End the worker processes."""
        end_workers(self._iterator)
        self._iterator = None
        self._next = -1
        self._newest = -1, None

    def _begin(self, number: int) -> None:
        self.close()
        loader: DataLoader[Any] = DataLoader(
            self._reader,  # type: ignore[arg-type]
            batch_size=None,
            sampler=_Sequence(self._samples_of, number),
            collate_fn=_unchanged,
            **self._workers.options,
        )
        # torch would draw a seed from the generator that the model draws from.
        with generators_kept():
            self._iterator = begin(loader)
        self._next = number


def begin(loader: DataLoader[Any]) -> Iterator[Any]:
    """Return an iterator of a loader, whose worker processes end with this process."""
    if not loader.num_workers:
        return iter(loader)
    in_main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGCHLD) if in_main_thread else None
    own = loader.worker_init_fn
    loader.worker_init_fn = _InitWorker(own)
    # With persistent_workers the loader has kept its iterator, and takes it up again.
    known: Any = loader._iterator
    if known is not None and loader_has_ended(known):
        loader._iterator = None
    try:
        iterator: Any = iter(loader)
        if iterator is not known:
            _follow_workers(iterator)
        return iterator
    finally:
        loader.worker_init_fn = own
        # torch's handler raises anywhere in a step when a worker dies; `next_of` finds that as well.
        if in_main_thread:
            signal.signal(signal.SIGCHLD, handler or signal.SIG_DFL)


def next_of(iterator: Iterator[Any]) -> Any:
    """Return the next batch, or END. Raises DataError when a worker process has ended.

    After an error the workers end at once: the last checkpoint may need their memory, and torch
    would wait 5 s for each of them.
    """
    try:
        return next(iterator, END)
    except Exception as error:
        if not hasattr(iterator, "_workers"):
            raise
        _kill_workers(iterator)
        # What the dataset raises in a worker arrives as "Caught ... in DataLoader worker process".
        of_the_dataset = str(error).startswith("Caught ")
        if of_the_dataset or not isinstance(error, (RuntimeError, OSError, EOFError)):
            raise
        raise DataError(
            f"a worker process of the DataLoader ended ({one_line(error)}); look for a "
            "lack of memory, or use num_workers=0 to see its error"
        ) from error


def _follow_workers(iterator: Any) -> None:
    """Let a thread end all workers of an iterator of torch when one of them is killed.

    A worker that is killed in the middle of a batch leaves a part of it in the pipe that all workers
    write to, and may keep its lock. Then this process would read for ever: the pipe ends only when
    no process can write to it any more.
    """
    close_loader_writer(iterator)  # this process reads it
    # Not the iterator itself: its workers end when nothing refers to it.
    arguments = (iterator._workers, weakref.ref(iterator))
    name = "nanoray-loader"
    threading.Thread(target=_end_together, args=arguments, name=name, daemon=True).start()


def _end_together(workers: list[Any], iterator_of: Callable[[], Any]) -> None:
    """Wait until a worker is killed, and kill the others.

    It takes no exit code: the training thread may do so at the same moment, and one of them gets none.
    """
    running = {worker.sentinel: number for number, worker in enumerate(workers)}
    while running:
        ended = connection.wait(list(running))
        iterator = iterator_of()
        if iterator is None or loader_has_ended(iterator):
            return  # torch ends them
        for sentinel in ended:
            # One whose part of an iterable dataset is at its end ends as well.
            number = running.pop(sentinel)
            if loader_expects(iterator, number):
                for worker in workers:
                    worker.kill()
                return
        del iterator


def end_workers(iterator: Any) -> None:
    """End the worker processes of an iterator of a loader if one of them was killed.

    Otherwise torch ends them when nothing refers to the iterator.
    """
    workers = getattr(iterator, "_workers", [])
    if not workers or loader_has_ended(iterator):
        return
    ended = connection.wait([worker.sentinel for worker in workers], timeout=0)
    if ended:
        _kill_workers(iterator)


def _kill_workers(iterator: Any) -> None:
    """End the worker processes of an iterator without what torch does first.

    It asks them to end, and takes a lock for that which a killed worker may have kept for ever.
    """
    if loader_has_ended(iterator):
        return
    for worker in iterator._workers:
        worker.kill()
    for worker in iterator._workers:
        worker.join(END_S)
    end_loader(iterator)


class _InitWorker:
    """What a worker process does first. A class, because a spawned worker receives it as a pickle."""

    def __init__(self, own: Callable[[int], None] | None) -> None:
        self._own = own
        self._rank_pid = os.getpid()

    def __call__(self, worker: int) -> None:
        # torch compares the parent's pid, which with forkserver is not the rank's.
        threading.Thread(target=_end_with, args=(self._rank_pid,), daemon=True).start()
        # Ctrl-C goes to all processes of a terminal, and the rank decides when to stop.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self._own is not None:
            self._own(worker)


def _end_with(pid: int) -> None:
    """End this process when the process `pid` has ended."""
    if not hasattr(os, "pidfd_open"):  # macOS, where torch's own check has to do
        return
    try:
        ended = os.pidfd_open(pid)  # readable from then on
    except ProcessLookupError:
        os._exit(1)
    select.select([ended], [], [])
    os._exit(1)


class _Sequence:
    """The lists of samples from one number on, as torch's loader takes them from a sampler."""

    def __init__(self, samples_of: Callable[[int], list[Sample] | None], first: int) -> None:
        self._samples_of = samples_of
        self._first = first

    def __iter__(self) -> Iterator[list[Sample]]:
        number = self._first
        while True:
            samples = self._samples_of(number)
            if samples is None:
                return
            yield samples
            number += 1


def _unchanged(batch: Any) -> Any:
    return batch

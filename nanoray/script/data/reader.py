"""Read samples of a dataset as one batch: in this process, or ahead of the loop in worker processes."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset, default_collate

from nanoray.data.seeding import generators_kept, seed_generators_for
from nanoray.script.data.epochs import Sample

Collate = Callable[[list[Any]], Any]


class Reader:
    """Returns the samples of a list as one batch. Worker processes have a copy of it."""

    def __init__(self, dataset: Any, collate: Collate, seed: int) -> None:
        self.dataset = dataset
        self._collate = collate
        self._seed = seed
        # Data that lie in memory draw no random numbers.
        plain = isinstance(dataset, (TensorDataset, list, tuple, np.ndarray, Tensor))
        self._draws = not (plain and collate is default_collate)

    def __getitem__(self, samples: Sequence[Sample]) -> Any:
        """Return these samples, collated. The generators of this process change."""
        items = []
        for number, item in samples:
            if self._draws:
                seed_generators_for(self._seed, number, 0)
            items.append(self.dataset[item])

        # A collate_fn may draw, too, for masks or mixtures: once for a batch.
        if self._draws:
            seed_generators_for(self._seed, samples[0].number, -1)
        return self._collate(items)

    def read(self, samples: Sequence[Sample]) -> Any:
        """Return these samples, collated, and leave the generators of this process as they are."""
        if not self._draws:
            return self[samples]
        with generators_kept():
            return self[samples]


class Ahead:
    """Reads the batches of a sequence by number, each in a worker process before it is needed."""

    def __init__(
        self,
        reader: Reader,
        given: DataLoader[Any],
        samples_of: Callable[[int], list[Sample] | None],
    ) -> None:
        """`given`: the script's loader, whose options for worker processes are used.

        `samples_of`: the samples of each batch of the sequence; None ends it.
        """
        self._reader = reader
        self._given = given
        self._samples_of = samples_of
        self._next = 0  # the number of the batch that the workers return next
        self._iterator: Iterator[Any] | None = None  # None: no worker is running
        self._newest: tuple[int, Any] = (-1, None)  # the number of the newest batch, and the batch

    def batch(self, number: int) -> Any:
        """Return a batch; in the order of their numbers the workers have read it already."""
        # The first batch is read several times: before the run, by the warm-up and by the first step.
        if number == self._newest[0]:
            return self._newest[1]
        # At the start, and where a step is repeated
        if self._iterator is None or number != self._next:
            self._begin(number)
        assert self._iterator is not None
        try:
            batch = next(self._iterator)
        except BaseException:
            self.close()
            raise
        self._newest = number, batch
        self._next = number + 1
        return batch

    def close(self) -> None:
        """End the worker processes, which torch does when nothing refers to the iterator."""
        self._iterator = None
        self._newest = -1, None

    def _begin(self, number: int) -> None:
        self.close()
        given = self._given
        loader: DataLoader[Any] = DataLoader(
            self._reader,  # type: ignore[arg-type]
            batch_size=None,
            sampler=self._lists_from(number),
            collate_fn=_unchanged,
            num_workers=given.num_workers,
            pin_memory=given.pin_memory,
            timeout=given.timeout,
            worker_init_fn=EndsWithRank(given.worker_init_fn),
            multiprocessing_context=given.multiprocessing_context,
            prefetch_factor=given.prefetch_factor,
        )
        # torch would draw a seed from the generator that the model draws from.
        with generators_kept():
            self._iterator = iter(loader)
        self._next = number

    def _lists_from(self, number: int) -> Iterator[list[Sample]]:
        """Yield the samples of each batch from a number on."""
        samples = self._samples_of(number)
        while samples is not None:
            yield samples
            number += 1
            samples = self._samples_of(number)


def _unchanged(batch: Any) -> Any:
    return batch


class EndsWithRank:
    """The start of a worker process: it ends when the rank that began it has ended.

    torch's own check takes seconds, in which the worker would keep memory of a GPU and the lock of the
    run's folder, and sees nothing with forkserver. A class, because a spawned worker receives it as a
    pickle.
    """

    def __init__(self, own: Callable[[int], None] | None) -> None:
        """`own`: the script's worker_init_fn."""
        self._own = own
        self._rank_pid = os.getpid()

    def __call__(self, worker: int) -> None:
        threading.Thread(target=_end_with, args=(self._rank_pid,), daemon=True).start()
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

"""Read what a script's DataLoader asks for: batches, order, worker processes.

shuffle=True                 nanoray's own order, a function of (seed, epoch)
shuffle=False                the dataset's order
another sampler              drawn once for each epoch, with generators seeded from (seed, epoch);
                             one without an end in parts
DistributedSampler           its order for one process: the ranks share each step of it
batch_sampler                drawn in the same way; each of its batches goes to one rank
batch_size, drop_last        a batch goes to one rank as its micro batch (epochs.py)
num_workers and its options  worker processes read each rank's batches ahead (reader.py)

Over a ShardStream, the order is the stream's (stream.py), and the rest is the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import BatchSampler, DataLoader

from nanoray.data.order import EpochOrder, mix
from nanoray.data.stream import ShardStream
from nanoray.errors import DataError
from nanoray.own.data.epochs import Draw, DrawnBatches, Epochs, draw_of
from nanoray.own.data.reader import Reader, Workers


class LoaderPlan(NamedTuple):
    """How a loader over a dataset with an index is read."""

    reader: Reader
    epochs: Epochs
    batch_size: int | None  # None: the batches have sizes of their own
    workers: Workers | None
    description: str


def own_order(count: int, seed: int) -> EpochOrder:
    """Return nanoray's order of `count` samples."""
    return EpochOrder(count, mix(np.array([seed], np.uint64)))


def plan_of(loader: DataLoader[Any], split: str, seed: int) -> LoaderPlan:
    """Return how to read a loader over a dataset with len() and [].

    Raises DataError for an option that would make the order depend on the speed of processes.
    """
    if not getattr(loader, "in_order", True):
        raise DataError(
            f"the DataLoader of the {split} data has in_order=False: the order of batches would "
            "depend on the speed of its workers, and no resume could repeat it; leave it True"
        )
    workers = Workers.of(loader) if loader.num_workers else None
    batches: Any = loader.batch_sampler
    dataset = loader.dataset
    processes = f", {loader.num_workers} worker processes" if loader.num_workers else ""

    # Each item is a batch already.
    if batches is None:
        draw, size = _draw_of(loader, loader.sampler, split, seed, 1)
        reader = Reader(dataset, loader.collate_fn, seed, whole=True)
        what = f"a DataLoader with batch_size=None{processes}"
        return LoaderPlan(reader, Epochs(draw, size), None, workers, what)

    # The script decides which items form a batch.
    reader = Reader(dataset, loader.collate_fn, seed)
    if type(batches) is not BatchSampler:
        what = f"a DataLoader with a {type(batches).__name__}{processes}"
        return LoaderPlan(reader, Epochs(DrawnBatches(batches, seed), None), None, workers, what)

    draw, size = _draw_of(loader, batches.sampler, split, seed, batches.batch_size)
    epochs = Epochs(draw, size, batches.batch_size, batches.drop_last)
    order = type(batches.sampler).__name__
    if isinstance(dataset, ShardStream):
        order = dataset.describe()
    what = f"a DataLoader of batch_size {batches.batch_size}, {order}{processes}"
    return LoaderPlan(reader, epochs, batches.batch_size, workers, what)


def _draw_of(
    loader: DataLoader[Any], sampler: Iterable[Any], split: str, seed: int, batch: int
) -> tuple[Draw, int | None]:
    """Return how the epochs of a loader are drawn, and their size where it is the same for all."""
    dataset = loader.dataset
    if isinstance(dataset, ShardStream):
        return draw_of_stream(dataset, split, seed), len(dataset)
    own = own_order(len(dataset), seed)  # type: ignore[arg-type]
    return draw_of(sampler, seed, own, batch)


def draw_of_stream(stream: ShardStream, split: str, seed: int) -> Draw:
    """Return how the epochs of a stream are drawn: validation data stay in the files' order."""
    if split == "train":
        return stream.order(seed).epoch
    order = range(len(stream))
    return lambda epoch: order


def stream_of(data: Any) -> ShardStream | None:
    """Return the stream that data are, or that their DataLoader reads.

    Raises DataError for a loader that iterates in a way of its own, which would be passed over.
    """
    if isinstance(data, ShardStream):
        return data
    if not isinstance(getattr(data, "dataset", None), ShardStream):
        return None
    if not isinstance(data, DataLoader) or type(data).__iter__ is not DataLoader.__iter__:
        raise DataError(
            f"a ShardStream in a {type(data).__name__}: the stream needs no loader with an order or "
            "a state of its own; give the stream, or a torch.utils.data.DataLoader over it"
        )
    return data.dataset  # type: ignore[return-value]

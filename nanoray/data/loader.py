"""Read what a script's DataLoader asks for: batches, order, worker processes.

shuffle=True                 nanoray's own order, a function of (seed, epoch)
shuffle=False                the dataset's order
another sampler              drawn once for each epoch, with generators seeded from (seed, epoch)
DistributedSampler           its order for one process: the ranks share each step of it
batch_sampler                drawn in the same way; each of its batches goes to one rank
batch_size, drop_last        a batch goes to one rank as its micro batch (epochs.py)
num_workers and its options  worker processes read each rank's batches ahead (reader.py)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import BatchSampler, DataLoader

from nanoray.data.epochs import DrawnBatches, Epochs, draw_of
from nanoray.data.hashing import mix
from nanoray.data.order import EpochOrder
from nanoray.data.reader import Reader, Workers
from nanoray.errors import DataError


class Plan(NamedTuple):
    """How a loader over a dataset with an index is read."""

    reader: Reader
    epochs: Epochs
    batch_size: int | None  # None: the batches have sizes of their own
    workers: Workers | None
    description: str


def own_order(count: int, seed: int) -> EpochOrder:
    """Return nanoray's order of `count` samples."""
    return EpochOrder(count, mix(np.array([seed], np.uint64)))


def plan_of(loader: DataLoader[Any], split: str, seed: int) -> Plan:
    """Return how to read a loader over a dataset with len() and [].

    Raises DataError for an option that would make the order depend on the speed of processes.
    """
    if not getattr(loader, "in_order", True):
        raise DataError(
            f"the DataLoader of the {split} data has in_order=False: the order of batches would "
            "depend on the speed of its workers, and no resume could repeat it; leave it True"
        )
    own = own_order(len(loader.dataset), seed)  # type: ignore[arg-type]
    workers = Workers.of(loader) if loader.num_workers else None
    batches: Any = loader.batch_sampler
    dataset = loader.dataset
    processes = f", {loader.num_workers} worker processes" if loader.num_workers else ""

    # Each item is a batch already.
    if batches is None:
        draw, size = draw_of(loader.sampler, seed, own)
        reader = Reader(dataset, loader.collate_fn, seed, whole=True)
        what = f"a DataLoader with batch_size=None{processes}"
        return Plan(reader, Epochs(draw, size), None, workers, what)

    # The script decides which items form a batch.
    reader = Reader(dataset, loader.collate_fn, seed)
    if type(batches) is not BatchSampler:
        what = f"a DataLoader with a {type(batches).__name__}{processes}"
        return Plan(reader, Epochs(DrawnBatches(batches, seed), None), None, workers, what)

    draw, size = draw_of(batches.sampler, seed, own)
    epochs = Epochs(draw, size, batches.batch_size, batches.drop_last)
    what = (
        f"a DataLoader of batch_size {batches.batch_size}, {type(batches.sampler).__name__}"
        f"{processes}"
    )
    return Plan(reader, epochs, batches.batch_size, workers, what)

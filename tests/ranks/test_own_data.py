"""Data of scripts: each kind trains what plain torch trains in one process, at any number of ranks, and
after a resume in the middle.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    WeightedRandomSampler,
)

from nanoray import Counted
from nanoray.data.order import EpochOrder, mix
from nanoray.script.engine import RuntimeEngine
from nanoray.script.run import Run
from tests.harness.in_turn import Turn, run_in_turn
from tests.harness.ranks import series
from tests.ranks.test_own import network, open_own, points

SEED = 1337
COUNT = 25  # an odd number: batches of 2 leave one of 1
PER_STEP = 6  # batches of 2 in a step, whatever the number of ranks
STEPS = 7  # 42 batches: three epochs of 13
DATA = points(COUNT, 1)
Batch = tuple[Tensor, Tensor]


class Noisy(Dataset[Any]):
    """Augments at random, from all three generators."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, i: int) -> Any:
        x, y = DATA[i]
        return x + 0.1 * torch.randn(3) + np.random.rand() + random.random(), y


class Named(Dataset[Any]):
    """Items are dicts, as those of Hugging Face."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, i: int) -> Any:
        x, y = DATA[i]
        return {"x": x, "y": y}


class Stored(Dataset[Any]):
    """Each item is a batch already."""

    def __len__(self) -> int:
        return 13

    def __getitem__(self, i: int) -> Any:
        return DATA[2 * i : 2 * i + 2]


class Buckets:
    """A batch_sampler with batches of 1, 2 and 1 samples."""

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(COUNT).tolist()
        while order:
            for size in (2, 1, 1):
                if order:
                    yield [order.pop() for _ in range(min(size, len(order)))]


class Listed:
    """An iterable whose epochs have different lengths, and a short batch at the end."""

    def __iter__(self) -> Iterator[Batch]:
        # Two passes begin with a read of the first batch alone.
        first = 2 * (torch.randint(0, 3, ()).item())
        for i in range(int(first), COUNT, 2):
            yield DATA[i : i + 2]


class Labelled:
    """An iterable of dicts that begin with texts and a number."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for x, y in two(DATA):
            yield {"text": ["a text"] * len(x), "one": torch.tensor(1.0), "x": x, "y": y}


class Graphs:
    """An iterable of dicts with two rows of edges, whatever the number of samples."""

    def __iter__(self) -> Iterator[Counted]:
        for x, y in two(DATA):
            edges = torch.zeros(2, 7, dtype=torch.int64)
            yield Counted({"edges": edges, "x": x, "y": y}, samples=len(x))


class Padded:
    """Validation batches of different lengths, and one of fewer samples."""

    def __iter__(self) -> Iterator[Batch]:
        x, y = DATA.tensors
        yield x[:6].view(2, 3, 3), y[:6].view(2, 3, 1)
        yield x[6:16].view(2, 5, 3), y[6:16].view(2, 5, 1)
        yield x[16:20].view(1, 4, 3), y[16:20].view(1, 4, 1)


class Streamed(IterableDataset[Any]):
    """A stream of samples, shared by the workers of a loader."""

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for i in range(first, COUNT, step):
            yield DATA[i]


class WithNames(nn.Module):
    """A model that takes its arguments by name and returns an object with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def forward(self, x: Tensor, y: Tensor, **others: Any) -> Any:
        return SimpleNamespace(loss=nn.functional.mse_loss(self.layers(x), y))


def plain(loader: Any) -> Callable[[int], Iterator[Batch]]:
    """The batches of a loader whose order is always the same."""
    return lambda epoch: iter(loader)


def shuffled(epoch: int) -> Iterator[Batch]:
    order = EpochOrder(COUNT, mix(np.array([SEED], np.uint64))).order(epoch).tolist()
    return iter(DataLoader(DATA, batch_size=2, sampler=order))


class Case(NamedTuple):
    """A row: what a script gives, and the batches of an epoch in plain torch (None: see the test)."""

    data: Callable[[], Any]
    right: Callable[[int], Iterator[Batch]] | None
    named: bool = False


def weighted() -> WeightedRandomSampler:
    return WeightedRandomSampler(torch.arange(1.0, COUNT + 1).tolist(), 15)


def seeded() -> RandomSampler:
    return RandomSampler(DATA, generator=torch.Generator().manual_seed(3))


def shuffled_by_itself() -> Callable[[int], Iterator[Batch]]:
    """Epoch after epoch of a sampler with a generator of its own."""
    sampler = seeded()

    def batches(epoch: int) -> Iterator[Batch]:
        if epoch == 0:
            sampler.generator.manual_seed(3)
        return iter(DataLoader(DATA, batch_size=2, sampler=sampler))

    return batches


two = partial(DataLoader, batch_size=2)
fork = partial(two, multiprocessing_context="fork")  # the fastest to start
halves = ConcatDataset([Subset(DATA, range(10)), Subset(DATA, range(10, COUNT))])
TABLE = {
    "in order": Case(lambda: two(DATA), plain(two(DATA))),
    "shuffled": Case(lambda: two(DATA, shuffle=True), shuffled),
    "workers": Case(lambda: two(DATA, shuffle=True, num_workers=2, prefetch_factor=3), shuffled),
    "weighted": Case(lambda: two(DATA, sampler=weighted()), None),
    "a generator": Case(lambda: two(DATA, sampler=seeded()), shuffled_by_itself()),
    "batches of an iterable": Case(lambda: two(Streamed()), plain(two(DATA))),
    "dicts": Case(lambda: two(Named()), plain(two(DATA)), named=True),
    "dicts of texts": Case(Labelled, plain(two(DATA)), named=True),
    "counted": Case(Graphs, plain(two(DATA)), named=True),
    "a batch_sampler": Case(lambda: DataLoader(DATA, batch_sampler=Buckets()), None),
    "an iterable": Case(Listed, None),
    "augmented": Case(lambda: two(Noisy(), shuffle=True), None),
    "augmented by workers": Case(lambda: fork(Noisy(), shuffle=True, num_workers=1), None),
    "augmented, alone": Case(Noisy, None),
}


def train_on(run: Run, name: str) -> None:
    case = TABLE[name]
    model: nn.Module = WithNames() if case.named else network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    engine = RuntimeEngine(model, optimizer, run, None if case.named else nn.functional.mse_loss)
    val_data: Any = DATA
    if name == "workers":
        val_data = two(DATA, num_workers=1)
    if case.named:
        val_data = two(Named())
    elif name == "an iterable":
        val_data = Padded()
    engine.fit(case.data(), val_data, STEPS)


def right_losses(case: Case) -> dict[int, float]:
    """Train on the batches of plain torch, each step on the samples of PER_STEP batches."""
    assert case.right
    torch.manual_seed(SEED)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batches = itertools.chain.from_iterable(map(case.right, itertools.count()))
    losses = {}
    for step in range(STEPS):
        parts = list(itertools.islice(batches, PER_STEP))
        x = torch.cat([part[0] for part in parts])
        y = torch.cat([part[1] for part in parts])
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses[step + 1] = loss.item()
    return losses


def losses_of(
    names: Collection[str], folder: Path, world: int, stop: int
) -> dict[str, dict[int, float]]:
    """Train on these loaders of the table, and return the losses."""
    settings = {"global_batch_size": 2 * PER_STEP, "eval_every": STEPS, "max_steps": STEPS}
    turns = []
    for name in names:
        spec = open_own(folder / name.replace(" ", "_"), **settings)
        turns.append(Turn(spec, partial(train_on, name=name), frozenset(), stop))
    outcomes = run_in_turn(turns, world)
    for name, of_ranks in zip(names, outcomes, strict=True):
        assert not [rank for rank in of_ranks if "error" in rank], (name, of_ranks)
        assert {rank["step"] for rank in of_ranks} == {STEPS}
    losses = {}
    for name, turn in zip(names, turns, strict=True):
        losses[name] = series(turn.spec)
        losses[f"{name}: validation"] = series(turn.spec, "val/loss")
        assert [*losses[f"{name}: validation"]] == [STEPS]
    return losses


ALONE = [name for name, case in TABLE.items() if case.right is None]
# Of each way to choose samples, and of each kind of data, one
EVERYDAY = ["workers", "weighted", "a generator", "dicts", "a batch_sampler", "an iterable"]
EVERYDAY += ["dicts of texts", "counted", "augmented", "augmented by workers"]


def check(
    names: Collection[str],
    found: dict[str, dict[int, float]],
    alone: dict[str, dict[int, float]],
) -> None:
    """Compare losses with those of plain torch, or of one unbroken rank."""
    for name in names:
        case = TABLE[name]
        right = right_losses(case) if case.right else alone[name]
        assert found[name] == pytest.approx(right, abs=1e-5), name
        assert len(right) == STEPS
    for name in set(ALONE) & set(names):
        validation = f"{name}: validation"
        assert found[validation] == pytest.approx(alone[validation], abs=1e-5), name


def test_a_loader_of_each_kind_trains_what_plain_torch_does(tmp_path: Path) -> None:
    """On two ranks, with a resume in the middle of an epoch."""
    names = [name for name in EVERYDAY if name in ALONE]
    alone = losses_of(names, tmp_path / "alone", 1, stop=0)
    assert alone["augmented by workers"] == alone["augmented"], "to the bit"
    check(EVERYDAY, losses_of(EVERYDAY, tmp_path / "two", 2, stop=4), alone)


@pytest.mark.full
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_loader_does_so_on_any_number_of_ranks(tmp_path: Path, world: int) -> None:
    alone = losses_of(ALONE, tmp_path / "alone", 1, stop=0)
    check(TABLE, losses_of(TABLE, tmp_path / "others", world, stop=5), alone)

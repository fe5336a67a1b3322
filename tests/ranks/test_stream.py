"""A stream over shards trains what one process trains, resumed with 1, 2 and 3 ranks one after the
other, in the middle of an epoch.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from nanoray.checkpoint.find import newest_valid
from nanoray.checkpoint.run import RunSpec
from nanoray.data.headers import llmc_header
from nanoray.data.seeding import seed_generators_for
from nanoray.data.stream import ShardOrder, ShardStream
from nanoray.mesh.rendezvous import Rendezvous
from nanoray.own.engine import RuntimeEngine
from nanoray.own.program import Program
from nanoray.own.run import Run
from tests.harness import elastic
from tests.harness.in_turn import Turn, run_in_turn
from tests.harness.ranks import series
from tests.ranks.test_own import network, open_own, points

SEED = 1337
COUNTS = [9, 0, 11, 5]  # records of the files
COUNT = sum(COUNTS)
BATCH = 12
STEPS = 7  # 84 samples: three epochs of 25, and a part of the fourth
X, Y = points(COUNT, 1).tensors
Pair = tuple[Tensor, Tensor]


def write(folder: Path, kind: str) -> None:
    """Write the records 0 ... COUNT - 1 into files of a kind."""
    folder.mkdir()
    first = 0
    for shard, count in enumerate(COUNTS):
        records = [{"number": n, "x": X[n].tolist()} for n in range(first, first + count)]
        path = folder / f"part-{shard}.{kind}"
        if kind == "jsonl":
            path.write_text("".join(json.dumps(record) + "\n" for record in records))
        elif kind == "txt":
            path.write_text("\n".join(str(record["number"]) for record in records))
        else:
            tokens = np.arange(first, first + count + 1, dtype=np.uint16)
            path.write_bytes(llmc_header("uint16", len(tokens)) + tokens.tobytes())
        first += count


def from_record(record: dict[str, Any]) -> Pair:
    n = record["number"]
    assert record["x"] == X[n].tolist()
    return X[n], Y[n]


def from_text(line: str) -> Pair:
    return X[int(line)], Y[int(line)]


def from_tokens(tokens: np.ndarray) -> Pair:
    """Tokens n and n + 1 of a sample of two."""
    return X[int(tokens[0])], Y[int(tokens[0])]


def noisy(record: dict[str, Any]) -> Pair:
    """Augment at random, from all three generators."""
    x, y = from_record(record)
    return x + 0.1 * torch.randn(3) + np.random.rand() + random.random(), y


class Shifted(ShardStream):
    """A defect: one sample of each epoch is read in the place of another one."""

    def __getitem__(self, number: int) -> Any:
        return super().__getitem__(4 if number == 3 else number)


class Case(NamedTuple):
    """A row: a kind of files, how their records become pairs, and who reads them."""

    kind: str
    transform: Callable[[Any], Pair]
    options: dict[str, Any] = {}  # noqa: RUF012
    loader: Callable[[ShardStream], Any] = lambda stream: stream
    batch: int = 1  # of the loader
    drop_last: bool = False
    stream: type[ShardStream] = ShardStream


two = partial(DataLoader, batch_size=2)
# Workers by fork start fastest.
workers = partial(two, num_workers=2, multiprocessing_context="fork")
TABLE = {
    "jsonl": Case("jsonl", from_record, {"window": 8}),
    "jsonl by workers": Case("jsonl", noisy, {"window": 8}, workers, batch=2),
    "jsonl, augmented": Case("jsonl", noisy, {"window": 8}, two, batch=2),
    "text, whole epochs shuffled": Case("txt", from_text, {}, two, batch=2),
    "text in order": Case(
        "txt", from_text, {"shuffle": False}, partial(two, drop_last=True), 2, drop_last=True
    ),
    "tokens": Case("bin", from_tokens, {"window": 8, "block_size": 1}),
}
FIRST = ["jsonl by workers", "tokens"]
PLANTED = {"planted": Case("jsonl", from_record, {"window": 8}, stream=Shifted)}


def train_on(run: Run, name: str, files: Path) -> None:
    case = (TABLE | PLANTED)[name]
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    stream = case.stream(files / case.kind, case.transform, **case.options)
    engine = RuntimeEngine(model, optimizer, run, nn.functional.mse_loss)
    engine.fit(case.loader(stream), None, STEPS)


def right_order(case: Case, epoch: int) -> list[int]:
    """The records of an epoch, all at once, without an index."""
    if not case.options.get("shuffle", True):
        return list(range(COUNT))
    window = case.options.get("window", 10_000)
    return ShardOrder(COUNTS, SEED, window).epoch(epoch)[0:COUNT].tolist()


def right_samples(case: Case) -> Iterator[Pair | None]:
    """The samples of a run in one process; None for an empty place at the end of an epoch."""
    place = 0
    for epoch in itertools.count():
        order = right_order(case, epoch)
        rest = len(order) % case.batch
        if case.drop_last:
            order = order[: len(order) - rest]
            rest = 0
        for n in order:
            seed_generators_for(SEED, place, 0)
            yield (
                noisy({"number": n, "x": X[n].tolist()})
                if case.transform is noisy
                else (X[n], Y[n])
            )
            place += 1
        for _ in range(-len(order) % case.batch if rest else 0):
            yield None
            place += 1


def right_losses(case: Case) -> dict[int, float]:
    """Train in plain torch, on everything at once."""
    torch.manual_seed(SEED)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    samples = right_samples(case)
    losses = {}
    for step in range(STEPS):
        pairs = [pair for pair in itertools.islice(samples, BATCH) if pair is not None]
        x = torch.stack([pair[0] for pair in pairs])
        y = torch.stack([pair[1] for pair in pairs])
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses[step + 1] = loss.item()
    return losses


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    for kind in ("jsonl", "txt", "bin"):
        write(folder / kind, kind)
    return folder


def spec_of(folder: Path) -> RunSpec:
    settings = {"global_batch_size": BATCH, "eval_every": 0, "max_steps": STEPS}
    return open_own(folder, **settings)


def losses_of(
    cases: dict[str, Case], folder: Path, files: Path, legs: dict[int, int]
) -> dict[str, dict[int, float]]:
    """Train up to a step with a number of ranks, go on with another one, and return the losses.

    `legs`: number of ranks -> the step after which it stops; 0: the end.
    """
    specs = {name: spec_of(folder / name.replace(" ", "_")) for name in cases}
    for world, stop in legs.items():
        turns = []
        for name, spec in specs.items():
            newest, _ = newest_valid(spec.checkpoints)
            resume = str(newest.path) if newest else ""
            main = partial(train_on, name=name, files=files)
            turns.append(Turn(replace(spec, resume=resume), main, frozenset(), stop, leaves=True))
        outcomes = run_in_turn(turns, world)
        for name, of_ranks in zip(cases, outcomes, strict=True):
            assert not [rank for rank in of_ranks if "error" in rank], (name, of_ranks)
            assert {rank["step"] for rank in of_ranks} == {stop or STEPS}
    return {name: series(spec) for name, spec in specs.items()}


def test_a_run_goes_on_with_other_numbers_of_ranks(tmp_path: Path, files: Path) -> None:
    """1, then 2, then 3 ranks; a sample that is read twice in the place of another one shows."""
    cases = {name: TABLE[name] for name in FIRST} | PLANTED
    found = losses_of(cases, tmp_path, files, {1: 2, 2: 4, 3: 0})
    for name in FIRST:
        assert found[name] == pytest.approx(right_losses(TABLE[name]), abs=1e-5), name
        assert len(found[name]) == STEPS
    assert found["planted"] != pytest.approx(right_losses(PLANTED["planted"]), abs=1e-5)


@pytest.mark.full
@pytest.mark.parametrize(
    "legs", [{1: 0}, {2: 0}, {3: 5, 1: 0}, {3: 1, 2: 3, 1: 0}, {2: 6, 3: 0}], ids=str
)
def test_every_reader_goes_on_in_every_way(
    tmp_path: Path, files: Path, legs: dict[int, int]
) -> None:
    found = losses_of(TABLE, tmp_path, files, legs)
    for name, case in TABLE.items():
        assert found[name] == pytest.approx(right_losses(case), abs=1e-5), name


def with_other_files(run: Run, files: Path) -> None:
    """Train on files that rank 1 has fewer of."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    names = [files / "txt" / f"part-{shard}.txt" for shard in (0, 2)]
    stream = ShardStream(names[: 2 - run.rank], from_text)
    RuntimeEngine(model, optimizer, run, nn.functional.mse_loss).fit(stream)


def test_another_stream_is_refused_on_all_ranks(tmp_path: Path, files: Path) -> None:
    spec = spec_of(tmp_path / "run")
    first = partial(train_on, name="tokens", files=files)
    run_in_turn([Turn(spec, first, stop=1, leaves=True)], 1)
    newest, _ = newest_valid(spec.checkpoints)
    assert newest
    turns = [
        Turn(replace(spec, resume=str(newest.path)), partial(train_on, name="jsonl", files=files)),
        Turn(spec_of(tmp_path / "other"), partial(with_other_files, files=files)),
    ]
    resumed, other = run_in_turn(turns, 2)
    assert [rank["error"] for rank in resumed + other] == ["DataError"] * 4
    for rank in resumed:
        assert rank["message"].startswith(
            "the train data have kind = jsonl, but the checkpoint was saved with tokens"
        )
    for rank in other:
        assert rank["message"].startswith("the files of the train data's stream differ between the")


def streamed_beside(spec: RunSpec, rendezvous: Rendezvous, **how: Any) -> dict[str, Any]:
    """Train as a rank whose files lie beside the runs."""
    files = spec.folder.parent.parent / "files"
    main = partial(train_on, name="jsonl, augmented", files=files)
    return Program(main, frozenset())(spec, rendezvous, **how)


@pytest.mark.full
def test_a_lost_rank_is_replaced_and_its_stream_goes_on(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    write(tmp_path / "files" / "jsonl", "jsonl")
    settings = {"global_batch_size": BATCH, "eval_every": 0, "max_steps": STEPS}
    faults = "kill@rank=1,step=5,phase=backward"
    spec = open_own(tmp_path / "run", faults=faults, checkpoint_every=2, **settings)
    outcome = elastic.run_elastic(spec, 2, train=streamed_beside)
    assert [of.get("exit_reason") for of in outcome.ranks.values()] == ["finished"] * 2, outcome
    assert len(outcome.left) == 1, "one recovery"
    assert series(spec) == pytest.approx(right_losses(TABLE["jsonl, augmented"]), abs=1e-5)

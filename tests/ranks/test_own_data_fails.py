"""A script's data that fail: before the first step in one line, later with the steps before saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from nanoray.checkpoint.resume import newest_valid
from nanoray.errors import DataFailed
from nanoray.script.engine import RuntimeEngine
from nanoray.script.run import Run
from tests.harness.in_turn import Turn, run_in_turn
from tests.ranks.test_own import network, open_own, points

DATA = points(48, 1)  # an epoch is four steps of 12 samples
STEPS = 6


class Broken(Dataset[Any]):
    """Fails for one item, which shuffle=False reads in step 4."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.reads = 0

    def __len__(self) -> int:
        return 48

    def __getitem__(self, i: int) -> Any:
        if i == 45 and self.how == "raises":
            raise KeyError("no such image")
        if i == 45 and self.how == "lies":
            raise IndexError("out of range")
        if i == 45 and self.how == "other shape":
            return torch.zeros(4), torch.zeros(1)
        if self.how == "at once":
            raise OSError(5, "the disk")
        return DATA[i]


class BrokenLater(Dataset[Any]):
    """Validation data that fail in the second evaluation, after step 4."""

    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> Any:
        self.reads += 1
        if self.reads > 9:  # 3 in the trial, and 6 of each evaluation
            raise ValueError("validation is gone")
        return DATA[i]


class Stream:
    """Batches of 3 of which the one with number 13, in step 4, is not like the others."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __iter__(self) -> Iterator[Any]:
        for k in range(16):
            x, y = DATA[3 * k : 3 * k + 3]
            if k == 13 and self.how == "raises":
                raise ConnectionError("the bucket is gone")
            if k == 13 and self.how == "none":
                yield None  # a collate_fn that has left all samples out
            elif k == 13 and self.how == "triple":
                yield x, y, y
            elif k == 13 and self.how == "large":
                yield DATA[0:5]
            else:
                yield x, y


class Cut(IterableDataset[Any]):
    """Batches of 3 that are cut by rank, as datasets' split_dataset_by_node does."""

    def __init__(self, run: Run) -> None:
        self.rank = run.rank

    def __iter__(self) -> Iterator[Any]:
        for k in range(self.rank, 16, 2):
            yield DATA[3 * k : 3 * k + 3]


class Drawing:
    """A stream whose state is that of numpy's generator, which has an array."""

    def __iter__(self) -> Iterator[Any]:
        for k in range(16):
            yield DATA[3 * k : 3 * k + 3]

    def state_dict(self) -> dict[str, Any]:
        return {"generator": np.random.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        np.random.set_state(state["generator"])


class Once(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


class Case(NamedTuple):
    """A row: the data, the beginning of the message, and the newest checkpoint's step."""

    data: Callable[[], Any]
    text: str
    step: int = 3
    val_data: Callable[[], Any] = lambda: None
    error: str = "DataFailed"


three = partial(DataLoader, batch_size=3)
STARTED = {
    "an item": Case(
        lambda: three(Broken("raises")),
        "after step 3 rank 1 could not read the script's data; the 3 steps before it are saved: mend "
        "the data, and resume. KeyError: 'no such image'\n  File",
    ),
    "another shape": Case(
        lambda: three(Broken("other shape")), "after step 3 rank 1 could not read the script's data"
    ),
    "a stream": Case(lambda: Stream("raises"), "after step 3 rank 0 could not read the script's d"),
    "a batch that is None": Case(
        lambda: Stream("none"),
        "after step 3 rank 0 could not read the script's data; the 3 steps before it are saved: mend "
        "the data, and resume. a batch is None; leave it out of the data, or let collate_fn",
    ),
    "validation": Case(
        lambda: three(DATA), "after step 4 rank 0 could not read the scr", 4, BrokenLater
    ),
}
DIFFERS = "the first batch of the train data differs between the ranks, but every rank reads all"
refused = partial(Case, step=0, error="DataError")
REFUSED = {
    "the first item": refused(
        lambda: three(Broken("at once")),
        "rank 0 cannot read its first batch: OSError: [Errno 5] the disk",
    ),
    "a dataset of another length": refused(
        dict, "the train data have another length on some rank, so samples would be repeated"
    ),
    "an iterable that is cut by rank": refused(dict, DIFFERS),
    "a DistributedSampler": refused(dict, DIFFERS),
    "an empty stream": refused(lambda: three(Once()), "the train data yield no batch"),
    "a state that no checkpoint keeps": refused(
        Drawing,
        "the state of the train data has a ndarray at state/generator/1, which a checkpoint",
    ),
    "another micro_batch_size": refused(
        lambda: DataLoader(DATA, batch_size=2),
        "micro_batch_size = 3, but the train data come in batches of 2 samples, and each is one rank",
        error="ConfigError",
    ),
}
TABLE = STARTED | REFUSED
# Data that know the rank
CUT: dict[str, Callable[[Run], Any]] = {
    "an iterable that is cut by rank": Cut,
    "a DistributedSampler": lambda run: three(
        DATA, sampler=DistributedSampler(DATA, num_replicas=2, rank=run.rank)
    ),
    "a dataset of another length": lambda run: points(48 + run.rank, 1),
}


def train_on(run: Run, name: str) -> None:
    case = TABLE[name]
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    engine = RuntimeEngine(model, optimizer, run, nn.functional.mse_loss)
    data = CUT[name](run) if name in CUT else case.data()
    engine.fit(data, case.val_data(), STEPS)


def test_data_that_fail_cost_no_step_and_say_why(tmp_path: Path) -> None:
    """All ranks end alike, and what was trained is saved."""
    turns = []
    for name in TABLE:
        settings: dict[str, Any] = {"global_batch_size": 12, "eval_every": 2, "max_steps": STEPS}
        if name == "another micro_batch_size":
            settings["micro_batch_size"] = 3
        spec = open_own(tmp_path / name.replace(" ", "_"), **settings)
        turns.append(Turn(spec, partial(train_on, name=name), frozenset(settings)))
    outcomes = run_in_turn(turns, 2)

    for (name, case), turn, of_ranks in zip(TABLE.items(), turns, outcomes, strict=True):
        for outcome in of_ranks:
            assert outcome.get("error") == case.error, (name, outcome)
        assert of_ranks[0]["message"].startswith(case.text), (name, of_ranks[0]["message"])
        newest, _damaged = newest_valid(turn.spec.checkpoints)
        saved = newest.state.meta["step"] if newest else 0
        assert saved == case.step, name
        if not case.step:
            metrics = turn.spec.folder / "metrics.jsonl"
            assert not metrics.is_file() or not metrics.read_text(), f"{name}: no step is lost"
    message = outcomes[0][0]["message"]
    assert "KeyError: 'no such image'\n  File" in message
    assert message.count("File") == 1, "the user's own line, and no other"
    assert DataFailed.exit_code == 1


def fit_points(run: Run, count: int) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    engine = RuntimeEngine(model, optimizer, run, nn.functional.mse_loss)
    engine.fit(points(count, 1), None, STEPS)


def test_a_resume_with_a_dataset_of_another_length_is_refused(tmp_path: Path) -> None:
    """The places of an epoch's samples follow from the length: the rest of the epoch would differ."""
    settings: dict[str, Any] = {"eval_every": 0, "max_steps": STEPS}
    spec = open_own(tmp_path / "run", **settings)
    run_in_turn([Turn(spec, partial(fit_points, count=48), stop=2, leaves=True)], 1)
    newest, _damaged = newest_valid(spec.checkpoints)
    assert newest
    rest = replace(spec, resume=str(newest.path))
    turns = [Turn(rest, partial(fit_points, count=count)) for count in (60, 48)]
    refused_ranks, same = run_in_turn(turns, 2)
    for rank in refused_ranks:
        assert rank["error"] == "DataError", rank
        assert rank["message"].startswith(
            "the train data have samples = 60, but the checkpoint was saved with 48, so some samples "
            "would be repeated and others left out; give the data of then"
        )
    assert [rank["step"] for rank in same] == [STEPS] * 2

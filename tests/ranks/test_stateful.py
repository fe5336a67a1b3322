"""A script's loader with a state: each rank's is saved with a checkpoint, and read on from exactly
there.
"""

from __future__ import annotations

import os
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from nanoray.checkpoint.run import RunSpec
from nanoray.errors import DataError
from nanoray.mesh.rendezvous import Rendezvous
from nanoray.own.data.epochs import Sample
from nanoray.own.data.source import OwnData
from nanoray.own.data.stateful import KEPT, Stateful, is_stateful, pack, unpack
from nanoray.own.engine import RuntimeEngine
from nanoray.own.program import Program
from nanoray.own.run import Run
from tests.harness import elastic
from tests.harness.own_runs import final_tensors
from tests.harness.ranks import records, run_ranks, series
from tests.ranks.test_own import open_own, trained

CPU = torch.device("cpu")
EPOCH = 7  # batches of a rank, so 8 steps end in the second epoch


class Stream:
    """Batches in an order of this rank's own, another one in each epoch. It notes which ones it
    reads.
    """

    def __init__(self, size: int, rank: int, notes: Path | None = None) -> None:
        self.size, self.rank, self.notes = size, rank, notes
        self.epoch, self.at = 0, 0
        self.source = torch.Generator().manual_seed(rank)  # its state decides the epoch's order
        self.before = self.source.get_state()

    def __iter__(self) -> Iterator[Any]:
        self.source.set_state(self.before)
        order = torch.randperm(EPOCH, generator=self.source).tolist()
        while self.at < EPOCH:
            k = order[self.at]
            self.at += 1
            if self.notes:
                with (self.notes / f"rank{self.rank}").open("a") as stream:
                    stream.write(f"{os.getpid()} {self.epoch} {k}\n")
            x = torch.randn(
                self.size, 3, generator=torch.Generator().manual_seed(100 * self.rank + k)
            )
            yield x, x.sum(1, keepdim=True).sin()
        self.epoch, self.at, self.before = self.epoch + 1, 0, self.source.get_state()

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "at": self.at, "before": self.before}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.at, self.before = state["epoch"], state["at"], state["before"]


def streamed(run: Run, notes: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, fused=True)
    notes.mkdir(exist_ok=True)
    size = run.config.global_batch_size // run.world_size // max(1, run.config.grad_accum_steps)
    RuntimeEngine(model, optimizer, run, nn.functional.mse_loss).fit(Stream(size, run.rank, notes))


def read(notes: Path, rank: int) -> list[list[str]]:
    """What each process of a rank has read, in order."""
    found: OrderedDict[str, list[str]] = OrderedDict()
    for line in (notes / f"rank{rank}").read_text().splitlines():
        pid, what = line.split(" ", 1)
        found.setdefault(pid, []).append(what)
    return [*found.values()]


@pytest.mark.parametrize(
    ("stop", "accum"),
    [
        (7, 1),
        pytest.param(3, 2, marks=pytest.mark.full),
        pytest.param(3, 1, marks=pytest.mark.full),
        pytest.param(7, 2, marks=pytest.mark.full),
    ],
)
def test_a_resume_reads_exactly_the_next_batches(tmp_path: Path, accum: int, stop: int) -> None:
    """In the middle of an epoch, and (7 steps of one batch) at its end; a batch that was read ahead
    is read again.
    """
    settings = {"grad_accum_steps": accum, "eval_every": 0}
    clean, parts = (partial(streamed, notes=tmp_path / name) for name in ("clean", "parts"))
    whole = trained(tmp_path / "whole", 2, clean, **settings)
    trained(tmp_path / "run", 2, parts, stop_at=stop, **settings)
    rest = trained(tmp_path / "run", 2, parts, resume="auto", **settings)
    assert series(rest) == series(whole), "to the bit"
    ours, theirs = final_tensors(rest), final_tensors(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for rank in range(2):
        (everything,) = read(tmp_path / "clean", rank)
        before, after = read(tmp_path / "parts", rank)
        assert before == everything[: len(before)]
        assert after == everything[stop * accum :], (
            "it skips nothing and reads nothing that was used"
        )


def test_another_number_of_ranks_is_refused_with_both_numbers(tmp_path: Path) -> None:
    main = partial(streamed, notes=tmp_path / "notes")
    trained(tmp_path / "run", 2, main, stop_at=3, eval_every=0)
    outcomes = run_ranks(
        open_own(tmp_path / "run", resume="auto", eval_every=0), 3, train=Program(main, frozenset())
    )
    assert [o["error"] for o in outcomes] == ["CheckpointError"] * 3, outcomes
    assert outcomes[0]["message"].startswith(
        "the checkpoint has the states of 2 loaders, one of each rank, but now there are 3 ranks; "
        "resume with 2 ranks"
    )
    shrinking = run_ranks(
        open_own(tmp_path / "other", recovery="shrink"), 2, train=Program(main, frozenset())
    )
    assert shrinking[0]["message"].startswith(
        "recovery = shrink changes the number of ranks and the micro batch, but the train"
    )


def with_a_dataset(run: Run) -> None:
    model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, fused=True)
    RuntimeEngine(model, optimizer, run, nn.functional.mse_loss).fit(data)


def test_a_checkpoint_without_the_loaders_state_is_said(tmp_path: Path) -> None:
    trained(tmp_path / "run", 1, with_a_dataset, stop_at=3, eval_every=0)
    rest = trained(
        tmp_path / "run",
        1,
        partial(streamed, notes=tmp_path / "notes"),
        resume="auto",
        eval_every=0,
    )
    assert "has no state of the loader: it begins anew and skips what was used" in (
        rest.log(0).read_text()
    )
    (after,) = read(tmp_path / "notes", 0)
    assert len(after) == 3 + 5 + 1, "3 skipped, 5 used, one read ahead"


def streamed_beside(spec: RunSpec, rendezvous: Rendezvous, **how: Any) -> dict[str, Any]:
    """Train as a rank whose script reads a stream, and notes what beside the runs."""
    return Program(partial(streamed, notes=spec.folder.parent.parent / "notes"), frozenset())(
        spec, rendezvous, **how
    )


@pytest.mark.parametrize(
    ("mode", "every"),
    [
        pytest.param("ddp", 2, marks=pytest.mark.full),
        ("zero1", 2),
        pytest.param("ddp", 0, marks=pytest.mark.full),
    ],
)
def test_a_lost_rank_is_replaced_and_its_loader_goes_on(
    tmp_path: Path, mode: str, every: int
) -> None:
    """From the newest checkpoint's state, and what was read after it is skipped; without one, from
    the start.
    """
    settings: dict[str, Any] = {
        "dp_mode": mode,
        "eval_every": 0,
        "checkpoint_every": every,
        "grad_accum_steps": 2,
    }
    settings |= {"max_steps": 8, "checkpoint_mode": "sync"}
    whole = trained(tmp_path / "whole", 2, partial(streamed, notes=tmp_path / "clean"), **settings)
    spec = open_own(tmp_path / "run", faults="kill@rank=1,step=6,phase=backward", **settings)
    outcome = elastic.run_elastic(spec, 2, train=streamed_beside)
    assert [of.get("exit_reason") for of in outcome.ranks.values()] == ["finished"] * 2, outcome
    assert len(outcome.left) == 1, "one recovery"
    assert {r["step"]: r["train/loss"] for r in records(spec)} == series(whole), (
        "no step is repeated, to the bit"
    )
    (everything,) = read(tmp_path / "clean", 1)
    _, replacement = read(tmp_path / "notes", 1)
    assert replacement == everything[2 * 4 if every else 0 :]
    (survivor,) = read(tmp_path / "notes", 0)
    assert survivor == read(tmp_path / "clean", 0)[0], "it kept the batches of the interrupted step"
    ours, theirs = final_tensors(spec), final_tensors(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_checkpoint_has_the_state_of_every_rank(tmp_path: Path) -> None:
    spec = trained(
        tmp_path / "run", 2, partial(streamed, notes=tmp_path / "notes"), stop_at=3, eval_every=0
    )
    from nanoray.checkpoint.find import newest_rank_states

    states, samples = newest_rank_states(spec.checkpoints, "")
    found = [unpack(of["loader"]) for of in states]
    assert samples == 36
    assert [(state["epoch"], state["at"]) for state in found] == [(0, 3), (0, 3)]
    assert not torch.equal(found[0]["before"], found[1]["before"])
    assert newest_rank_states(tmp_path, "") == ([], 0)


def test_older_batches_are_kept_or_read_again_from_an_older_state() -> None:
    batches = Stateful(Stream(4, 0))
    firsts = [batches.batch(number)[0] for number in range(3)]
    saved = batches.state_before(2)
    later = [batches.batch(number)[0] for number in range(3, KEPT + 9)]
    assert torch.equal(batches.batch(KEPT + 5)[0], later[KEPT + 2]), "kept"
    assert torch.equal(batches.batch(3)[0], later[0]), "read again"
    assert torch.equal(batches.batch(2)[0], firsts[2])
    other = Stateful(Stream(4, 0))
    other.load(saved, 2)
    assert [torch.equal(other.batch(2 + i)[0], x) for i, x in enumerate([firsts[2], *later])] == [
        True
    ] * (KEPT + 7)
    with pytest.raises(
        DataError,
        match="batch 1 of the train data is needed again, but the oldest known state of the",
    ):
        other.batch(1)


def test_a_state_is_what_it_was() -> None:
    state = {
        "numbers": [1, 2.5, True, None, -0.0, 2**100],
        "text": "é",
        "pair": (1, (2, [3])),
        3: {"": b"\x00\xff"},
        "tensor": torch.arange(6, dtype=torch.int16).view(2, 3),
        "bf16": torch.ones(2, dtype=torch.bfloat16),
        "scalar": torch.tensor(True),
        "none": torch.empty(0, 4),
        "array": np.random.default_rng(0).normal(size=(2, 2)),
        "generator": np.random.default_rng(0).bit_generator.state,
    }
    found = unpack(pack(state))
    assert found.keys() == state.keys()
    for key in ("tensor", "bf16", "scalar", "none"):
        assert found[key].dtype == state[key].dtype
        assert torch.equal(found[key], state[key])
    assert found["array"].tobytes() == state["array"].tobytes()
    for key in ("numbers", "text", "pair", 3, "generator"):
        assert found[key] == state[key]
    with pytest.raises(
        DataError, match=r"has a Generator at state/rng/0, which a checkpoint cannot hold; let"
    ):
        pack({"rng": [torch.Generator()]})
    with pytest.raises(
        DataError, match=r"has a ndarray at state/a, which a checkpoint cannot hold"
    ):
        pack({"a": np.array([object()])})


class Phase(str, Enum):
    FIRST = "first"


def test_a_state_of_subclasses_comes_back_as_what_they_extend() -> None:
    counts: defaultdict[str, int] = defaultdict(int, a=1)
    state = {
        "counts": counts,
        "phase": Phase.FIRST,
        "place": Sample(3, "x"),
        ("train", 0): np.int64(7),
        "when": np.datetime64("2026-01-01"),
        "weight": nn.Parameter(torch.ones(2)),
    }
    found = unpack(pack(state))
    assert type(found["counts"]) is dict
    assert found["counts"] == {"a": 1}
    assert type(found["phase"]) is str
    assert found["phase"] == "first"
    assert found["place"] == (3, "x")
    assert found["train", 0] == 7
    assert found["when"] == np.datetime64("2026-01-01")
    assert torch.equal(found["weight"], torch.ones(2))


class Empty(Stream):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


class WithNone(Stream):
    def __iter__(self) -> Iterator[Any]:
        yield None
        yield from super().__iter__()


def test_loaders_that_cannot_be_read_are_told_why() -> None:
    with pytest.raises(
        DataError, match="the loader of the train data yields no batch in a whole epoch; give it"
    ):
        OwnData(Empty(4, 0), None, 0, 4, CPU).train_batch(0, 4)
    with pytest.raises(DataError, match="a batch is None; leave it out of the data"):
        OwnData(WithNone(4, 0), None, 0, 4, CPU).train_batch(0, 4)
    with pytest.raises(
        DataError, match=r"batch 0 of the train data has 4 samples, but micro_batch_size = 5; make"
    ):
        OwnData(Stream(4, 0), None, 0, 5, CPU).train_batch(0, 5)
    assert is_stateful(Stream(4, 0))
    assert not is_stateful([1, 2])
    assert not is_stateful(nn.ModuleList()), "it has an index"

"""A script's stream with a state: the state is saved with a checkpoint, and any number of ranks reads on
from exactly there.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nanoray.checkpoint.resume import newest_rank_states
from nanoray.checkpoint.run_folder import RunSpec
from nanoray.parallel.rendezvous import Rendezvous
from nanoray.script.data.stream import KEPT, Stream, unpack
from nanoray.script.engine import RuntimeEngine
from nanoray.script.program import Program
from nanoray.script.run import Run
from tests.harness import elastic
from tests.harness.ranks import records, series
from tests.harness.script_runs import final_tensors
from tests.ranks.test_own import open_own, trained

EPOCH = 7  # batches, so 8 steps end in a later epoch


class Noted:
    """Batches in another order in each epoch. It notes which ones a rank reads."""

    def __init__(self, size: int, rank: int = 0, notes: Path | None = None) -> None:
        self.size, self.rank, self.notes = size, rank, notes
        self.epoch, self.at = 0, 0
        self.source = torch.Generator().manual_seed(5)  # its state decides the epoch's order
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
            x = torch.randn(self.size, 3, generator=torch.Generator().manual_seed(k))
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
    RuntimeEngine(model, optimizer, run, nn.functional.mse_loss).fit(Noted(3, run.rank, notes))


def read(notes: Path, rank: int) -> list[list[str]]:
    """What each process of a rank has read, in order."""
    found: OrderedDict[str, list[str]] = OrderedDict()
    for line in (notes / f"rank{rank}").read_text().splitlines():
        pid, what = line.split(" ", 1)
        found.setdefault(pid, []).append(what)
    return [*found.values()]


@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.full)])
def test_a_resume_reads_exactly_the_next_batches_at_any_number_of_ranks(
    tmp_path: Path, ranks: int
) -> None:
    """In the middle of an epoch. A batch that was read ahead is read again."""
    settings = {"eval_every": 0}  # a step is four batches of 3
    clean, parts = (partial(streamed, notes=tmp_path / name) for name in ("clean", "parts"))
    whole = trained(tmp_path / "whole", 2, clean, **settings)
    first = trained(tmp_path / "run", 2, parts, stop_at=3, **settings)
    states, samples = newest_rank_states(first.checkpoints, "")
    assert samples == 36
    for state in states:
        assert unpack(state["stream"])["epoch"] == 1, "12 batches are an epoch and five batches"
        assert unpack(state["stream"])["at"] == 5

    rest = trained(tmp_path / "run", ranks, parts, resume="auto", **settings)
    assert "the stream goes on from its state after 36 samples" in rest.log(0).read_text()
    ours, theirs = final_tensors(rest), final_tensors(whole)
    if ranks == 2:
        assert series(rest) == series(whole), "to the bit"
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert series(rest) == pytest.approx(series(whole), abs=2e-5)

    for rank in range(ranks):
        (everything,) = read(tmp_path / "clean", rank)
        before, after = read(tmp_path / "parts", rank)
        assert before == everything[: len(before)]
        # Before the run goes on, only the first batches are read, for their size and hash.
        begin = after.index(everything[12])
        assert after[:begin] == everything[:begin]
        assert begin <= ranks
        common = min(len(after) - begin, len(everything) - 12)
        assert after[begin:][:common] == everything[12:][:common], "it skips and repeats nothing"


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
def test_a_lost_rank_is_replaced_and_its_stream_goes_on(
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
    after = 4 * 4 if every else 1  # the first batch is read for its hash
    assert replacement[1:] == everything[after : after + len(replacement) - 1]
    (survivor,) = read(tmp_path / "notes", 0)
    assert survivor == read(tmp_path / "clean", 0)[0], "it kept the batches of the interrupted step"
    ours, theirs = final_tensors(spec), final_tensors(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_older_batches_are_kept_or_read_again_from_an_older_state() -> None:
    batches = Stream(Noted(4), "train")

    def x_of(number: int, stream: Stream = batches) -> torch.Tensor:
        (x, _), samples = stream.batch(number)
        assert samples == 4
        return x

    firsts = [x_of(number) for number in range(3)]
    saved = batches.state_before(2)
    later = {number: x_of(number) for number in range(3, 2 * KEPT, 3)}
    newest = max(later)
    assert torch.equal(x_of(newest), later[newest]), "kept"
    assert torch.equal(x_of(3), later[3]), "read again, from the state that it began with"
    assert torch.equal(x_of(2), firsts[2])

    other = Stream(Noted(4), "train")
    other.load(saved, 2)
    assert torch.equal(x_of(2, other), firsts[2])
    for number, x in later.items():
        assert torch.equal(x_of(number, other), x)
    assert torch.equal(x_of(3, other), later[3])
    assert other.first() == batches.first(), "the ranks compare the first batch"

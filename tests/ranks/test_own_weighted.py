"""A loss over a varying number of targets has the gradient of the whole batch, however the batch is
divided among ranks and micro batches. The right values are one process and the whole batch.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from nanoray import Weighted
from nanoray.script.data.source import ScriptData
from nanoray.script.engine import RuntimeEngine
from nanoray.script.run import Run
from tests.harness.in_turn import Turn, run_in_turn
from tests.harness.ranks import series
from tests.harness.script_runs import final_tensors
from tests.ranks.test_own import open_own

STEPS = 6
BATCH = 12
SEED = 1337
CPU = torch.device("cpu")


def words(count: int = 60) -> TensorDataset:
    """Samples of 5 tokens of which some, or all, are padding; so are all of step 3."""
    draws = torch.Generator().manual_seed(5)
    x = torch.randn(count, 5, 3, generator=draws)
    y = torch.randint(0, 4, (count, 5), generator=draws)
    lengths = torch.randint(0, 6, (count,), generator=draws)
    y[torch.arange(5) >= lengths[:, None]] = -100

    # Where the samples of a step lie follows from the seed.
    places = ScriptData([(i, i) for i in range(count)], None, SEED, 1, CPU)
    order = places.train_batch(0, count)[0]
    y[order[2 * BATCH : 3 * BATCH]] = -100  # a step without a target
    y[order[BATCH + 6 : 2 * BATCH]] = -100  # a half of one: a rank, or a micro batch, without
    return TensorDataset(x, y)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))


def summed(logits: Tensor, y: Tensor) -> Weighted:
    loss = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum")
    return Weighted(sum=loss, weight=(y >= 0).sum())


class WithLoss(nn.Module):
    """A model that returns its loss itself, and counts in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def forward(self, x: Tensor, y: Tensor) -> Weighted:
        loss, weight = summed(self.layers(x), y)
        return Weighted(loss, float(weight))


def train_words(run: Run, with_loss: bool = False) -> None:
    model = WithLoss() if with_loss else network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine = RuntimeEngine(model, optimizer, run, None if with_loss else summed)
    engine.fit(words(), words(30), STEPS)


class Right(NamedTuple):
    """What one process computes in plain torch."""

    losses: dict[int, float]
    val_loss: float
    weights: dict[str, Tensor]


def alone(clip: float = 0.0) -> Right:
    """Train on whole batches, with the mean over all targets of each."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    data = ScriptData(words(), None, SEED, BATCH, CPU)
    losses = {}
    for step in range(STEPS):
        x, y = data.train_batch(BATCH * step, BATCH)
        total = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")
        loss = total / max(1, int((y >= 0).sum()))
        optimizer.zero_grad()
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses[step + 1] = loss.item()

    x, y = words(30).tensors
    val_loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten()).item()
    return Right(losses, val_loss, model.state_dict())


class Case(NamedTuple):
    """A row of the table: settings of the run, and how far it may be from the right values."""

    settings: dict[str, Any]
    tolerance: float = 1e-5
    stop: int = 0
    with_loss: bool = False


TABLE = {
    "ddp": Case({}),
    "ddp in micro batches": Case({"grad_accum_steps": 2}, stop=4),
    "the model's own loss": Case({"grad_accum_steps": 2}, with_loss=True),
    "zero1": Case({"dp_mode": "zero1", "grad_accum_steps": 2}, stop=2),
    "fsdp": Case({"dp_mode": "fsdp", "grad_accum_steps": 2}, stop=3),
    "clip": Case({"grad_clip": 0.1, "grad_accum_steps": 2}),
    "fp16": Case({"precision": "fp16", "grad_accum_steps": 2}, tolerance=2e-2),
}


@pytest.mark.parametrize(
    "world", [2, *(pytest.param(world, marks=pytest.mark.full) for world in (1, 3))]
)
def test_the_gradient_is_that_of_the_whole_batch(tmp_path: Path, world: int) -> None:
    turns = []
    for name, case in TABLE.items():
        settings = {"global_batch_size": BATCH, "eval_every": STEPS, "max_steps": STEPS}
        spec = open_own(tmp_path / name.replace(" ", "_"), **settings | case.settings)
        main = partial(train_words, with_loss=case.with_loss)
        turns.append(Turn(spec, main, frozenset(case.settings), case.stop))
    outcomes = run_in_turn(turns, world)

    right = {clip: alone(clip) for clip in (0.0, 0.1)}
    for (name, case), turn, of_ranks in zip(TABLE.items(), turns, outcomes, strict=True):
        assert not [rank for rank in of_ranks if "error" in rank], (name, of_ranks)
        expected = right[case.settings.get("grad_clip", 0.0)]
        near = partial(pytest.approx, abs=case.tolerance)
        assert series(turn.spec) == near(expected.losses), name
        assert series(turn.spec, "val/loss")[STEPS] == near(expected.val_loss), name
        ours = final_tensors(turn.spec)
        prefix = "layers." if case.with_loss else ""
        for key, theirs in expected.weights.items():
            assert torch.allclose(ours[prefix + key], theirs, atol=case.tolerance), (name, key)

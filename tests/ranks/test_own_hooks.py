"""What a script hangs on its optimizer is called once in a step, and follows whole weights."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from nanoray.checkpoint.resume import newest_valid
from nanoray.checkpoint.run_folder import RunSpec
from nanoray.cli.open_folder import open_run
from nanoray.config import make_config
from nanoray.data.dataset import own_data
from nanoray.script.engine import RuntimeEngine
from nanoray.script.program import Program
from nanoray.script.run import Run
from nanoray.script.settings import DEFAULTS
from tests.harness import own_runs
from tests.harness.lasting_ranks import LastingRanks

STEPS = 6
MICRO = 3
SETTINGS = own_runs.SETTINGS | {"max_steps": STEPS, "eval_every": 3, "micro_batch_size": MICRO}

CALLS: Counter[str] = Counter()  # in a rank's process


@pytest.fixture(scope="module")
def pair() -> Iterator[LastingRanks]:
    with LastingRanks(2) as ranks:
        yield ranks


def points(count: int, seed: int) -> TensorDataset:
    x = torch.randn(count, 3, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def open_own(folder: Path, **settings: Any) -> RunSpec:
    values = DEFAULTS | SETTINGS | {"out_dir": str(folder)} | settings
    return open_run(make_config(values), own_data(), time.time())


def trained(ranks: LastingRanks, main: Any, folder: Path, **settings: Any) -> RunSpec:
    spec = open_own(folder, **settings)
    outcomes = ranks.train(spec, Program(main, frozenset()))
    assert not [outcome for outcome in outcomes if "error" in outcome], outcomes
    return spec


# Counting calls.


def count(name: str, *arguments: Any) -> None:
    CALLS[name] += 1


# A moving average of the weights.


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))


# What a mode cannot call as torch does.


def fit_hooked(run: Run, how: str) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if how == "before":
        optimizer.register_step_pre_hook(count)
    elif how == "after":
        optimizer.register_step_post_hook(count)
    elif how == "state_dict":
        optimizer.register_state_dict_post_hook(lambda optimizer, state: state | {"mine": 1})
    else:
        step = optimizer.step
        optimizer.step = lambda closure=None: step()  # type: ignore[method-assign]
    RuntimeEngine(model, optimizer, run, nn.functional.mse_loss).fit(points(50, 1))


@pytest.mark.parametrize(
    ("how", "mode", "words"),
    [
        ("before", "zero1", "without the hooks of its step"),
        ("state_dict", "zero1", "has a state_dict() of its own"),
    ],
)
def test_a_hook_that_a_mode_cannot_call_is_refused(
    pair: LastingRanks, tmp_path: Path, how: str, mode: str, words: str
) -> None:
    program = Program(partial(fit_hooked, how=how), frozenset())
    for outcome in pair.train(open_own(tmp_path / mode, dp_mode=mode), program):
        assert words in outcome["message"], outcome
    # The mode that is advised takes it, and saves what a hook adds to the optimizer's state.
    spec = trained(pair, partial(fit_hooked, how=how), tmp_path / "ddp", dp_mode="ddp")
    found, _ = newest_valid(spec.checkpoints)
    assert found
    saved = json.dumps(found.state.meta.get("optimizer", {}))
    assert ('"mine"' in saved) == (how == "state_dict")

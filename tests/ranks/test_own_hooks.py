"""What a script hangs on its optimizer, modules and parameters is called by the steps alone."""

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
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn
from torch.utils.data import TensorDataset

from nanoray.checkpoint.find import newest_valid
from nanoray.checkpoint.run import RunSpec
from nanoray.config import make_config
from nanoray.data.dataset import own_data
from nanoray.own.data.source import OwnData
from nanoray.own.engine import RuntimeEngine
from nanoray.own.program import Program
from nanoray.own.run import Run
from nanoray.own.settings import DEFAULTS
from nanoray.start.folder import open_run
from tests.harness import own_runs
from tests.harness.elastic import run_elastic
from tests.harness.lasting_ranks import LastingRanks

STEPS = 6
BATCH = 12
MICRO = 3
MODES = ("ddp", "ddp_by_hand", "zero1", "zero2", "fsdp")
SETTINGS = own_runs.SETTINGS | {"max_steps": STEPS, "eval_every": 3, "micro_batch_size": MICRO}

CALLS: Counter[str] = Counter()  # in a rank's process


@pytest.fixture(scope="module")
def pair() -> Iterator[LastingRanks]:
    with LastingRanks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def one() -> Iterator[LastingRanks]:
    with LastingRanks(1) as ranks:
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


class Net(nn.Module):
    """Counts its forwards in attributes, a global and what autograd saves."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 8)
        self.last = nn.Linear(8, 1)
        self.calls = 0
        self.unused = nn.Parameter(torch.ones(2))  # no step computes a gradient of it

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if not self.training:
            return self.last(self.first(x).tanh())  # type: ignore[no-any-return]
        CALLS["forward"] += 1

        def pack(tensor: Tensor) -> Tensor:
            CALLS["saved tensor"] += 1
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            hidden = self.first(x).tanh()
        if hidden.requires_grad:
            hidden.register_hook(partial(count, "tensor hook"))
        return self.last(hidden)  # type: ignore[no-any-return]


class Loss:
    """A loss that counts its calls, and collects the values of evaluations."""

    def __init__(self) -> None:
        self.calls = 0
        self.evaluations: list[float] = []

    def __call__(self, output: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        loss = nn.functional.mse_loss(output, y)
        if not loss.requires_grad:
            self.evaluations.append(loss.item())
        return loss


def count(name: str, *arguments: Any) -> None:
    CALLS[name] += 1


def count_in_training(module: nn.Module, *arguments: Any) -> None:
    if module.training:
        CALLS["forward hook"] += 1


def count_calls(run: Run, step_hooks: bool = True) -> None:
    CALLS.clear()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if step_hooks:
        optimizer.register_step_post_hook(partial(count, "after a step"))
        if not run.config.sharded or run.world_size == 1:
            optimizer.register_step_pre_hook(partial(count, "before a step"))

    once: list[Any] = []

    def remove_after_use(*arguments: Any) -> None:
        CALLS["once"] += 1
        once.pop().remove()

    once.append(model.last.register_forward_hook(remove_after_use))
    model.first.register_forward_hook(count_in_training)
    model.first.register_forward_pre_hook(count_in_training)
    model.first.register_full_backward_hook(partial(count, "backward hook"))
    if run.config.dp_mode != "fsdp" or run.world_size == 1:
        weight = model.first.weight
        weight.register_hook(partial(count, "gradient"))
        weight.register_post_accumulate_grad_hook(partial(count, "accumulated"))
        model.unused.register_hook(partial(count, "unused"))
    variable = 0

    def count_variable(module: nn.Module, *arguments: Any) -> None:
        nonlocal variable
        variable += 1

    model.last.register_forward_pre_hook(count_variable)
    loss = Loss()
    RuntimeEngine(model, optimizer, run, loss).fit(points(50, 1), points(20, 2))
    calls = CALLS | {"attribute": model.calls, "variable": variable, "loss": loss.calls}
    calls["evaluations"] = len(loss.evaluations)
    (run.folder / f"calls{run.rank}.json").write_text(json.dumps(calls))


@pytest.mark.parametrize(
    ("world", "mode"),
    [
        *((2, mode) for mode in MODES),
        (1, "ddp"),
        *(pytest.param(1, mode, marks=pytest.mark.full) for mode in MODES[1:]),
    ],
)
def test_only_the_calls_of_steps_count(
    request: pytest.FixtureRequest, tmp_path: Path, world: int, mode: str
) -> None:
    """The trial, the warm-up, the evaluation and torch's own buckets call the same code."""
    ranks = request.getfixturevalue({1: "one", 2: "pair"}[world])
    # A single process with fsdp trains the script's own model, which has whole weights.
    hooks = mode != "fsdp" or world == 1
    main = partial(count_calls, step_hooks=hooks)
    spec = trained(ranks, main, tmp_path, dp_mode=mode)
    micro_steps = STEPS * BATCH // MICRO // world
    for rank in range(world):
        calls = json.loads((spec.folder / f"calls{rank}.json").read_text())
        evaluations = calls.pop("evaluations")
        assert evaluations >= 2, "what an evaluation collects in a list stays"
        assert calls.pop("once") == 1
        assert calls.pop("after a step", STEPS) == STEPS
        assert calls.pop("before a step", STEPS) == STEPS
        assert calls.pop("forward hook") == 2 * micro_steps
        assert calls.pop("unused", 0) == 0, "no backward computes a gradient of it"
        assert calls.pop("saved tensor") % micro_steps == 0
        assert "attribute" in calls
        assert "variable" in calls
        if mode != "fsdp" or world == 1:
            assert "gradient" in calls
            assert "accumulated" in calls
        assert calls == dict.fromkeys(calls, micro_steps)


# A moving average of the weights.


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))


def average_of(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> AveragedModel:
    """Return an average that follows the steps of the last optimizer."""
    average = AveragedModel(model, avg_fn=get_ema_avg_fn(0.8))
    optimizers[-1].register_step_post_hook(lambda *_: average.update_parameters(model))
    return average


def optimizers_of(model: Any, several: bool) -> list[torch.optim.Optimizer]:
    if not several:
        return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)]
    return [
        torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9),
        torch.optim.Adam(model[2].parameters(), lr=0.01),
    ]


def fit_average(run: Run, several: bool = False) -> None:
    model = network()
    optimizers = optimizers_of(model, several)
    average = average_of(model, optimizers)
    given = optimizers if several else optimizers[0]
    RuntimeEngine(model, given, run, nn.functional.mse_loss).fit(points(50, 1), points(20, 2))
    torch.save(average.module.state_dict(), run.folder / f"average{run.rank}.pt")


def plain_average(several: bool) -> dict[str, Tensor]:
    torch.manual_seed(1337)
    model = network()
    optimizers = optimizers_of(model, several)
    average = average_of(model, optimizers)
    data = OwnData(points(50, 1), points(20, 2), 1337, BATCH, torch.device("cpu"))
    for step in range(STEPS):
        x, y = data.train_batch(BATCH * step, BATCH)
        nn.functional.mse_loss(model(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return average.module.state_dict()


def averages(spec: RunSpec) -> list[dict[str, Tensor]]:
    return [torch.load(spec.folder / f"average{rank}.pt") for rank in (0, 1)]


@pytest.mark.parametrize(
    ("mode", "several"),
    [*((mode, False) for mode in MODES[:4]), ("zero1", True), ("ddp", True)],
)
def test_an_average_that_follows_the_optimizer_is_that_of_a_plain_loop(
    pair: LastingRanks, tmp_path: Path, mode: str, several: bool
) -> None:
    """Where a rank updates a part of the weights, the hook waits for those of the others."""
    spec = trained(pair, partial(fit_average, several=several), tmp_path, dp_mode=mode)
    expected = plain_average(several)
    for average in averages(spec):
        for name, p in expected.items():
            assert torch.allclose(average[name], p, atol=1e-6), name


@pytest.mark.parametrize(
    "phase",
    [
        "exchange_weights",
        pytest.param("committed", marks=pytest.mark.full),
        pytest.param("exchange_norm", marks=pytest.mark.full),
    ],
)
def test_a_lost_rank_costs_the_others_no_call(
    pair: LastingRanks, tmp_path: Path, phase: str
) -> None:
    """Lost between an update and what follows it, or before it: the survivor's average is exact."""
    whole = trained(pair, fit_average, tmp_path / "whole", dp_mode="zero1")
    faults = f"kill@rank=1,step=3,phase={phase}"
    spec = open_own(tmp_path / "faults", dp_mode="zero1", faults=faults)
    outcome = run_elastic(spec, 2, train=Program(fit_average, frozenset()))
    assert not [rank for rank in outcome.ranks.values() if "error" in rank], outcome
    assert len(outcome.left) == 1
    survivor, expected = averages(spec)[0], averages(whole)[0]
    assert all(torch.equal(survivor[name], expected[name]) for name in expected)


# What a mode cannot call as torch does.


def fit_hooked(run: Run, how: str) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle: Any = None
    if how == "before":
        optimizer.register_step_pre_hook(count)
    elif how == "after":
        optimizer.register_step_post_hook(count)
    elif how == "state_dict":
        optimizer.register_state_dict_post_hook(lambda optimizer, state: state | {"mine": 1})
    elif how == "all":
        handle = register_optimizer_step_post_hook(count)
    else:
        step = optimizer.step
        optimizer.step = lambda closure=None: step()  # type: ignore[method-assign]
    try:
        RuntimeEngine(model, optimizer, run, nn.functional.mse_loss).fit(points(50, 1))
    finally:
        if handle:
            handle.remove()


@pytest.mark.parametrize(
    ("how", "mode", "words"),
    [
        ("before", "zero1", "the hook before the step of SGD"),
        ("after", "fsdp", "leaves no rank the whole weights"),
        ("replaced", "zero2", "the step of this SGD has been replaced"),
        ("all", "zero1", "a hook on the steps of all optimizers"),
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

"""Optimizers and schedulers of a script on several ranks, against a plain loop, with a resume in the
middle; the same ranks run all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import TensorDataset

from nanoray.checkpoint.run_folder import RunSpec
from nanoray.cli.open_folder import open_run
from nanoray.config import make_config
from nanoray.data.dataset import script_data
from nanoray.errors import ConfigError
from nanoray.parallel.rendezvous import Rendezvous
from nanoray.script.data.source import ScriptData
from nanoray.script.engine import RuntimeEngine
from nanoray.script.program import Program
from nanoray.script.run import Run
from nanoray.script.settings import DEFAULTS
from tests.harness import optimizers as styles
from tests.harness import script_runs
from tests.harness.elastic import run_elastic
from tests.harness.lasting_ranks import LastingRanks
from tests.harness.ranks import records, series
from tests.harness.script_runs import final_tensors

STEPS = 8
SETTINGS = script_runs.SETTINGS | {"max_steps": STEPS, "eval_every": 2}
optim = torch.optim


@pytest.fixture(scope="module")
def ranks() -> Iterator[LastingRanks]:
    with LastingRanks(2) as pair:
        yield pair


def points(count: int, seed: int) -> TensorDataset:
    x = torch.randn(count, 3, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))


def groups_of(model: Any) -> list[dict[str, Any]]:
    return [
        {"params": model[0].parameters(), "lr": 0.02},
        {"params": model[2].parameters(), "lr": 0.005},
    ]


def pair(model: Any) -> list[torch.optim.Optimizer]:
    """Two optimizers of different classes, one of which a scheduler moves."""
    return [
        optim.SGD(model[0].parameters(), lr=0.02, momentum=0.9),
        styles.Lion(model[2].parameters(), lr=0.005),
    ]


# How optimizers are made from a model: a function of a module, so that it reaches the ranks.
MADE: dict[str, Callable[[Any], Any]] = {
    "Lion": lambda model: styles.Lion(groups_of(model)),
    "Adagrad": lambda model: optim.Adagrad(groups_of(model)),
    "ASGD": lambda model: optim.ASGD(groups_of(model), t0=2),
    "NAdam": lambda model: optim.NAdam(groups_of(model), decoupled_weight_decay=True),
    "lr of 0": lambda model: optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters(), "lr": 0.1}]
    ),
    "two": pair,
    # Of whole matrices, or with values that cannot be cut.
    "Adafactor": lambda model: optim.Adafactor(model.parameters(), lr=0.1),
    "Muon and AdamW": lambda model: [
        optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.02),
        optim.AdamW([p for p in model.parameters() if p.dim() < 2], lr=0.02),
    ],
    "ScheduleFree": lambda model: styles.ScheduleFree(model.parameters(), lr=0.1),
    "Mixed": lambda model: styles.Mixed(model.parameters()),
    "SGD": lambda model: optim.SGD(groups_of(model), momentum=0.9),
    "AdamW": lambda model: optim.AdamW(groups_of(model)),
    # For a resume with another one.
    "plain Adam": lambda model: optim.Adam(groups_of(model)),
    "plain SGD": lambda model: optim.SGD(groups_of(model)),
    "moved groups": lambda model: optim.SGD(groups_of(model), momentum=0.9),
    "one moved group": lambda model: optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
}
IN_PIECES = (
    "Lion",
    "Adagrad",
    "ASGD",
    "NAdam",
    "lr of 0",
    "two",
)
# One in each mode: state that is there before the first step, averages, numbers besides `step`
EVERYDAY = ("Adagrad", "ASGD", "NAdam")
WHOLE = (
    "Adafactor",
    "Muon and AdamW",
    "ScheduleFree",
    "Mixed",
)

# Schedulers of an optimizer.
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "none": lambda optimizer: None,
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer, max_lr=[0.05, 0.01], total_steps=STEPS
    ),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "function": lambda optimizer: lambda step: 1 / (1 + step),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LinearLR(optimizer, total_iters=3),
            lr_scheduler.ExponentialLR(optimizer, 0.9),
        ],
        milestones=[3],
    ),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(
        optimizer, patience=0, threshold=10.0, factor=0.5
    ),
    "two": lambda optimizer: [
        lr_scheduler.StepLR(optimizer, 2, gamma=0.7),
        lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0),
    ],
}


def steps_of(given: Any, loss: Any) -> None:
    """Step schedulers as a plain loop does; with a loss, those that follow it."""
    for scheduler in given if isinstance(given, list) else [given]:
        follows = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
        if follows and loss is not None:
            scheduler.step(loss)
        elif scheduler is not None and not follows and loss is None:
            scheduler.step()


def plain(optimizer: str, scheduler: str = "none") -> tuple[dict[int, float], dict[str, Tensor]]:
    """Return the rates and the weights of a plain loop in one process."""
    torch.manual_seed(1337)
    model = network()
    made = MADE[optimizer](model)
    several = made if isinstance(made, list) else [made]
    given = SCHEDULERS[scheduler](several[0])
    if scheduler == "function":
        given = lr_scheduler.LambdaLR(several[0], given)
    data = ScriptData(points(50, 1), points(20, 2), 1337, 12, torch.device("cpu"))
    rates = {}
    for step in range(STEPS):
        for each in several:
            getattr(each, "train", lambda: None)()
        x, y = data.train_batch(12 * step, 12)
        nn.functional.mse_loss(model(x), y).backward()
        rates[step + 1] = float(several[0].param_groups[0].get("lr", 0))
        for each in several:
            each.step()
            each.zero_grad()
        steps_of(given, None)
        if (step + 1) % 2 == 0:
            for each in several:
                getattr(each, "eval", lambda: None)()
            with torch.no_grad():
                xv, yv = points(20, 2).tensors
                steps_of(given, nn.functional.mse_loss(model(xv), yv).item())
    return rates, {name: p.detach() for name, p in model.named_parameters()}


def fit(run: Run, optimizer: str, scheduler: str = "none") -> None:
    model = network()
    made = MADE[optimizer](model)
    first = made[0] if isinstance(made, list) else made
    engine = RuntimeEngine(
        model,
        made,
        run,
        nn.functional.mse_loss,
        scheduler=SCHEDULERS[scheduler](first),
        elementwise=optimizer != "Adafactor",
    )
    engine.fit(points(50, 1), points(20, 2))


def open_own(folder: Path, **settings: Any) -> RunSpec:
    values = DEFAULTS | SETTINGS | {"out_dir": str(folder)} | settings
    return open_run(make_config(values), script_data(), time.time())


def trained(
    ranks: LastingRanks, folder: Path, main: Callable[[Run], None], **settings: Any
) -> RunSpec:
    spec = open_own(folder, **settings)
    outcomes = ranks.train(spec, Program(main, frozenset()))
    assert not [outcome for outcome in outcomes if "error" in outcome], outcomes
    return spec


def check(ranks: LastingRanks, folder: Path, optimizer: str, scheduler: str, mode: str) -> None:
    """Train whole and in two parts: equal to the bit; and close to a plain loop."""
    main = partial(fit, optimizer=optimizer, scheduler=scheduler)
    whole = trained(ranks, folder / "whole", main, dp_mode=mode)
    trained(ranks, folder / "parts", main, dp_mode=mode, stop_at=5)
    rest = trained(ranks, folder / "parts", main, dp_mode=mode, resume="auto")
    assert series(rest) == series(whole)
    ours, theirs = final_tensors(rest), final_tensors(whole)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)

    rates, weights = plain(optimizer, scheduler)
    assert series(whole, "train/lr") == pytest.approx(rates, rel=1e-7)
    assert series(rest, "train/lr") == series(whole, "train/lr")
    for name, p in weights.items():
        assert torch.allclose(theirs[name], p, atol=1e-5), name


def in_modes() -> list[Any]:
    """Every optimizer in every mode; without `full`, one of each kind in one mode."""
    cases = []
    for i, optimizer in enumerate(IN_PIECES):
        for j, mode in enumerate(("ddp", "zero1", "fsdp")):
            is_short = optimizer in EVERYDAY and i % 3 == j
            marks = () if is_short else pytest.mark.full
            cases.append(pytest.param(optimizer, mode, marks=marks))
    return cases


@pytest.mark.parametrize(("optimizer", "mode"), in_modes())
def test_an_optimizer_trains_as_a_plain_loop_and_resumes_to_the_bit(
    ranks: LastingRanks, tmp_path: Path, optimizer: str, mode: str
) -> None:
    check(ranks, tmp_path, optimizer, "none", mode)


@pytest.mark.parametrize(
    "optimizer",
    [name if name == "Mixed" else pytest.param(name, marks=pytest.mark.full) for name in WHOLE],
)
def test_an_optimizer_of_whole_parameters_does_so_with_ddp(
    ranks: LastingRanks, tmp_path: Path, optimizer: str
) -> None:
    check(ranks, tmp_path, optimizer, "none", "ddp")


def scheduled() -> list[Any]:
    """Every scheduler in one mode; without `full`, those whose state or steps are of a kind."""
    cases = [("sequential", "zero1"), ("plateau", "ddp"), ("two", "fsdp")]
    marked = [pytest.param(*case) for case in cases]
    for i, name in enumerate(SCHEDULERS):
        case = (name, "zero1" if i % 2 else "ddp")
        if name != "none" and case not in cases:
            marked.append(pytest.param(*case, marks=pytest.mark.full))
    return marked


@pytest.mark.parametrize(("scheduler", "mode"), scheduled())
def test_a_scheduler_is_stepped_saved_and_restored(
    ranks: LastingRanks, tmp_path: Path, scheduler: str, mode: str
) -> None:
    """In a sharded mode it moves the groups that train, and not those of the script alone."""
    check(ranks, tmp_path, "SGD", scheduler, mode)


@pytest.mark.parametrize(
    ("optimizer", "scheduler", "mode"),
    [("Lion", "sequential", "zero1"), pytest.param("Mixed", "none", "ddp", marks=pytest.mark.full)],
)
def test_a_lost_rank_costs_no_bit_of_any_state(
    ranks: LastingRanks, tmp_path: Path, optimizer: str, scheduler: str, mode: str
) -> None:
    """Numbers, values of groups and the scheduler come from the memory of the rank that is left."""
    main = partial(fit, optimizer=optimizer, scheduler=scheduler)
    whole = trained(ranks, tmp_path / "whole", main, dp_mode=mode)
    faults = "kill@rank=0,step=3;kill@rank=1,step=6,phase=backward"
    spec = open_own(tmp_path / "faults", dp_mode=mode, faults=faults)
    outcome = run_elastic(spec, 2, train=Program(main, frozenset()))
    assert not [rank for rank in outcome.ranks.values() if "error" in rank], outcome
    assert len(outcome.left) == 2
    assert series(spec) == series(whole)
    assert series(spec, "train/lr") == series(whole, "train/lr")
    ours, theirs = final_tensors(spec), final_tensors(whole)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_rollback_goes_back_to_the_rates_of_the_checkpoint(
    ranks: LastingRanks, tmp_path: Path
) -> None:
    main = partial(fit, optimizer="Lion", scheduler="cosine")
    settings = {"on_nan": "rollback", "checkpoint_every": 3, "checkpoint_mode": "sync"}
    spec = trained(ranks, tmp_path, main, faults="nan@rank=0,step=6", **settings)
    assert records(spec)[-1]["fault/rollbacks"] == 1
    rates, _ = plain("SGD", "cosine")
    assert series(spec, "train/lr") == pytest.approx(rates, rel=1e-7)
    steps = final_tensors(spec)["step:int.0.weight"]
    assert steps.item() == STEPS, "the step that was rolled back counts once"


# What a resume with another optimizer than the checkpoint's says: mode, the two optimizers, and the text
# of the error ("": it goes on).
ANOTHER: dict[str, tuple[str, str, str, str]] = {
    "another class": ("ddp", "AdamW", "plain Adam", "state of AdamW, and the optimizer is Adam"),
    "the same": ("ddp", "AdamW", "AdamW", ""),
    "momentum gone": ("ddp", "SGD", "plain SGD", "SGD with momentum, and the optimizer is SGD"),
    "momentum new cut": ("zero1", "plain SGD", "SGD", "and the optimizer is SGD with momentum"),
    "other groups": (
        "ddp",
        "moved groups",
        "one moved group",
        "values of 2 parameter groups, but SGD has 1",
    ),
}
EVERYDAY_ANOTHER = ("the same", "momentum gone", "momentum new cut")


@pytest.mark.parametrize(
    "case",
    [c if c in EVERYDAY_ANOTHER else pytest.param(c, marks=pytest.mark.full) for c in ANOTHER],
)
def test_a_resume_with_another_optimizer_is_refused(
    ranks: LastingRanks, tmp_path: Path, case: str
) -> None:
    mode, there, here, error = ANOTHER[case]
    scheduler = "cosine" if "moved" in there else "none"
    first = partial(fit, optimizer=there, scheduler=scheduler)
    trained(ranks, tmp_path, first, dp_mode=mode, stop_at=3)
    spec = open_own(tmp_path, dp_mode=mode, resume="auto")
    main = Program(partial(fit, optimizer=here, scheduler=scheduler), frozenset())
    outcomes = ranks.train(spec, main)
    if not error:
        assert [outcome.get("exit_reason") for outcome in outcomes] == ["finished"] * 2, outcomes
        return
    assert [outcome.get("error") for outcome in outcomes] == ["CheckpointError"] * 2, outcomes
    assert error in outcomes[0]["message"]


def refused(folder: Path, main: Callable[[Run], None], **settings: Any) -> str:
    """Return the text of the ConfigError with which a script is refused before it trains."""
    spec = open_own(folder, **settings)
    run = Run(spec, Rendezvous(), given=frozenset())
    with pytest.raises(ConfigError) as found:
        main(run)
    return str(found.value)


def test_schedulers_that_would_do_nothing_are_refused(tmp_path: Path) -> None:
    def main(run: Run, make: Callable[[Any], Any], give: bool = True, **more: Any) -> None:
        model = network()
        optimizer = optim.SGD(groups_of(model))
        scheduler = make(optimizer)
        given = scheduler if give else None
        engine = RuntimeEngine(model, optimizer, run, nn.functional.mse_loss, scheduler=given)
        engine.fit(points(50, 1), **more)

    one_cycle = partial(lr_scheduler.OneCycleLR, max_lr=0.1)
    for text, make, more in (
        ("a scheduler is attached to SGD, but RuntimeEngine does not have it and would never step",
         partial(one_cycle, total_steps=8), {"give": False}),
        ("ReduceLROnPlateau follows the validation loss, but the run evaluates nothing",
         lr_scheduler.ReduceLROnPlateau, {}),
        ("int does not belong to the optimizer that RuntimeEngine was given", lambda optimizer: 3,
         {}),
        ("StepLR does not belong to the optimizer that RuntimeEngine was given",
         lambda optimizer: lr_scheduler.StepLR(optim.SGD(network().parameters()), 2), {}),
    ):  # fmt: skip
        found = refused(tmp_path, partial(main, make=make, **more))
        assert found.startswith(text), found

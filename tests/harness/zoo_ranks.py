"""Runs of the zoo's modules, all of them on ranks that stay."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from nanoray.checkpoint.resume import newest_valid
from nanoray.checkpoint.run_folder import RunSpec
from nanoray.cli.open_folder import open_run
from nanoray.config import make_config
from nanoray.data.dataset import script_data
from nanoray.script.program import Program
from nanoray.script.settings import DEFAULTS
from tests.harness.lasting_ranks import LastingRanks

SETTINGS: dict[str, Any] = {
    "global_batch_size": 12,
    "micro_batch_size": 0,
    "grad_accum_steps": 2,
    "max_steps": 12,
    "log_every": 4,
    "hash_every": 1,
    "eval_every": 0,
    "checkpoint_every": 0,
    "tensorboard": False,
    "precision": "fp32",
    "bucket_mb": 0.0004,  # some 100 elements, so that every module has several buckets
    "timeout_s": 20,
    "init_timeout_s": 20,
}
# class of torch.optim, and its settings. With weight decay and momentum a gradient of zeros moves
# a weight that should rest.
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("AdamW", {"lr": 0.02, "weight_decay": 0.5, "fused": True}),
    "adamw foreach": ("AdamW", {"lr": 0.02, "weight_decay": 0.5, "foreach": True}),
    "sgd": ("SGD", {"lr": 0.05, "weight_decay": 0.2, "momentum": 0.9}),
}


@dataclass(frozen=True)
class Case:
    """A module of the zoo in one mode. `stops`: the steps at which the run is cut and resumed."""

    exhibit: str
    mode: str
    optimizer: str = "adamw"
    stops: tuple[int, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class Found:
    """What became of a case: its last checkpoint's tensors by name, or what the ranks raised."""

    weights: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)


def run_cases(cases: Sequence[Case], world: int, folder: Path) -> list[Found]:
    """Train all cases, one after the other, in one group of `world` processes."""
    with LastingRanks(world) as ranks:
        return [_run(case, ranks, folder / str(number)) for number, case in enumerate(cases)]


def _run(case: Case, ranks: LastingRanks, folder: Path) -> Found:
    """Train a case in parts, each of which resumes the one before."""
    for part, stop in enumerate((*case.stops, 0)):
        settings = case.settings | {"dp_mode": case.mode, "stop_at": stop}
        spec = _open(folder, settings, resume=part > 0)
        program = Program(partial(train_case, case=case), frozenset(settings))
        failed = [outcome for outcome in ranks.train(spec, program) if "error" in outcome]
        if failed:
            return Found(errors=[f"{each['error']}: {each['message']}" for each in failed])
    newest, _ = newest_valid(spec.checkpoints)
    assert newest is not None
    return Found(newest.state.model, newest.state.optimizer)


def open_case(folder: Path, case: Case) -> RunSpec:
    """Open a new run of a case."""
    return _open(folder, case.settings | {"dp_mode": case.mode}, False)


def _open(folder: Path, settings: dict[str, Any], resume: bool) -> RunSpec:
    more = {"out_dir": str(folder), "resume": "auto" if resume else "none"}
    spec = open_run(make_config(DEFAULTS | SETTINGS | more | settings), script_data(), time.time())
    return replace(spec, lock=None)  # the next part opens the run again


def train_case(run: Any, case: Case) -> None:
    """What a script does: a model, its optimizer, its data."""
    from nanoray.script.engine import RuntimeEngine
    from tests.harness.zoo import BY_NAME

    exhibit = BY_NAME[case.exhibit]
    model = exhibit.model()
    optimizer = make_optimizer(case.optimizer, model)
    RuntimeEngine(model, optimizer, run, exhibit.loss).fit(exhibit.dataset())


def make_optimizer(name: str, model: Any) -> Any:
    """Return an optimizer of OPTIMIZERS."""
    import torch

    kind, settings = OPTIMIZERS[name]
    return getattr(torch.optim, kind)(model.parameters(), **settings)

"""Replicas that rarely communicate, beside a simulation in one process (tests/harness/replicas.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nanoray.run import RunSpec
from nanoray.train.recipe import train
from tests.harness.axes import final
from tests.harness.lasting_ranks import LastingRanks
from tests.harness.ranks import make_spec, series
from tests.harness.replicas import Simulation

RECIPE: dict[str, Any] = {
    "n_layer": 2,
    "max_steps": 9,
    "global_batch_size": 12,
    "precision": "fp32",
    "lr": 0.01,
    "warmup_steps": 2,
    "bucket_mb": 0.02,
    "hash_every": 2,
    "sync_every": 4,
    "log_every": 3,
}
CLOSE = 2e-5
Run = Callable[..., RunSpec]


@pytest.fixture(scope="module")
def ranks() -> Iterator[dict[int, LastingRanks]]:
    """Ranks that stay, by their number; each group is started when it is first used."""
    groups: dict[int, LastingRanks] = {}

    class Groups(dict[int, LastingRanks]):
        def __missing__(self, world: int) -> LastingRanks:
            groups[world] = LastingRanks(world).__enter__()
            self[world] = groups[world]
            return self[world]

    yield Groups()
    for group in groups.values():
        group.__exit__(None, None, None)


@pytest.fixture
def run(ranks: dict[int, LastingRanks], text: Path, tmp_path: Path) -> Run:
    """Train on some ranks, and return the run."""

    def go(world: int, spec: RunSpec | None = None, **settings: Any) -> RunSpec:
        if spec is None:
            folder = settings.pop("folder", f"{len(list(tmp_path.iterdir()))}")
            spec = make_spec(text, tmp_path / folder, **RECIPE | settings)
        outcomes = ranks[world].train(spec, train)
        assert not [outcome for outcome in outcomes if "error" in outcome], outcomes
        return spec

    return go


def simulated(spec: RunSpec, replicas: int, steps: int = 0) -> Simulation:
    simulation = Simulation(spec, replicas)
    simulation.train(steps or spec.config.max_steps)
    return simulation


def distance(spec: RunSpec, simulation: Simulation) -> float:
    """Return the largest difference of a weight from the simulation's anchor."""
    model = final(spec).model
    return max(
        (model[name] - anchor).abs().max().item() for name, anchor in simulation.anchor.items()
    )


SGD = {"optimizer": "sgd", "grad_clip": 0.0, "lr": 0.1}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "adamw with clipping": (2, {}),
    "sgd, three replicas": (3, SGD),
    "accumulation and dropout": (2, {"grad_accum_steps": 3, "dropout": 0.1, "attention": "plain"}),
    "buckets by hand": (2, SGD | {"dp_mode": "ddp_by_hand"}),
    "every step": (3, {"sync_every": 1}),
    "longer than the run": (2, {"sync_every": 50}),
    "no momentum": (3, {"outer_momentum": 0.0, "outer_lr": 1.0}),
}


@pytest.mark.parametrize("case", CASES)
def test_replicas_train_as_the_paper_says(run: Run, case: str) -> None:
    world, settings = CASES[case]
    spec = run(world, **settings)
    simulation = simulated(spec, world)
    assert distance(spec, simulation) <= CLOSE
    losses = series(spec)
    assert losses == pytest.approx({step: simulation.losses[step] for step in losses}, abs=CLOSE)
    assert set(losses) >= {1, 3, 6, 9}

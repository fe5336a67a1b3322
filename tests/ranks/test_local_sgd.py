"""Replicas that rarely communicate, beside a simulation in one process (tests/harness/replicas.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nanoray.checkpoint import files
from nanoray.run import RunSpec
from nanoray.state.train_state import StateDict
from nanoray.train.recipe import train
from tests.harness.axes import equal, final
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


# ---- checkpoints ---------------------------------------------------------------------------------


def saved(spec: RunSpec, replica: int, step: int = 0) -> StateDict:
    """Return what a replica has saved, at the end or after a step."""
    path = files.path_of(spec.checkpoints, step or spec.config.max_steps)
    return files.load(path, replica=replica)


def same(one: RunSpec, other: RunSpec, replicas: int) -> bool:
    """Whether all replicas have ended two runs with the same bits."""
    return all(equal(saved(one, i), saved(other, i)) for i in range(replicas))


RESUMED = {"dropout": 0.1, "attention": "plain", "max_steps": 9, "sync_every": 4}


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_a_run_resumes_at_any_step_of_a_round(run: Run, text: Path, world: int) -> None:
    whole = run(world, folder="whole", **RESUMED)
    for stop in (2, 4, 5):
        first = run(world, folder=f"stopped{stop}", **RESUMED | {"stop_at": stop})
        middle = stop % 4 != 0
        own = [saved(first, replica, stop).optimizer for replica in range(world)]
        assert all(("replica_weights.tok_emb.weight" in each) == middle for each in own)
        assert not equal(saved(first, 0, stop), saved(first, 1, stop)), "each has its own moments"

        again = RESUMED | {"resume": str(first.folder)}
        spec = make_spec(text, first.folder.parent, **RECIPE | again)
        run(world, spec)
        assert spec.folder == first.folder
        assert same(spec, whole, world), stop
        assert series(spec) == pytest.approx(series(whole) | series(spec))
        assert {step: series(spec)[step] for step in series(whole)} == series(whole)


def test_a_checkpoint_between_rounds_fits_any_number_of_replicas(
    run: Run, ranks: dict[int, LastingRanks], text: Path
) -> None:
    """In the middle of a round the replicas differ: no other number of them can go on."""
    first = run(2, folder="first", stop_at=6, checkpoint_every=2, keep_checkpoints=9)
    steps = {step: files.path_of(first.checkpoints, step) for step in (4, 6)}
    for number, (world, settings) in enumerate([(3, {}), (2, {"sync_every": 0})]):
        settings = RECIPE | settings
        for step, path in steps.items():
            folder = first.folder.parent / f"again{number}{step}"
            spec = make_spec(text, folder, **settings | {"resume": str(path)})
            outcomes = ranks[world].train(spec, train)
            if step == 4:
                assert [outcome["step"] for outcome in outcomes] == [9] * world
                continue
            assert {outcome["error"] for outcome in outcomes} == {"CheckpointError"}
            message = outcomes[0]["message"]
            assert "lies in the middle of a round of 2 replicas" in message
            assert message.endswith("a multiple of 4, such as step_00000004")


def test_a_run_that_averaged_gradients_goes_on_with_rounds(run: Run, text: Path) -> None:
    first = run(2, folder="first", sync_every=0, stop_at=3)
    spec = make_spec(text, first.folder.parent / "rounds", **RECIPE | {"resume": str(first.folder)})
    run(2, spec)
    assert saved(spec, 1).meta["outer"]["synced"] == [9]

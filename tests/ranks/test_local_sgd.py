"""Replicas that rarely communicate, beside a simulation in one process (tests/harness/replicas.py)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoray.checkpoint import files
from nanoray.checkpoint.run import RunSpec
from nanoray.faults.progress import ProgressFile
from nanoray.mesh.mesh import Mesh, collectives_started
from nanoray.mesh.rendezvous import Order, Rendezvous
from nanoray.state.outer import Outer
from nanoray.state.state_dict import StateDict
from nanoray.train.rank import train
from nanoray.train.watch.instruments import Instruments
from tests.harness.axes import equal, final
from tests.harness.elastic import run_elastic
from tests.harness.lasting_ranks import LastingRanks, Train
from tests.harness.ranks import make_spec, records, series
from tests.harness.replicas import Simulation
from tests.ranks.test_mirror import deaf

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

    def go(
        world: int, spec: RunSpec | None = None, train: Train = train, **settings: Any
    ) -> RunSpec:
        if spec is None:
            folder = settings.pop("folder", f"{len(list(tmp_path.iterdir()))}")
            spec = make_spec(text, tmp_path / folder, **RECIPE | settings)
        outcomes = ranks[world].train(spec, train)
        assert not [outcome for outcome in outcomes if "error" in outcome], outcomes
        return spec

    return go


def simulated(
    spec: RunSpec, replicas: int, replaced: Collection[tuple[int, int, int]] = (), group: int = 1
) -> Simulation:
    simulation = Simulation(spec, replicas, group)
    simulation.train(spec.config.max_steps, replaced)
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
    "longer than the run": (2, {"sync_every": 50}),
    "fragments in 8 bits": (2, SGD | {"sync_fragments": 3, "sync_bits": 8}),
}


RARE = ("sgd, three replicas", "buckets by hand", "longer than the run")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.full) if case in RARE else case for case in CASES]
)
def test_replicas_train_as_the_paper_says(run: Run, case: str) -> None:
    world, settings = CASES[case]
    spec = run(world, **settings)
    simulation = simulated(spec, world)
    assert distance(spec, simulation) <= CLOSE
    losses = series(spec)
    assert losses == pytest.approx({step: simulation.losses[step] for step in losses}, abs=CLOSE)
    assert set(losses) >= {1, 3, 6, 9}


GROUPS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "zero1": (4, 2, {"replicas": 2, "dp_mode": "zero1"}),
    "fsdp in fragments": (4, 2, {"replicas": 2, "dp_mode": "fsdp", "sync_fragments": 2}),
    "ddp": (4, 2, {"replicas": 2}),
    "tp in 8 bits": (4, 1, {"tp": 2, "sync_bits": 8}),
    "zero2": (4, 2, {"replicas": 2, "dp_mode": "zero2"}),
    "by hand": (4, 2, {"replicas": 2, "dp_mode": "ddp_by_hand", "grad_accum_steps": 3}),
    "pp": (4, 1, {"pp": 2, "dp_mode": "ddp_by_hand", "grad_accum_steps": 3}),
    "cp": (4, 1, {"cp": 2}),
}
OFTEN = ("tp in 8 bits",)


@pytest.mark.full
@pytest.mark.parametrize(
    "case",
    [case if case in OFTEN else pytest.param(case, marks=pytest.mark.full) for case in GROUPS],
)
def test_a_replica_may_be_several_ranks(run: Run, text: Path, case: str) -> None:
    """They train it together as ever, and only their own norm clips it; it resumes in a round."""
    world, group, settings = GROUPS[case]
    settings = {"optimizer": "sgd", "lr": 0.1, "eval_every": 3, **settings}
    spec = run(world, folder="whole", **settings)
    replicas = 2
    simulation = Simulation(spec, replicas, group)
    simulation.train(9)
    # A number of 8 bits is rounded the other way where the last bit of a gradient differs.
    assert distance(spec, simulation) <= (1e-3 if "8 bits" in case else CLOSE)
    losses = series(spec)
    assert losses == pytest.approx({step: simulation.losses[step] for step in losses}, abs=1e-4)

    first = run(world, folder="stopped", **settings | {"stop_at": 6})
    again = RECIPE | settings | {"resume": str(first.folder)}
    resumed = run(world, make_spec(text, first.folder.parent, **again))
    assert same(resumed, spec, replicas)
    assert series(resumed, "val/loss") == series(spec, "val/loss")


def test_rounds_of_one_step_average_the_weights_of_data_parallelism(run: Run) -> None:
    """With plain SGD the mean of the updated weights is the weights updated by the mean."""
    averaged = run(3, **SGD | {"sync_every": 1, "outer_lr": 1.0, "outer_momentum": 0.0})
    plain = run(3, **SGD | {"sync_every": 0})
    one, other = final(averaged).model, final(plain).model
    assert max((one[name] - other[name]).abs().max().item() for name in other) <= CLOSE
    assert series(averaged) == pytest.approx(series(plain), abs=CLOSE)


# ---- meetings ------------------------------------------------------------------------------------


def counting(spec: RunSpec, rendezvous: Rendezvous) -> dict[str, Any]:
    """Train, and write how many collectives this rank had started at the beginning of each step."""
    counts: dict[int, int] = {}
    make = Instruments.__init__

    class Counter:
        def begin_step(self, step: int) -> None:
            counts[step] = collectives_started()

    def counting_too(self: Instruments, instruments: list[object]) -> None:
        make(self, [Counter(), *instruments])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Instruments, "__init__", counting_too)
        outcome = train(spec, rendezvous)
    return outcome | {"counts": [counts[step] for step in sorted(counts)]}


def test_no_collective_leaves_a_replica_between_meetings(
    ranks: dict[int, LastingRanks], text: Path, tmp_path: Path
) -> None:
    spec = make_spec(text, tmp_path, **RECIPE)
    for outcome in ranks[2].train(spec, counting):
        counts = outcome["counts"]
        started = {step: counts[step] - counts[step - 1] for step in range(1, len(counts))}
        # Logged: 1, 3, 6 and 9. Rounds end after 4, 8 and the last one.
        assert {step for step, number in started.items() if number == 0} == {2, 5, 7}


def stopping(spec: RunSpec, rendezvous: Rendezvous) -> dict[str, Any]:
    """Train; rank 1 wants to stop from step 5 on."""

    def wanted() -> Order:
        position = ProgressFile.read(spec.progress(rendezvous.rank))
        wants = rendezvous.rank == 1 and position is not None and position[0] >= 5
        return Order.STOP if wants else Order.GO_ON

    return train(spec, rendezvous, wanted=wanted)


def test_a_stop_takes_effect_where_the_replicas_meet(
    ranks: dict[int, LastingRanks], run: Run, text: Path, tmp_path: Path
) -> None:
    whole = run(2, folder="whole", log_every=9)
    spec = make_spec(text, tmp_path / "stopped", **RECIPE | {"log_every": 9})
    outcomes = ranks[2].train(spec, stopping)
    assert [(o["step"], o["exit_reason"]) for o in outcomes] == [(8, "stopped")] * 2
    again = RECIPE | {"log_every": 9, "resume": str(spec.folder)}
    spec = run(2, make_spec(text, tmp_path / "stopped", **again))
    assert same(spec, whole, 2)


def test_an_evaluation_sees_the_anchor_and_changes_nothing(run: Run) -> None:
    spec = run(2, **SGD | {"eval_every": 2, "log_every": 2, "max_steps": 8})
    losses = series(spec, "val/loss")
    assert losses[6] == losses[4], "in the middle of a round the model is that of its beginning"
    assert losses[8] != losses[6]
    assert distance(spec, simulated(spec, 2)) <= CLOSE


def test_a_step_that_is_not_finite_on_one_replica(
    ranks: dict[int, LastingRanks], run: Run, text: Path, tmp_path: Path
) -> None:
    """It leaves the update out at once; all decide where they meet."""
    fault = {"faults": "nan@rank=1,step=5,phase=forward"}
    spec = make_spec(text, tmp_path / "stop", **RECIPE | fault)
    outcomes = ranks[2].train(spec, train)
    assert {outcome["error"] for outcome in outcomes} == {"TrainingDiverged"}
    assert "at step 5 the loss is nan" in outcomes[0]["message"]
    assert "Not finite on rank 1: own loss nan" in outcomes[0]["message"]

    spec = run(2, **SGD | fault | {"on_nan": "skip", "folder": "skip"})
    simulation = Simulation(spec, 2)
    simulation.left_out = {(5, 1)}
    simulation.train(9)
    assert distance(spec, simulation) <= CLOSE
    assert [record["fault/skipped_steps"] for record in records(spec)] == [0, 0, 0, 0]


def flipping(spec: RunSpec, rendezvous: Rendezvous) -> dict[str, Any]:
    """Train; on rank 1 one bit of the anchor differs after the first round."""
    update = Outer.update

    def flipped(self: Outer, *args: Any) -> None:
        update(self, *args)
        if rendezvous.rank == 1 and self.synced == [4]:
            bits = next(iter(self.anchor.values())).view(torch.int32)
            bits.view(-1)[0] ^= 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Outer, "update", flipped)
        return train(spec, rendezvous)


def test_an_anchor_that_differs_is_found_and_healed(
    ranks: dict[int, LastingRanks], text: Path, tmp_path: Path
) -> None:
    spec = make_spec(text, tmp_path / "two", **RECIPE)
    outcomes = ranks[2].train(spec, flipping)
    assert {outcome["error"] for outcome in outcomes} == {"StateDiverged"}
    spec = make_spec(text, tmp_path / "three", **RECIPE)
    assert not [o for o in ranks[3].train(spec, flipping) if "error" in o]
    assert records(spec)[-1]["fault/healed"] == 1


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
    for stop in (4, 6):
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


@pytest.mark.full
def test_a_run_that_averaged_gradients_goes_on_with_rounds(run: Run, text: Path) -> None:
    first = run(2, folder="first", sync_every=0, stop_at=3)
    spec = make_spec(text, first.folder.parent / "rounds", **RECIPE | {"resume": str(first.folder)})
    run(2, spec)
    assert saved(spec, 1).meta["outer"]["synced"] == [9]


# ---- lost replicas -------------------------------------------------------------------------------

LOST = RECIPE | {"max_steps": 14, "checkpoint_every": 12, "eval_every": 12, "hash_every": 4}


def require_the_simulated(spec: RunSpec, simulation: Simulation) -> None:
    assert distance(spec, simulation) <= CLOSE
    losses = series(spec)
    assert losses == pytest.approx({step: simulation.losses[step] for step in losses}, abs=CLOSE)
    assert [record["step"] for record in records(spec)] == [1, 3, 6, 9, 12, 14], "each once"


@pytest.mark.full
def test_a_lost_replica_costs_its_part_of_a_round(text: Path, tmp_path: Path) -> None:
    """It takes the state of another one where they meet, and counts from the next round on.

    Lost in a step alone, with the loss of a meeting known, in the exchange, in the recovery of an
    earlier loss, and while a checkpoint is written.
    """
    plan = [
        "kill@rank=1,step=2,phase=forward",
        "kill@rank=0,step=6,phase=committed",
        "kill@rank=1,step=8,phase=exchange_rounds",
        "kill@rank=1,step=10,phase=backward",
        "kill@rank=1,step=10,phase=met",
        "kill@rank=0,step=12,phase=checkpoint",
    ]
    spec = make_spec(text, tmp_path, **LOST | {"faults": ";".join(plan)})
    outcome = run_elastic(spec, 2)
    assert not [rank for rank in outcome.ranks.values() if "error" in rank], outcome
    assert len(outcome.left) == len(plan)
    # Meetings: logged steps 3, 6, 9, 12 and ends of rounds 4, 8, 12. The step in progress is
    # repeated, so the replacement begins after the step before the meeting.
    replaced = [(2, 1, 0), (5, 0, 1), (-8, 1, 0), (11, 1, 0), (12, 0, 1)]
    require_the_simulated(spec, simulated(spec, 2, replaced))


@pytest.mark.parametrize("fragments", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_replica_that_is_behind_does_its_own_steps(
    text: Path, tmp_path: Path, fragments: int
) -> None:
    """Rank 2 has not received the verdict of step 6, and the others are after step 7 when they
    notice; it has no less to do, and no bit differs.
    """
    settings = {"sync_fragments": fragments, **SGD}
    spec = make_spec(text, tmp_path, **LOST | settings)
    # Meetings: logged steps 1, 3, 6 and the end of a round, 4.
    outcome = run_elastic(spec, 3, patches={2: partial(deaf, Mesh, "all_reduce", "overflow", 4)})
    assert not [rank for rank in outcome.ranks.values() if "error" in rank], outcome
    assert len(outcome.left) == 1
    require_the_simulated(spec, simulated(spec, 3))
    assert distance(spec, simulated(spec, 3)) == 0.0


SHARDED: dict[str, tuple[int, dict[str, Any]]] = {
    "zero1": (2, {"replicas": 2, "dp_mode": "zero1"}),
    "fsdp": (2, {"replicas": 2, "dp_mode": "fsdp", "sync_fragments": 2}),
    "tp": (1, SGD | {"tp": 2}),
}


@pytest.mark.full
@pytest.mark.parametrize("case", SHARDED)
def test_a_replica_that_shards_its_state_begins_anew(text: Path, tmp_path: Path, case: str) -> None:
    """Its other rank cannot go on without the one that is lost: both take over another replica."""
    group, settings = SHARDED[case]
    plan = "kill@rank=1,step=2,phase=forward;kill@rank=2,step=8,phase=exchange_rounds"
    replaced = [(2, 0, 1), (-8, 1, 0)]
    if "sync_fragments" in settings:
        plan = plan.split(";")[0]
        replaced = replaced[:1]
    spec = make_spec(text, tmp_path, **LOST | settings | {"faults": plan})
    outcome = run_elastic(spec, 4)
    assert not [rank for rank in outcome.ranks.values() if "error" in rank], outcome
    assert len(outcome.left) == len(replaced)
    require_the_simulated(spec, simulated(spec, 2, replaced, group))


@pytest.mark.full
def test_replicas_of_which_each_has_lost_a_rank_start_again(text: Path, tmp_path: Path) -> None:
    plan = "kill@rank=1,step=2,phase=forward;kill@rank=2,step=2,phase=forward"
    settings = {"replicas": 2, "dp_mode": "zero1", "faults": plan}
    outcome = run_elastic(make_spec(text, tmp_path, **LOST | settings), 4)
    assert {rank["error"] for rank in outcome.ranks.values()} == {"StateLost"}
    assert "each replica has lost a rank" in outcome.ranks[0]["message"]

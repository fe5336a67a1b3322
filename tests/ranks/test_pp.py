"""Pipeline parallelism: equal to one process under every schedule, alone and with replicas and
shards.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nanoray.parallel.schedules import SCHEDULES
from tests.harness.axes import Runs, equal, final, require_one_process, run
from tests.harness.ranks import series
from tests.ranks.conftest import Pools
from tests.stress.equivalence import ADAMW, SGD

MODES = ("ddp_by_hand", "zero1", "zero2")


@pytest.mark.parametrize(
    "settings", [SGD, pytest.param(ADAMW, marks=pytest.mark.full)], ids=["sgd", "adamw"]
)
@pytest.mark.parametrize(
    "pp", [2, pytest.param(3, marks=pytest.mark.full), pytest.param(4, marks=pytest.mark.full)]
)
def test_every_schedule_trains_as_one_process_does(
    pools: Pools, pp: int, settings: dict[str, Any]
) -> None:
    """With fewer micro batches than stages, as many, and more; all but interleaved to the same
    bits.
    """
    arms = {kind: {"pp": pp, "pp_schedule": kind, "n_layer": 2 * pp} for kind in SCHEDULES}
    for accum in (1, pp, 6 if pp == 3 else 4):
        able = {kind: own for kind, own in arms.items() if kind != "interleaved" or accum % pp == 0}
        found = run(pools, pp, able, [{"accum": accum, "settings": settings}], alone=True)
        assert len(found) == len(able)
        require_one_process(found, settings)
        digests = {each["arm"]: each["ranks"][0]["digest"] for each in found}
        assert digests["gpipe"] == digests["1f1b"] == digests["zero_bubble"]


@pytest.mark.full
def test_a_pipeline_of_one_mode_and_one_of_parts_train_as_one_process_does(pools: Pools) -> None:
    """dp 2 × pp 2 with shards, and tp 2 × pp 2; zero1 has the bits of the modes by hand."""
    deep = {"pp": 2, "n_layer": 4}
    arms = {
        "zero1": {**deep, "dp_mode": "zero1", "pp_schedule": "zero_bubble"},
        "ddp_by_hand": {**deep, "dp_mode": "ddp_by_hand"},
        "sequence": {**deep, "tp": 2, "sequence_parallel": True},
    }
    found = run(pools, 4, arms, [{"accum": 4, "settings": SGD}], alone=True)
    require_one_process(found, SGD)
    digests = {each["arm"]: each["ranks"][0]["digest"] for each in found}
    assert digests["ddp_by_hand"] == digests["zero1"]


@pytest.mark.full
@pytest.mark.parametrize("settings", [SGD, ADAMW], ids=["sgd", "adamw"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_pipeline_of_replicas_and_of_shards(
    pools: Pools, bias: bool, settings: dict[str, Any]
) -> None:
    """dp 2 × pp 2 in every mode and schedule, and tp 2 × pp 2; by hand and zero1 agree to the bit."""
    deep = {"pp": 2, "n_layer": 4}
    arms = {mode: {**deep, "dp_mode": mode} for mode in MODES}
    arms |= {f"{mode} interleaved": {**arms[mode], "pp_schedule": "interleaved"} for mode in MODES}
    arms |= {
        kind: {**deep, "dp_mode": "zero1", "pp_schedule": kind} for kind in ("gpipe", "zero_bubble")
    }
    for kind in ("1f1b", "zero_bubble"):
        arms[f"tp {kind}"] = {**deep, "tp": 2, "pp_schedule": kind}
        arms[f"sequence {kind}"] = {**arms[f"tp {kind}"], "sequence_parallel": True}
    found = run(pools, 4, arms, [{"accum": 4, "settings": settings | {"bias": bias}}], alone=True)
    require_one_process(found, settings)
    digests = {each["arm"]: each["ranks"][0]["digest"] for each in found}
    assert digests["ddp_by_hand"] == digests["zero1"] == digests["gpipe"] == digests["zero_bubble"]
    assert digests["tp 1f1b"] == digests["tp zero_bubble"]
    assert digests["sequence 1f1b"] == digests["sequence zero_bubble"]
    assert digests["ddp_by_hand interleaved"] == digests["zero1 interleaved"]


def test_a_stage_keeps_its_layers_only(pools: Pools) -> None:
    arms = {
        "pp 4": {"pp": 4, "n_layer": 8},
        "pp 2 × zero1": {"pp": 2, "n_layer": 8, "dp_mode": "zero1"},
    }
    for each in run(
        pools, 4, arms, [{"accum": 1, "settings": ADAMW | {"n_embd": 32, "n_layer": 8}}]
    ):
        held = [rank["state_elements"] for rank in each["ranks"]]
        whole = 2 * each["ranks"][0]["elements"]
        assert max(held) < whole / 4 * 1.3, each["arm"]
        assert whole <= sum(held) < 1.2 * whole, "the tied embedding twice"


@pytest.mark.full
@pytest.mark.parametrize("schedule", [pytest.param("1f1b", marks=pytest.mark.full), "interleaved"])
def test_activation_checkpointing_changes_no_bit_in_a_pipeline(pools: Pools, schedule: str) -> None:
    hows = ("none", "selective", "block")
    deep = {"n_layer": 4, "dropout": 0.3}
    settings = [ADAMW | deep | {"activation_checkpointing": how} for how in hows]
    arm = {"pp": {"pp": 2, "pp_schedule": schedule}}
    found = run(pools, 2, arm, [{"accum": 4, "settings": s} for s in settings])
    assert len({rank["digest"] for each in found for rank in each["ranks"]}) == 1


# The whole program: the loop, checkpoints, resume.

RECIPE: dict[str, Any] = {
    "n_layer": 4,
    "n_head": 4,
    "max_steps": 6,
    "global_batch_size": 24,
    "grad_accum_steps": 4,
    "precision": "fp32",
    "bias": True,
}


@pytest.fixture
def runs(text: Path, tmp_path: Path) -> Runs:
    return Runs(text, tmp_path, RECIPE)


@pytest.mark.full
@pytest.mark.parametrize(
    "schedules",
    [("1f1b", "zero_bubble"), pytest.param(tuple(SCHEDULES), marks=pytest.mark.full)],
    ids=["two", "all"],
)
def test_dropout_is_that_of_one_process_under_schedules(
    runs: Runs, schedules: tuple[str, ...]
) -> None:
    """Also evaluation, whose last batch has another shape, and the norm: logged by a rank that has
    no loss itself.
    """
    settings = {"dropout": 0.3, "eval_every": 3, "eval_samples": 8}
    alone = runs.trained("alone", 1, **settings)
    found = []
    for schedule in schedules:
        spec = runs.trained(schedule, 2, pp=2, pp_schedule=schedule, hash_every=2, **settings)
        assert series(spec) == pytest.approx(series(alone), abs=2e-5)
        assert series(spec, "val/loss") == pytest.approx(series(alone, "val/loss"), abs=2e-5)
        assert series(spec, "train/grad_norm") == pytest.approx(
            series(alone, "train/grad_norm"), rel=1e-4
        )
        found.append(spec)
    by_name = dict(zip(schedules, found, strict=True))
    for schedule in {"gpipe", "zero_bubble"} & {*schedules}:
        assert equal(final(by_name[schedule]), final(by_name["1f1b"])), schedule
    without = runs.trained("without", 1, **settings | {"dropout": 0.0})
    assert series(without) != pytest.approx(series(alone), abs=1e-3), "dropout matters"


@pytest.mark.parametrize(
    ("settings", "world"),
    [
        pytest.param({"dp_mode": "zero1", "pp_schedule": "zero_bubble"}, 4, marks=pytest.mark.full),
        ({"pp_schedule": "interleaved"}, 2),
    ],
)
def test_a_pipeline_resumes_to_the_bit(runs: Runs, settings: dict[str, Any], world: int) -> None:
    runs.resumed(world, 4, **{"pp": 2, "dropout": 0.1, **settings})


MESHES = [  # workers, settings
    (2, {"pp": 2}),
    (2, {"tp": 2}),
    (4, {"pp": 4, "pp_schedule": "gpipe"}),
    (3, {"dp_mode": "zero1"}),
    (4, {"pp": 2, "dp_mode": "zero2"}),
    (4, {"pp": 2, "tp": 2}),
    (1, {}),
]


@pytest.mark.full
def test_a_run_goes_on_over_many_meshes(runs: Runs) -> None:
    alone = runs.trained("alone", 1, max_steps=8)
    for stop, (world, settings) in enumerate(MESHES, 1):
        more = {"grad_accum_steps": 0, "micro_batch_size": 0} if world == 3 else {}
        spec = runs.trained(
            "run", world, stop_at=stop, resume="auto", max_steps=8, **settings, **more
        )
    assert len([*spec.folder.parent.iterdir()]) == 1, "all in one run"
    for step, loss in series(spec).items():
        assert loss == pytest.approx(series(alone)[step], abs=2e-5)
    assert {*series(spec)} == {*range(1, len(MESHES) + 1)}


def test_a_step_that_is_not_finite_is_named_with_its_stage(runs: Runs) -> None:
    _, message = runs.failed(2, "TrainingDiverged", pp=2, faults="nan@rank=1,step=4")
    assert "at step 4 the loss is nan" in message

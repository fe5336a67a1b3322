"""Tensor, pipeline and expert parallelism with two replicas: a lost rank's part comes from the
other's memory.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from nanoray.checkpoint.run_folder import recovers_in_place
from nanoray.config import make_config
from tests.harness.axes import equal, final
from tests.harness.elastic import run_elastic
from tests.harness.ranks import TINY, make_spec, records, run_ranks, series
from tests.ranks.test_mirror import (
    NORM,
    RECIPE,
    Clean,
    clean,
    deaf,
    ended_well,
    fired,
    spoil_the_mirror,
)

__all__ = ["clean"]  # the fixture

PLAN = [
    "forward",
    "backward",
    "optimizer",
    "exchange_norm",
    "committed",
    "log",
    "eval",
    "checkpoint",
]
STEPS = [2, 3, 3, 4, 5, 6, 8, 8]
EXPERTS = {"ep": 2, "experts": 4, "expert_hidden": 32, "shared_experts": 1}
INTERLEAVED = {
    "pp": 2,
    "pp_schedule": "interleaved",
    "n_layer": 4,
    "dp_mode": "ddp_by_hand",
    "grad_accum_steps": 2,
}


@pytest.mark.full
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"tp": 2}, marks=pytest.mark.full),
        {"pp": 2, "dp_mode": "ddp_by_hand", "grad_accum_steps": 2},
        pytest.param(INTERLEAVED, marks=pytest.mark.full),
        pytest.param(
            {"tp": 2, "dp_mode": "ddp_by_hand", "optimizer": "sgd", "momentum": 0.9},
            marks=pytest.mark.full,
        ),
        pytest.param({"tp": 2, "dp_mode": "zero1"}, marks=pytest.mark.full),
        pytest.param({"tp": 2, "dp_mode": "fsdp"}, marks=pytest.mark.full),
        pytest.param({"pp": 2, "dp_mode": "zero2", "grad_accum_steps": 2}, marks=pytest.mark.full),
        pytest.param(INTERLEAVED | {"dp_mode": "zero1"}, marks=pytest.mark.full),
        pytest.param(EXPERTS | {"dp_mode": "ddp_by_hand"}, marks=pytest.mark.full),
        pytest.param(EXPERTS | {"dp_mode": "zero2", "grad_accum_steps": 2}, marks=pytest.mark.full),
    ],
    ids=[
        *(
            "tp",
            "pp",
            "interleaved",
            "tp by hand",
            "tp zero1",
            "tp fsdp",
            "pp zero2",
            "interleaved zero1",
        ),
        *("ep by hand", "ep zero2"),
    ],
)
def test_a_rank_is_lost_anywhere_in_a_step(
    text: Path, tmp_path: Path, clean: Clean, settings: dict[str, Any]
) -> None:
    """dp 2 x tp 2, dp 2 x pp 2, dp 4 x ep 2: a fault in each of eight places of a run, on every
    rank twice.
    """
    places = zip(range(8), STEPS, PLAN, strict=True)
    plan = ";".join(f"kill@rank={i % 4},step={step},phase={place}" for i, step, place in places)
    spec = make_spec(text, tmp_path, **RECIPE | settings | {"faults": plan})
    outcome = run_elastic(spec, 4, timeout_s=300)
    assert not [rank for rank in outcome.ranks.values() if "error" in rank], outcome
    assert fired(spec) == PLAN, "each, once"
    ended_well(spec, outcome, clean(4, **settings), len(PLAN))


@pytest.mark.full
@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (2, {"dp_mode": "zero1"}),
        *(
            pytest.param(4, {"dp_mode": m}, marks=pytest.mark.full)
            for m in ("zero1", "zero2", "ddp_by_hand")
        ),
        pytest.param(4, {"dp_mode": "zero1", "tp": 2}, marks=pytest.mark.full),
        pytest.param(
            4, {"dp_mode": "zero2", "pp": 2, "grad_accum_steps": 2}, marks=pytest.mark.full
        ),
    ],
)
def test_experts_of_a_lost_rank_are_on_another_one(
    text: Path, tmp_path: Path, clean: Clean, world: int, settings: dict[str, Any]
) -> None:
    """ep 2: the others wait for tokens of rank 1, later for the norm, when all gradients are in two
    places.

    With two data ranks each expert is trained on one of them, and the other one keeps a copy.
    """
    settings, plan = EXPERTS | settings, "kill@rank=1,step=3,phase=exchange_tokens"
    plan += f";kill@rank={world - 2},step=5,phase=exchange_norm"
    spec = make_spec(text, tmp_path, **RECIPE | settings | {"faults": plan})
    outcome = run_elastic(spec, world, timeout_s=200)
    assert fired(spec) == ["exchange_tokens", "exchange_norm"]
    ended_well(spec, outcome, clean(world, **settings), 2)


@pytest.mark.full
def test_a_step_that_one_rank_has_done_is_finished_by_the_others(
    text: Path, tmp_path: Path, clean: Clean
) -> None:
    """Rank 0 dies after the norm of step 5; of the others only rank 3 has heard it. Ranks 1 and 2
    finish the step.
    """
    spec = make_spec(text, tmp_path, **RECIPE | {"tp": 2, "faults": "kill@rank=0,step=5,phase=log"})
    patches = dict.fromkeys((1, 2), deaf_to_the_norm)
    outcome = run_elastic(spec, 4, patches=patches, timeout_s=200)
    ended_well(spec, outcome, clean(4, tp=2), 1)
    logs = [spec.log(rank).read_text() for rank in range(4)]
    assert ["finished step 5, which rank 3 had done" in log for log in logs] == [
        False,
        True,
        True,
        False,
    ]


def deaf_to_the_norm() -> None:
    deaf(*NORM, 5)


def test_a_part_that_is_gone_with_both_replicas_means_a_restart(text: Path, tmp_path: Path) -> None:
    """Ranks 0 and 2 have the same part. Nobody goes on with weights that were made up."""
    faults = "kill@rank=0,step=5,phase=forward;kill@rank=2,step=5,phase=forward"
    spec = make_spec(text, tmp_path, **RECIPE | {"tp": 2, "faults": faults})
    outcome = run_elastic(spec, 4, timeout_s=200)
    assert {rank.get("error") for rank in outcome.ranks.values()} == {"StateLost"}, outcome
    assert "are in the memory of none of these ranks" in outcome.ranks[1]["message"]


@pytest.mark.full
def test_a_rank_and_its_mirror_are_lost_together(text: Path, tmp_path: Path) -> None:
    """Ranks 1 and 3 mirror each other: they are the data axis of their part."""
    faults = "kill@rank=1,step=5,phase=forward;kill@rank=3,step=5,phase=forward"
    spec = make_spec(text, tmp_path, **RECIPE | {"tp": 2, "dp_mode": "fsdp", "faults": faults})
    outcome = run_elastic(spec, 4, timeout_s=200)
    assert {rank.get("error") for rank in outcome.ranks.values()} == {"StateLost"}, outcome


@pytest.mark.full
def test_a_mirror_of_a_cut_model_that_differs_is_found(text: Path, tmp_path: Path) -> None:
    spec = make_spec(text, tmp_path, **RECIPE | {"tp": 2, "dp_mode": "zero1"})
    outcome = run_elastic(spec, 4, patches={1: spoil_the_mirror})
    assert {rank["error"] for rank in outcome.ranks.values()} == {"StateDiverged"}
    assert "of rank 3 and its mirror on rank 1" in outcome.ranks[2]["message"]


@pytest.mark.full
@pytest.mark.parametrize(
    "settings",
    [
        {"tp": 2, "dp_mode": "zero2"},
        {"tp": 2, "dp_mode": "fsdp"},
        EXPERTS | {"dp_mode": "zero2"},
        EXPERTS | {"dp_mode": "zero1", "ep": 4},
        EXPERTS | {"dp_mode": "ddp_by_hand"},
    ],
)
def test_a_step_that_one_rank_of_a_sharded_replica_has_done_is_finished(
    text: Path, tmp_path: Path, clean: Clean, settings: dict[str, Any]
) -> None:
    spec = make_spec(
        text, tmp_path, **RECIPE | settings | {"faults": "kill@rank=0,step=5,phase=log"}
    )
    outcome = run_elastic(spec, 4, patches=dict.fromkeys((1, 2), deaf_to_the_norm), timeout_s=200)
    ended_well(spec, outcome, clean(4, **settings), 1)
    logs = [spec.log(rank).read_text() for rank in range(4)]
    assert ["finished step 5, which rank 3 had done" in log for log in logs] == [
        False,
        True,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("lost", "left", "settings"),
    [
        (1, [0, 3], {"tp": 2}),
        pytest.param(
            1,
            [0, 2],
            {"pp": 2, "dp_mode": "ddp_by_hand", "grad_accum_steps": 2},
            marks=pytest.mark.full,
        ),
        # Each has the part that the other one will get
        pytest.param(0, [1, 2], {"tp": 2}, marks=pytest.mark.full),
        pytest.param(0, [1, 2], {"tp": 2, "dp_mode": "zero1"}, marks=pytest.mark.full),
        pytest.param(2, [0, 3], {"tp": 2, "dp_mode": "fsdp"}, marks=pytest.mark.full),
        pytest.param(
            0, [1, 2], {"pp": 2, "dp_mode": "zero2", "grad_accum_steps": 2}, marks=pytest.mark.full
        ),
        pytest.param(0, [1, 2], EXPERTS | {"dp_mode": "ddp_by_hand"}, marks=pytest.mark.full),
        pytest.param(1, [0, 3], EXPERTS | {"dp_mode": "zero1"}, marks=pytest.mark.full),
    ],
    ids=[
        "tp",
        "pp",
        "tp other parts",
        "tp zero1",
        "tp fsdp",
        "pp zero2",
        "ep other parts",
        "ep zero1",
    ],
)
def test_a_whole_replica_goes_on_as_one_that_began_so(
    text: Path, tmp_path: Path, lost: int, left: list[int], settings: dict[str, Any]
) -> None:
    """A rank of two replicas dies in step 5 and nobody replaces it. Two ranks that hold all parts
    between them go on.

    From there on each bit is that of a run on two ranks from the checkpoint of step 4.
    """
    settings = RECIPE | settings | {"recovery": "shrink", "checkpoint_mode": "sync"}
    spec = make_spec(
        text,
        tmp_path / "shrunk",
        **settings | {"faults": f"kill@rank={lost},step=5,phase=backward"},
    )
    outcome = run_elastic(spec, 4, groups=[left], timeout_s=200)
    assert fired(spec) == ["backward"]
    assert [rank["step"] for rank in outcome.ranks.values() if "step" in rank] == [8, 8], outcome
    assert [record["step"] for record in records(spec)] == [*range(1, 9)]
    shutil.copytree(spec.checkpoints / "step_00000004", tmp_path / "step_00000004")
    micro = (6 if "ep" in settings else 12) // settings.get("grad_accum_steps", 1)
    small = {
        "resume": str(tmp_path / "step_00000004"),
        "micro_batch_size": micro,
        "grad_accum_steps": 0,
    }
    began = make_spec(text, tmp_path / "began", **settings | small)
    assert not [rank for rank in run_ranks(began, 2) if "error" in rank]
    assert {step: loss for step, loss in series(spec).items() if step > 4} == series(began)
    assert equal(final(spec), final(began))


@pytest.mark.full
@pytest.mark.parametrize(
    "settings",
    [
        {"tp": 2},
        {"tp": 2, "dp_mode": "zero1"},
        {"tp": 2, "dp_mode": "fsdp"},
        EXPERTS | {"dp_mode": "zero1"},
    ],
)
def test_the_group_shrinks_by_a_replica_and_grows(
    text: Path, tmp_path: Path, clean: Clean, settings: dict[str, Any]
) -> None:
    """dp 2 x tp 2 or dp 4 x ep 2, then one replica, then two again, of which new processes are
    three ranks.
    """
    settings = settings | {"dropout": 0.0}
    faults = "kill@rank=1,step=3,phase=backward"
    spec = make_spec(text, tmp_path, **RECIPE | settings | {"recovery": "shrink", "faults": faults})
    outcome = run_elastic(spec, 4, groups=[[0, 3]], grow_at=6, timeout_s=200)
    assert not [
        rank for rank in outcome.ranks.values() if "error" in rank and rank["error"] != "Died"
    ], outcome
    assert outcome.left[1] == ["the driver ordered a new group"] * 2
    assert [record["step"] for record in records(spec)] == [*range(1, 9)]
    assert series(spec) == pytest.approx(series(clean(4, **settings)), abs=2e-5), (
        "sums in another order, and no more"
    )


@pytest.mark.parametrize(
    ("settings", "ranks", "in_place"),
    [
        ({"tp": 2}, 4, True),
        ({"pp": 2, "dp_mode": "ddp_by_hand"}, 4, True),
        ({"tp": 2}, 2, False),  # there is no other replica
        ({"tp": 2, "dp_mode": "zero1"}, 4, True),
        ({"tp": 2, "dp_mode": "fsdp"}, 4, True),
        ({"pp": 2, "dp_mode": "zero2"}, 4, True),
        ({"pp": 2, "dp_mode": "zero2"}, 2, False),
        ({"tp": 2, "dp_mode": "zero1", "mirror": "off"}, 4, False),
        ({"tp": 2, "dp_mode": "zero1", "recovery": "shrink"}, 4, True),
        ({"tp": 2, "recovery": "shrink"}, 4, True),
        ({"tp": 2, "recovery": "shrink"}, 2, False),
        ({"ep": 2, "experts": 2, "dp_mode": "ddp_by_hand", "recovery": "shrink"}, 4, True),
        ({"ep": 2, "experts": 2, "dp_mode": "zero1"}, 4, True),
        ({"ep": 2, "experts": 2, "dp_mode": "zero1", "mirror": "off"}, 4, False),
        ({"ep": 2, "experts": 2, "dp_mode": "ddp_by_hand"}, 2, False),  # each expert is on one rank
        ({"ep": 2, "experts": 2, "dp_mode": "zero1"}, 2, True),
        ({"ep": 2, "experts": 2, "tp": 2, "dp_mode": "zero1"}, 4, True),
        ({"tp": 2, "recovery": "restart"}, 4, False),
        ({}, 2, True),
    ],
)
def test_who_is_replaced_in_place(settings: dict[str, Any], ranks: int, in_place: bool) -> None:
    config = make_config(TINY | {"n_layer": 2, "n_head": 2} | settings)
    assert recovers_in_place(config, "gloo", ranks) == in_place
    assert not recovers_in_place(config, "nccl", ranks)
    asked = config.model_copy(update={"abort_nccl": True})
    assert recovers_in_place(asked, "nccl", ranks) == (in_place and not config.sharded)

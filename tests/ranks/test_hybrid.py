"""Hybrid sharding: groups of ranks that shard the state hold the same, and mirror each other."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoray.checkpoint.state.train_state import TrainState
from nanoray.train import engine
from nanoray.train.guard import replicas
from tests.harness.axes import equal, final, require_one_process, run
from tests.harness.elastic import run_elastic
from tests.harness.ranks import make_spec, records, run_ranks, series
from tests.ranks import test_own_models
from tests.ranks.conftest import Pools
from tests.ranks.planted_hybrid import BUGS
from tests.ranks.test_mirror import (
    NORM,
    OVERFLOW,
    RECIPE,
    SPREAD,
    Clean,
    clean,
    deaf,
    ended_well,
    fired,
)
from tests.stress import equivalence
from tests.stress.equivalence import ADAMW, LIMITS, LOSS, SGD, WEIGHT_LIMIT

__all__ = ["clean"]  # the fixture

MODES = ("zero1", "zero2", "fsdp")
BUGGY = "tests.ranks.planted_hybrid:measure_with_bugs"


def arms_of(groups: int, *modes: str, **more: Any) -> dict[str, dict[str, Any]]:
    """Return an arm for each mode."""
    return {mode: {"dp_mode": mode, "replicas": groups, **more} for mode in modes or MODES}


# The same training in every mode.


@pytest.mark.parametrize(
    ("settings", "accum"),
    [(SGD, 1), pytest.param(ADAMW, 2, marks=pytest.mark.full)],
    ids=["sgd", "adamw"],
)
@pytest.mark.parametrize(
    ("ranks", "groups"),
    [
        (4, 2),
        # Three groups, whose slices do not divide by three; and groups of three
        *(pytest.param(*case, marks=pytest.mark.full) for case in ((6, 3), (6, 2))),
    ],
)
def test_groups_train_as_one_process_does(
    pools: Pools, ranks: int, groups: int, settings: dict[str, Any], accum: int
) -> None:
    """All ranks of all groups have the same bits, and with SGD so have all modes."""
    found = run(pools, ranks, arms_of(groups), [{"accum": accum, "settings": settings}], alone=True)
    require_one_process(found, settings)

    # zero2 sums micro batches last; AdamW rounds the last elements of a tensor otherwise.
    digests = {each["ranks"][0]["digest"] for each in found}
    if settings == SGD:
        assert len(digests) == 1

    # A rank keeps 1/S of the optimizer's state and of the gradients.
    group = ranks // groups
    for each in found:
        elements = each["ranks"][0]["elements"]
        kept = {rank["gradient_elements"] for rank in each["ranks"]}
        assert max(kept) < elements / group + 0.05 * elements, each["arm"]
        states = sum(rank["state_elements"] for rank in each["ranks"])
        assert states == (2 * elements * groups if settings == ADAMW else 0), each["arm"]


TENSOR = {"tp 2 " + mode: {"dp_mode": mode, "replicas": 2, "tp": 2} for mode in MODES}
STAGES = {
    "pp 2 " + mode: {"dp_mode": mode, "replicas": 2, "pp": 2, "n_layer": 4} for mode in MODES[:2]
}
PARTS = {"cp 2 " + mode: {"dp_mode": mode, "replicas": 2, "cp": 2} for mode in MODES}


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "arms"), [(8, TENSOR | STAGES), (4, PARTS)], ids=["tp and pp", "cp"]
)
def test_groups_train_as_one_process_does_beside_other_axes(
    pools: Pools, ranks: int, arms: dict[str, Any]
) -> None:
    """Two groups of two data ranks with tp and pp; with cp a group is the two parts of a sequence."""
    for settings, accum in ((SGD, 2), (ADAMW, 2)):
        found = run(pools, ranks, arms, [{"accum": accum, "settings": settings}], alone=True)
        require_one_process(found, settings)


@pytest.mark.full
def test_a_planted_bug_makes_it_red(pools: Pools) -> None:
    """In both ways to send slices; without the bugs these arms are right (above)."""
    order = {
        "arms": arms_of(2, "zero2", "fsdp"),
        "cases": [{"accum": 1, "settings": SGD}],
        "alone": True,
    }
    wrong: dict[str, set[str]] = {}
    for each in pools(4).run(BUGGY, order):
        bug = each["arm"].split()[0]
        metrics = wrong.setdefault(each["arm"], set())
        for rank in each["ranks"]:
            alone = rank["alone"]
            if rank["off"] > WEIGHT_LIMIT["sgd"]:
                metrics.add("weight")
            if rank["losses"] != pytest.approx(alone["losses"], abs=LIMITS[LOSS]):
                metrics.add("loss")
            if rank["norms"] != pytest.approx(alone["norms"], rel=LIMITS[equivalence.NORM]):
                metrics.add("norm")
        if bug == "every_group_counts":  # without clipping it shows in the norm alone
            assert metrics == {"norm"}, each["arm"]
        else:
            assert metrics >= {"weight", "norm"}, each["arm"]
    assert len(wrong) == 2 * len(BUGS)


# A rank is lost: its share is in the memory of its twin. Ranks 0 and 2 are twins, 1 and 3.

# Where ranks are killed, one recovery after the other: by step, ranks, and point.
PLACES: list[tuple[int, tuple[int, ...], str]] = [
    (2, (0,), "forward"),
    (3, (1, 2), "across_groups"),  # of both groups, and no twins
    (4, (3,), "exchange_norm"),
    (5, (1,), "committed"),
    # The next two are of the process that replaces rank 1.
    (5, (1,), "met"),
    (5, (1,), "caught_up"),
    (6, (0,), "exchange_weights"),
    (7, (2, 3), "backward"),  # a whole group, such as a node
    (8, (3,), "eval"),
    (8, (0,), "checkpoint"),
]


EVERYDAY = [PLACES[1], PLACES[7]]  # a pair that are no twins, and a whole group


@pytest.mark.full
@pytest.mark.parametrize(
    ("settings", "places"),
    [
        pytest.param({"dp_mode": "zero2", "grad_accum_steps": 2}, EVERYDAY, id="two places"),
        *(
            pytest.param(
                {"dp_mode": mode, **more}, PLACES, marks=pytest.mark.full, id=f"{mode} {more}"
            )
            for mode, more in (
                ("zero2", {"grad_accum_steps": 2}),
                ("zero1", {}),
                ("fsdp", {}),
                ("zero1", {"precision": "fp16"}),
                ("fsdp", {"fsdp_reshard": "grad_op"}),
            )
        ),
    ],
)
def test_ranks_are_lost_anywhere_in_a_step(
    text: Path,
    tmp_path: Path,
    clean: Clean,
    settings: dict[str, Any],
    places: list[tuple[int, tuple[int, ...], str]],
) -> None:
    """On both sides of the commit point, alone and in pairs, and while they recover: no step is
    repeated, and no bit differs from a run without a fault.
    """
    settings = settings | {"replicas": 2}
    phases = []
    faults = []
    for step, ranks, phase in places:
        if phase == "exchange_weights":
            phase = SPREAD[settings["dp_mode"]]
        phases += [phase] * len(ranks)
        faults += [f"kill@rank={rank},step={step},phase={phase}" for rank in ranks]
    spec = make_spec(text, tmp_path, **RECIPE | settings | {"faults": ";".join(faults)})
    outcome = run_elastic(spec, 4)
    assert fired(spec) == phases, "each, once"
    ended_well(spec, outcome, clean(4, **settings), len(places))


@pytest.mark.full
@pytest.mark.parametrize(
    ("world", "axes"),
    [
        (8, {"tp": 2, "dp_mode": "zero1"}),
        (8, {"tp": 2, "dp_mode": "fsdp"}),
        (8, {"pp": 2, "dp_mode": "zero2", "grad_accum_steps": 2}),
        (4, {"cp": 2, "dp_mode": "zero1", "dropout": 0.0}),
        (4, {"cp": 2, "dp_mode": "fsdp", "dropout": 0.0}),
    ],
    ids=str,
)
def test_ranks_that_share_more_than_a_state_are_lost(
    text: Path, tmp_path: Path, clean: Clean, world: int, axes: dict[str, Any]
) -> None:
    """With other axes a twin is the rank of the same place on them, in the other group."""
    settings = axes | {"replicas": 2}
    places = [(2, 0, "forward"), (3, 3, "across_groups"), (5, 1, "committed"), (7, 2, "backward")]
    faults = [f"kill@rank={rank},step={step},phase={phase}" for step, rank, phase in places]
    spec = make_spec(text, tmp_path, **RECIPE | settings | {"faults": ";".join(faults)})
    outcome = run_elastic(spec, world)
    assert fired(spec) == [phase for _, _, phase in places]
    ended_well(spec, outcome, clean(world, **settings), len(places))


@pytest.mark.full
def test_a_rank_and_its_twin_are_lost_together(text: Path, tmp_path: Path) -> None:
    """Their share is in no other memory: the run goes on from the checkpoint."""
    plan = "kill@rank=1,step=3,phase=forward;kill@rank=3,step=3,phase=forward"
    settings = {"dp_mode": "fsdp", "replicas": 2, "faults": plan}
    outcome = run_elastic(make_spec(text, tmp_path, **RECIPE | settings), 4)
    assert {rank["error"] for rank in outcome.ranks.values()} == {"StateLost"}
    message = outcome.ranks[0]["message"]
    assert "the rank that owned them is gone, and so is each that mirrored" in message


@pytest.mark.parametrize(
    ("missed", "settings"),
    [
        pytest.param(NORM, {"dp_mode": "zero1", "replicas": 2}, marks=pytest.mark.full),
        pytest.param(
            OVERFLOW,
            {"dp_mode": "fsdp", "replicas": 2, "precision": "fp16"},
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_step_that_one_rank_has_done_is_finished_by_the_others(
    text: Path, tmp_path: Path, clean: Clean, missed: Any, settings: dict[str, Any]
) -> None:
    """Rank 0 has done step 5 and dies, and of the others only rank 3 has: its twin rank 1, of the
    other group, finishes the step, and so does rank 2, which has the lost share.
    """
    plan = f"kill@rank=0,step=5,phase={SPREAD[settings['dp_mode']]}"
    spec = make_spec(text, tmp_path, **RECIPE | settings | {"faults": plan})
    outcome = run_elastic(spec, 4, patches={rank: partial(deaf, *missed, 5) for rank in (1, 2)})
    ended_well(spec, outcome, clean(4, **settings), 1)
    logs = [spec.log(rank).read_text() for rank in range(4)]
    finished = ["finished step 5, which rank 3 had done" in log for log in logs]
    assert finished == [False, True, True, False]


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
def test_a_run_that_shrinks_drops_whole_groups(
    text: Path, tmp_path: Path, clean: Clean, mode: str
) -> None:
    """Four ranks in two groups, then one group of two, then two groups again; what is left of the
    two groups need not have been one.
    """
    settings = {"dp_mode": mode, "replicas": 2, "dropout": 0.0}
    plan = "kill@rank=1,step=3,phase=across_groups"
    spec = make_spec(text, tmp_path, **RECIPE | settings | {"faults": plan})
    outcome = run_elastic(spec, 4, groups=[(0, 3)], grow_at=6)
    failed = [rank for rank in outcome.ranks.values() if rank.get("error", "Died") != "Died"]
    assert not failed, outcome
    assert outcome.left[1] == ["the driver ordered a new group"] * 2
    # One group sums in another order, and the batch stays the same.
    whole = clean(1, dropout=0.0)
    assert series(spec) == pytest.approx(series(whole), abs=2e-5)
    ours = final(spec)
    theirs = final(whole)
    for name, tensor in theirs.model.items():
        assert torch.allclose(ours.model[name], tensor, atol=1e-4), name
    logs = [json.loads(line) for line in (spec.folder / "hashes.jsonl").read_text().splitlines()]
    groups = [line["ranks"] for line in logs if "group" in line]
    assert groups == [4, 2, 4]


# What holders of a share compare, and heal.


def flip(step: int, what: str) -> None:
    """In this process a bit of this rank's share is flipped before a comparison.

    what: weights, or the optimizer's first moments.
    """
    right = replicas.compare

    def flipping(state: TrainState, *args: Any) -> Any:
        if state.step == step:
            shard = state.shards[0]
            tensor = shard.param.detach()
            if what == "moments":
                tensor = state.optimizer.state[shard.param]["exp_avg"]
            tensor.view(torch.int32).view(-1)[0] ^= 1 << 20
        return right(state, *args)

    replicas.compare = flipping


def flip_before_evaluation(step: int, what: str) -> None:
    """In this process a bit of this rank's share is flipped before an evaluation gathers it."""
    right = engine.evaluate

    def flipping(mesh: Any, par: Any, state: TrainState, *args: Any) -> Any:
        if state.step == step:
            state.shards[0].param.detach().view(torch.int32).view(-1)[0] ^= 1 << 20
        return right(mesh, par, state, *args)

    engine.evaluate = flipping  # type: ignore[assignment]


HASHED = {"hash_every": 1, "checkpoint_every": 0, "eval_every": 0, "max_steps": 4}


@pytest.mark.full
@pytest.mark.parametrize(
    ("mode", "what"),
    [
        ("zero1", "moments"),
        ("fsdp", "moments"),
        ("fsdp", "weights"),
    ],
)
def test_a_flipped_bit_in_a_share_is_found(
    text: Path, tmp_path: Path, mode: str, what: str
) -> None:
    """Two groups: which one is right is unknown."""
    spec = make_spec(text, tmp_path, **RECIPE | HASHED | {"dp_mode": mode, "replicas": 2})
    outcome = run_elastic(spec, 4, patches={3: partial(flip, 3, what)})
    assert {rank["error"] for rank in outcome.ranks.values()} == {"StateDiverged"}
    message = outcome.ranks[0]["message"]
    assert "after step 3 ranks that hold the same piece of the state differ in 1 of " in message
    assert "on rank 1, 3 of [1, 3]" in message, "the twins"
    assert "No majority of its holders agrees, and with replicas 3 there would be one" in message


@pytest.mark.full
# An evaluation gathers fsdp's weights just before the comparison that heals a share of them.
@pytest.mark.parametrize(
    ("mode", "what", "eval_every"),
    [
        pytest.param("zero1", "moments", 0, marks=pytest.mark.full),
        pytest.param("zero2", "weights", 0, marks=pytest.mark.full),
        pytest.param("fsdp", "moments", 0, marks=pytest.mark.full),
        pytest.param("fsdp", "weights", 0, marks=pytest.mark.full),
        ("fsdp", "weights", 1),
    ],
)
def test_a_flipped_bit_in_a_share_is_healed_by_two_others(
    text: Path, tmp_path: Path, clean: Clean, mode: str, what: str, eval_every: int
) -> None:
    """Three groups of two: the run ends with the bits of one without the flip. A flipped weight of
    zero2 is on one of six ranks that have it.
    """
    settings = HASHED | {"dp_mode": mode, "replicas": 3, "eval_every": eval_every}
    spec = make_spec(text, tmp_path, **RECIPE | settings)
    planted = flip_before_evaluation if eval_every else flip
    outcome = run_elastic(spec, 6, patches={3: partial(planted, 3, what)})
    assert not [rank for rank in outcome.ranks.values() if "error" in rank], outcome
    assert records(spec)[-1]["fault/healed"] == 1
    lines = [json.loads(line) for line in (spec.folder / "hashes.jsonl").read_text().splitlines()]
    differing = {line["step"]: [*line["differ"]] for line in lines if "step" in line}
    assert differing == {1: [], 2: [], 3: ["3"], 4: []}
    whole = clean(6, **settings)
    assert series(spec) == series(whole)
    assert equal(final(spec), final(whole))


# Checkpoints.


@pytest.mark.full
def test_a_run_goes_on_with_other_groups_and_modes(
    text: Path, tmp_path: Path, clean: Clean
) -> None:
    """The losses stay those of one process."""
    settings = {"dropout": 0.0, "resume": "auto"}
    alone = clean(1, dropout=0.0)
    stages = [
        (4, 3, {"dp_mode": "zero1", "replicas": 2}),
        (2, 5, {"dp_mode": "fsdp"}),
        (4, 8, {"dp_mode": "fsdp", "replicas": 2}),
    ]
    for world, stop, how in stages:
        spec = make_spec(text, tmp_path, **RECIPE | settings | how | {"stop_at": stop})
        failed = [outcome for outcome in run_ranks(spec, world) if "error" in outcome]
        assert not failed
        # Of several holders of a share one writes it.
        found = final(spec)
        assert found.meta["step"] == stop
    assert series(spec) == pytest.approx(series(alone), abs=2e-5)


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(
    text: Path, tmp_path: Path, clean: Clean, mode: str
) -> None:
    settings = {"dp_mode": mode, "replicas": 2}
    for stop in (4, 0):
        spec = make_spec(text, tmp_path, **RECIPE | settings | {"stop_at": stop, "resume": "auto"})
        assert not [outcome for outcome in run_ranks(spec, 4) if "error" in outcome]
    whole = clean(4, **settings)
    assert series(spec) == series(whole)
    assert equal(final(spec), final(whole))


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
def test_a_model_of_a_script_trains_in_groups(tmp_path: Path, mode: str) -> None:
    """With running statistics, which are means over all ranks and equal on them.

    Losses alone are compared: a norm takes its input's mean away, so the bias before it has a
    gradient of rounding errors, which AdamW turns into steps of any sign.
    """
    how = partial(test_own_models.images, how="trained")
    settings = {"hash_every": 1, "replicas": 2}
    ours = test_own_models.trained(tmp_path / "groups", 4, how, dp_mode=mode, **settings)
    whole = test_own_models.trained(tmp_path / "whole", 4, how, dp_mode="ddp_by_hand")
    assert len(series(ours)) == 8
    assert series(ours) == pytest.approx(series(whole), abs=1e-5)

"""Hybrid sharding: groups of ranks that shard the state hold the same, and mirror each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nanoray.bench.equivalence import ADAMW, LIMITS, LOSS, NORM, SGD, WEIGHT_LIMIT
from tests.harness.axes import require_one_process, run
from tests.harness.elastic import run_elastic
from tests.harness.planted_hybrid import BUGS
from tests.harness.ranks import make_spec
from tests.ranks.conftest import Pools
from tests.ranks.test_mirror import RECIPE, SPREAD, Clean, clean, ended_well, fired

__all__ = ["clean"]  # the fixture

MODES = ("zero1", "zero2", "fsdp")
BUGGY = "tests.harness.planted_hybrid:measure_with_bugs"


def arms_of(replicas: int, *modes: str, **more: Any) -> dict[str, dict[str, Any]]:
    """Return an arm for each mode."""
    return {mode: {"dp_mode": mode, "replicas": replicas, **more} for mode in modes or MODES}


# The same training in every mode.


@pytest.mark.parametrize(
    ("ranks", "replicas"),
    [
        (4, 2),
        # Three groups, whose slices do not divide by three; and groups of three
        *(pytest.param(*case, marks=pytest.mark.full) for case in ((6, 3), (6, 2))),
    ],
)
def test_groups_train_as_one_process_does(pools: Pools, ranks: int, replicas: int) -> None:
    """All ranks of all groups have the same bits, and with SGD so have all modes."""
    arms = arms_of(replicas)
    for settings, accum in ((SGD, 1), (SGD, 2), (ADAMW, 2)):
        found = run(pools, ranks, arms, [{"accum": accum, "settings": settings}], alone=True)
        require_one_process(found, settings)

        # zero2 sums micro batches last; AdamW rounds the last elements of a tensor otherwise.
        digests = {each["arm"]: each["ranks"][0]["digest"] for each in found}
        same = {"zero1"}
        if settings == SGD:
            same.add("fsdp")
        if accum == 1:
            same.add("zero2")
        assert len({digests[mode] for mode in same}) == 1, (settings, accum)

        # A rank keeps 1/S of the optimizer's state and of the gradients.
        group = ranks // replicas
        for each in found:
            elements = each["ranks"][0]["elements"]
            kept = {rank["gradient_elements"] for rank in each["ranks"]}
            assert max(kept) < elements / group + 0.05 * elements, each["arm"]
            states = sum(rank["state_elements"] for rank in each["ranks"])
            assert states == (2 * elements * replicas if settings == ADAMW else 0), each["arm"]


def test_a_planted_bug_makes_it_red(pools: Pools) -> None:
    """In every mode, and nothing but the bug: the arms are right without it (above)."""
    order = {"arms": arms_of(2), "cases": [{"accum": 1, "settings": SGD}], "alone": True}
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
            if rank["norms"] != pytest.approx(alone["norms"], rel=LIMITS[NORM]):
                metrics.add("norm")
        if bug == "every_group_counts":  # without clipping it shows in the norm alone
            assert metrics == {"norm"}, each["arm"]
        else:
            assert metrics >= {"weight", "norm"}, each["arm"]
    assert len(wrong) == len(BUGS) * len(MODES)


# A rank is lost: its share is in the memory of its twin.

# In this order; no two in one step, so each finds a group of four.
PLACES = [
    (2, "forward"),
    (3, "backward"),
    (4, "exchange_slices"),
    (5, "exchange_norm"),
    (6, "committed"),
    (7, "exchange_weights"),
    (8, "eval"),
    (8, "checkpoint"),
]


@pytest.mark.parametrize(
    "settings",
    [
        {"dp_mode": "zero2", "grad_accum_steps": 2},
        pytest.param({"dp_mode": "zero1"}, marks=pytest.mark.full),
        pytest.param({"dp_mode": "fsdp"}, marks=pytest.mark.full),
        pytest.param({"dp_mode": "zero1", "precision": "fp16"}, marks=pytest.mark.full),
        pytest.param({"dp_mode": "fsdp", "fsdp_reshard": "grad_op"}, marks=pytest.mark.full),
    ],
    ids=lambda settings: " ".join(map(str, settings.values())),
)
def test_a_rank_is_lost_anywhere_in_a_step(
    text: Path, tmp_path: Path, clean: Clean, settings: dict[str, Any]
) -> None:
    """On both sides of the commit point, in each rank twice: no step is repeated, no bit differs."""
    settings = settings | {"replicas": 2}
    faults = []
    phases = []
    for i, (step, phase) in enumerate(PLACES):
        if phase == "exchange_weights":
            phase = SPREAD[settings["dp_mode"]]
        phases.append(phase)
        faults.append(f"kill@rank={i % 4},step={step},phase={phase}")
    spec = make_spec(text, tmp_path, **RECIPE | settings | {"faults": ";".join(faults)})
    outcome = run_elastic(spec, 4)
    assert fired(spec) == phases, "each, once"
    ended_well(spec, outcome, clean(4, **settings), len(PLACES))

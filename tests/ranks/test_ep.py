"""Mixture of experts on several ranks, and expert parallelism: equal to one process; checkpoints,
hashes, refusals.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness.axes import Runs, require_one_process, run
from tests.harness.ranks import series
from tests.ranks.conftest import Pools, Wrong
from tests.stress import equivalence
from tests.stress.equivalence import ADAMW, EXPERTS, SGD

BY_HAND = ("ddp_by_hand", "zero1", "zero2")
MODES = ("ddp", *BY_HAND, "fsdp")


@pytest.mark.parametrize(
    ("settings", "modes"),
    [
        (SGD, ("fsdp", "zero2")),
        *(pytest.param(s, MODES, marks=pytest.mark.full) for s in (SGD, ADAMW)),
    ],
    ids=["sgd, two modes", "sgd", "adamw"],
)
def test_every_mesh_trains_as_one_process_does(
    pools: Pools, settings: dict[str, Any], modes: tuple[str, ...]
) -> None:
    """Modes without ep; ep 2 at two ranks, dp 4 × ep 2 and ep 4 at four: losses, weights, norms."""
    case = {"accum": 2, "settings": settings | EXPERTS}
    by_hand = [mode for mode in modes if mode in BY_HAND]
    two = {mode: {"dp_mode": mode} for mode in modes} | {
        f"ep 2 × {m}": {"ep": 2, "dp_mode": m} for m in by_hand
    }
    four = {f"ep {n} × {mode}": {"ep": n, "dp_mode": mode} for n in (2, 4) for mode in by_hand}
    found = run(pools, 2, two, [case], alone=True) + run(pools, 4, four, [case], alone=True)
    assert len(found) == len(two) + len(four)
    require_one_process(found, settings)


@pytest.mark.parametrize(
    "more",
    [
        {"experts_per_token": 1},
        # Most of a micro batch's experts get no token
        pytest.param(
            {"experts": 512, "experts_per_token": 1, "expert_hidden": 2}, marks=pytest.mark.full
        ),
        pytest.param({"activation_checkpointing": "block", "dropout": 0.0}, marks=pytest.mark.full),
        pytest.param(
            {"activation_checkpointing": "selective", "bias": False}, marks=pytest.mark.full
        ),
    ],
)
def test_each_option_trains_as_one_process_does_under_ep(
    pools: Pools, more: dict[str, Any]
) -> None:
    arms = {"ep 2": {"ep": 2, "dp_mode": "zero1"}}
    require_one_process(
        run(pools, 4, arms, [{"accum": 2, "settings": SGD | EXPERTS | more}], alone=True), SGD
    )


@pytest.mark.full
def test_by_hand_and_zero_agree_bit_for_bit(pools: Pools) -> None:
    arms = {mode: {"ep": 2, "dp_mode": mode} for mode in BY_HAND}
    for settings in (SGD, ADAMW):
        found = run(pools, 4, arms, [{"accum": 1, "settings": settings | EXPERTS}])
        assert len({rank["digest"] for each in found for rank in each["ranks"]}) == 1


def test_every_rank_keeps_its_share_only(pools: Pools) -> None:
    """Experts are divided by ep, and their optimizer state by dp/ep besides."""
    settings = ADAMW | EXPERTS | {"experts": 16, "n_embd": 32, "expert_hidden": 64, "bias": False}
    for each in run(
        pools, 4, {"ep 2": {"ep": 2, "dp_mode": "zero1"}}, [{"accum": 1, "settings": settings}]
    ):
        for rank in each["ranks"]:
            assert rank["state_elements"] < 2 * rank["elements"] / 4 * 1.1
            assert rank["gradient_elements"] < rank["elements"] / 4 * 1.1


@pytest.mark.parametrize(
    ("bug", "metric"),
    [
        ("expert_factor", equivalence.WEIGHT),
        ("expert_replicas", equivalence.NORM),
    ],
)
def test_a_planted_bug_makes_the_matrix_red(
    bug: str, metric: str, planted: Callable[..., Wrong]
) -> None:
    # With zero1 a rank has nothing to count twice
    mode = "ddp_by_hand" if bug == "expert_replicas" else "zero1"
    wrong = planted(bug, 4, {"ddp": {}, "ep": {"dp_mode": mode, "ep": 2} | EXPERTS})
    assert f"SGD: {metric}" in wrong["ep"]
    assert not wrong["ddp"]


# The whole program: the loop, checkpoints, resume.

RECIPE: dict[str, Any] = {
    "max_steps": 8,
    "global_batch_size": 24,
    "precision": "fp32",
    "bias": True,
}
RECIPE |= {"experts": 4, "expert_hidden": 32, "shared_experts": 1}


@pytest.fixture
def runs(text: Path, tmp_path: Path) -> Runs:
    return Runs(text, tmp_path, RECIPE)


@pytest.mark.full
@pytest.mark.parametrize(
    ("ep", "mode", "world"),
    [
        pytest.param(2, "zero1", 4, marks=pytest.mark.full),
        (2, "ddp_by_hand", 2),
        pytest.param(1, "ddp", 2, marks=pytest.mark.full),
    ],
)
def test_a_run_resumes_to_the_bit(runs: Runs, ep: int, mode: str, world: int) -> None:
    whole, rest = runs.resumed(world, 5, ep=ep, dp_mode=mode, dropout=0.1)
    assert series(rest, "moe/load_max") == series(whole, "moe/load_max")

"""Mixture of experts on several ranks, and expert parallelism: equal to one process; checkpoints,
hashes, refusals.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanoray.checkpoint.find import newest_valid
from nanoray.tools.sample import main as sample
from tests.harness.axes import Runs, require_one_process, run
from tests.harness.ranks import records, series
from tests.ranks.conftest import Pools, Wrong
from tests.stress import equivalence
from tests.stress.equivalence import ADAMW, CASES, EXPERTS, SGD, arms_for, must_equal

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
        {"expert_capacity": 0.75},
        pytest.param({"experts_per_token": 1}, marks=pytest.mark.full),
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


@pytest.mark.full
@pytest.mark.parametrize("mode", [pytest.param("ddp_by_hand", marks=pytest.mark.full), "zero2"])
def test_activation_checkpointing_changes_no_bit(pools: Pools, mode: str) -> None:
    hows = ("none", "selective", "block")
    settings = [ADAMW | EXPERTS | {"dropout": 0.3, "activation_checkpointing": how} for how in hows]
    found = run(
        pools,
        2,
        {"ep 2": {"ep": 2, "dp_mode": mode}},
        [{"accum": 2, "settings": s} for s in settings],
    )
    assert len({rank["digest"] for each in found for rank in each["ranks"]}) == 1


@pytest.mark.parametrize(
    ("bug", "metric"),
    [
        ("expert_factor", equivalence.WEIGHT),
        pytest.param("expert_axis", equivalence.WEIGHT, marks=pytest.mark.full),
        ("expert_replicas", equivalence.NORM),
        pytest.param("balance", equivalence.WEIGHT, marks=pytest.mark.full),
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


def test_which_arms_run_and_which_must_have_the_same_bits() -> None:
    assert {arm for arm in arms_for(4, False) if "ep " in arm} == {
        f"experts, ep {n} × {mode}" for n in ("2", "4", "2, tp 2", "2, pp 2") for mode in BY_HAND
    }
    assert {"experts, tp 2", "experts, pp 2"} <= {*arms_for(2)}
    assert not {arm for arm in arms_for(3) if "ep " in arm}
    assert must_equal("experts, ep 2 × zero1", CASES["SGD"]) == ["experts, ep 2 × ddp_by_hand"]
    assert must_equal("experts, ep 2, tp 2 × zero1", CASES["SGD"]) == [
        "experts, ep 2, tp 2 × ddp_by_hand"
    ]


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
    whole, rest = runs.resumed(world, 5, ep=ep, dp_mode=mode, dropout=0.1, expert_capacity=1.0)
    assert series(rest, "moe/load_max") == series(whole, "moe/load_max")


@pytest.mark.full
@pytest.mark.parametrize(
    "meshes",
    [
        [(2, 2, "ddp_by_hand"), (1, 3, "fsdp"), (2, 4, "zero1")],
        pytest.param(
            [
                (2, 2, "ddp_by_hand"),
                (1, 1, "ddp"),
                (4, 4, "zero1"),
                (2, 4, "zero2"),
                (1, 3, "fsdp"),
                (2, 4, "zero1"),
                (1, 3, "zero2"),
            ],
            marks=pytest.mark.full,
        ),
    ],
)
def test_any_mesh_goes_on_with_what_any_other_saved(
    runs: Runs, meshes: list[tuple[int, int, str]]
) -> None:
    runs.gone_on([(world, {"ep": ep, "dp_mode": mode}) for ep, world, mode in meshes], far=5e-4)


@pytest.mark.full
def test_metrics_tracing_comparing_evaluating_and_sampling_work(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {
        "comm_trace": "always",
        "hash_every": 2,
        "eval_every": 3,
        "eval_samples": 5,
        "sample_tokens": 8,
    }
    spec, outcomes = runs.finished("shared", 4, **settings, max_steps=6, ep=2, dp_mode="zero1")
    assert 0 < len(outcomes[0]["sample"]) <= 8, "several bytes may be one character"
    alone = runs.trained("alone", 1, max_steps=6, eval_every=3, eval_samples=5)
    assert series(spec, "val/loss") == pytest.approx(series(alone, "val/loss"), abs=2e-5)
    assert series(spec, "train/grad_norm") == pytest.approx(
        series(alone, "train/grad_norm"), rel=1e-4
    )
    assert series(spec, "moe/load_max") == pytest.approx(series(alone, "moe/load_max"), abs=0.02)
    for mine, its in zip(
        records(spec)[0]["expert_load"], records(alone)[0]["expert_load"], strict=True
    ):
        assert mine == pytest.approx(its, abs=2e-4), "of the same batch"
    steps = [
        json.loads(line) for line in (spec.folder / "comm" / "steps.jsonl").read_text().splitlines()
    ]
    sent = [c for c in steps[2]["collectives"] if c["group"] == "ep"]
    assert {c["op"] for c in sent} == {"all_to_all"}
    phases = [c["phase"] for c in sent]
    assert (phases.count("forward"), phases.count("backward")) == (2 * 3, 2 * 2), (
        "counts, there, back, in 2 blocks"
    )
    counts, there = sent[0], sent[1]
    assert (counts["bytes"], there["bytes"]) == (8 * 4, 4 * 32 * 2 * 6 * 16), (
        "each token of 6 × 16 goes to 2 experts"
    )
    buckets = [c for c in steps[2]["collectives"] if c["bucket"] is not None]
    assert {c["group"] for c in buckets} == {"dp", "edp"}
    assert len({c["bucket"] for c in buckets if c["op"] == "reduce_scatter"}) == len(buckets)
    assert {c["ranks"] for c in buckets if c["group"] == "edp"} == {c["ranks"] for c in sent} == {2}
    assert sample([str(spec.folder), "--max_new_tokens", "4"]) == 0
    assert len(capsys.readouterr().out) >= 4


def test_a_flipped_bit_is_found_among_the_ranks_that_hold_the_piece(runs: Runs) -> None:
    settings = {"ep": 2, "dp_mode": "ddp_by_hand", "hash_every": 2, "checkpoint_every": 2}
    spec, message = runs.failed(4, "StateDiverged", **settings, faults="bitflip@rank=2,step=5")
    assert "after step 6 ranks that hold the same piece of the state differ" in message
    found, _ = newest_valid(spec.checkpoints)
    assert found
    assert found.state.meta["step"] == 4


def test_a_step_that_is_not_finite_is_named(runs: Runs) -> None:
    _, message = runs.failed(
        2, "TrainingDiverged", ep=2, dp_mode="zero1", faults="nan@rank=1,step=4"
    )
    assert "at step 4 the loss is nan" in message


@pytest.mark.parametrize(
    ("precision", "far", "ep"),
    [
        ("fp16", 1e-2, 2),
        pytest.param("bf16", 3e-2, 1, marks=pytest.mark.full),
        pytest.param("bf16", 3e-2, 2, marks=pytest.mark.full),
        pytest.param("fp16", 1e-2, 1, marks=pytest.mark.full),
    ],
)
def test_low_precision_stays_near_one_process(
    runs: Runs, precision: str, far: float, ep: int
) -> None:
    settings = {"precision": precision, "max_steps": 5}
    alone = runs.trained("alone", 1, max_steps=5)
    cut = runs.trained("cut", 2, ep=ep, dp_mode="zero1", **settings)
    assert series(cut) == pytest.approx(series(alone), abs=far)


def test_ranks_that_ep_does_not_divide_are_refused(runs: Runs) -> None:
    _, message = runs.failed(3, "ConfigError", ep=2, dp_mode="zero1")
    assert "ep = 2 does not divide dp = 3; choose a divisor of dp for ep" in message

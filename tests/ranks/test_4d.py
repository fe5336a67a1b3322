"""Experts with tensor and pipeline parallelism, up to all four axes at once: equal to one process,
in every mode.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.harness.axes import Runs, require_one_process, run
from tests.harness.ranks import series
from tests.ranks.conftest import Pools
from tests.stress.equivalence import ADAMW, EXPERTS, SGD

BY_HAND = ("ddp_by_hand", "zero1", "zero2")
DEEP = {"n_layer": 4}


TWO = {"tp": {"tp": 2}, "pp": {"pp": 2, **DEEP}, "gpipe": {"pp": 2, "pp_schedule": "gpipe", **DEEP}}
TWO |= {"interleaved": {"pp": 2, "pp_schedule": "interleaved", **DEEP}}
FOUR = {f"ep × tp {mode}": {"ep": 2, "tp": 2, "dp_mode": mode} for mode in BY_HAND}
FOUR |= {f"ep × pp {mode}": {"ep": 2, "pp": 2, "dp_mode": mode, **DEEP} for mode in BY_HAND}
FOUR |= {f"tp {mode}": {"tp": 2, "dp_mode": mode} for mode in ("ddp", "fsdp")}
FOUR |= {"tp × pp": {"tp": 2, "pp": 2, **DEEP}, "tp 4": {"tp": 4}}
FEW = {arm: FOUR[arm] for arm in ("ep × tp zero1", "ep × pp ddp_by_hand", "tp fsdp", "tp × pp")}


@pytest.mark.full
@pytest.mark.parametrize("arms", [FEW, FOUR], ids=["some", "all"])
@pytest.mark.parametrize(
    "settings", [SGD, pytest.param(ADAMW, marks=pytest.mark.full)], ids=["sgd", "adamw"]
)
def test_experts_with_two_axes_train_as_one_process_does(
    pools: Pools, settings: Any, arms: dict[str, Any]
) -> None:
    """Losses, weights, norms; all ranks agree to the bit, also on what several of them hold."""
    found = run(pools, 4, arms, [{"accum": 2, "settings": settings | EXPERTS}], alone=True)
    assert len(found) == len(arms)
    require_one_process(found, settings)


@pytest.mark.full
@pytest.mark.parametrize("settings", [SGD, ADAMW], ids=["sgd", "adamw"])
def test_experts_on_two_ranks_train_as_one_process_does(
    pools: Pools, settings: dict[str, Any]
) -> None:
    found = run(pools, 2, TWO, [{"accum": 2, "settings": settings | EXPERTS}], alone=True)
    require_one_process(found, settings)


@pytest.mark.parametrize(
    "modes", [("zero1",), pytest.param(BY_HAND, marks=pytest.mark.full)], ids=["zero1", "all"]
)
@pytest.mark.parametrize(
    "settings", [SGD, pytest.param(ADAMW, marks=pytest.mark.full)], ids=["sgd", "adamw"]
)
def test_four_axes_on_eight_ranks(
    pools: Pools, settings: dict[str, Any], modes: tuple[str, ...]
) -> None:
    """dp 2 (ep 2) × tp 2 × pp 2, and in every mode also without ep, where experts are whole on each
    replica.
    """
    arms: dict[str, Any] = {
        f"4d {mode}": {"ep": 2, "tp": 2, "pp": 2, "dp_mode": mode} for mode in modes
    }
    arms |= {"3d": {"tp": 2, "pp": 2, "dp_mode": "zero1"}} if modes == BY_HAND else {}
    found = run(pools, 8, arms, [{"accum": 2, "settings": settings | EXPERTS}], alone=True)
    require_one_process(found, settings)
    digests = {each["arm"]: each["ranks"][0]["digest"] for each in found}
    assert digests.get("4d ddp_by_hand") in (digests["4d zero1"], None)


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(
            {"experts_per_token": 1, "shared_experts": 0, "bias": False}, marks=pytest.mark.full
        ),
        pytest.param({"activation_checkpointing": "selective"}, marks=pytest.mark.full),
        pytest.param({"activation_checkpointing": "block"}, marks=pytest.mark.full),
    ],
)
def test_each_option_of_experts_works_with_the_other_axes(
    pools: Pools, more: dict[str, Any]
) -> None:
    arms = {
        "tp": {"ep": 2, "tp": 2, "dp_mode": "zero1"},
        "pp": {"ep": 2, "pp": 2, "dp_mode": "zero2", **DEEP},
    }
    found = run(pools, 4, arms, [{"accum": 2, "settings": SGD | EXPERTS | more}], alone=True)
    require_one_process(found, SGD)


@pytest.mark.full
def test_a_rank_keeps_its_share_of_the_experts_only(pools: Pools) -> None:
    settings = (
        ADAMW
        | EXPERTS
        | {"experts": 16, "n_embd": 32, "expert_hidden": 64, "bias": False, "n_layer": 4}
    )
    arms = {
        "tp": {"ep": 2, "tp": 2, "dp_mode": "zero1"},
        "pp": {"ep": 2, "pp": 2, "dp_mode": "zero1"},
    }
    for each in run(pools, 4, arms, [{"accum": 1, "settings": settings}]):
        for rank in each["ranks"]:
            assert rank["gradient_elements"] < rank["elements"] / 4 * 1.1, each["arm"]


# The whole program: the loop, checkpoints, resume.

RECIPE: dict[str, Any] = {
    "max_steps": 6,
    "n_layer": 4,
    "n_head": 4,
    "precision": "fp32",
    "bias": True,
}
RECIPE |= {
    "global_batch_size": 24,
    "grad_accum_steps": 2,
    "experts": 4,
    "expert_hidden": 32,
    "shared_experts": 1,
}


@pytest.fixture
def runs(text: Path, tmp_path: Path) -> Runs:
    return Runs(text, tmp_path, RECIPE)


@pytest.mark.full
@pytest.mark.parametrize(
    "settings",
    [{"tp": 2, "dp_mode": "zero1"}, {"pp": 2, "dp_mode": "ddp_by_hand"}],
    ids=["tp", "pp"],
)
def test_a_run_resumes_to_the_bit(runs: Runs, settings: dict[str, Any]) -> None:
    whole, rest = runs.resumed(4, 4, ep=2, dropout=0.1, **settings)
    assert series(rest, "moe/load_max") == series(whole, "moe/load_max")


@pytest.mark.full
def test_any_mesh_goes_on_with_what_any_other_saved(runs: Runs) -> None:
    meshes: list[tuple[int, dict[str, Any]]] = [
        (8, {"ep": 2, "tp": 2, "pp": 2, "dp_mode": "zero1"}),
        (4, {"ep": 2, "tp": 2, "dp_mode": "zero2"}),
        (3, {"dp_mode": "fsdp"}),
        (4, {"ep": 2, "pp": 2, "dp_mode": "ddp_by_hand"}),
        (4, {"tp": 2, "pp": 2}),
        (2, {"ep": 2, "dp_mode": "zero1"}),
    ]
    runs.gone_on(meshes, far=5e-4)


@pytest.mark.full
def test_metrics_tracing_comparing_and_evaluating_work(runs: Runs) -> None:
    """Of a step: three sums per block and direction (attention, experts, the shared one), and one
    of the gates.
    """
    settings = {
        "comm_trace": "always",
        "hash_every": 2,
        "eval_every": 2,
        "eval_samples": 5,
        "sample_tokens": 4,
    }
    shape = {"max_steps": 4, "n_layer": 2, "grad_accum_steps": 1}
    spec, outcomes = runs.finished("shared", 4, **settings, **shape, ep=2, tp=2, dp_mode="zero1")
    assert 0 < len(outcomes[0]["sample"]) <= 4, "several bytes may be one character"
    alone = runs.trained("alone", 1, eval_every=2, eval_samples=5, **shape)
    for key in ("train/loss", "val/loss", "train/grad_norm"):
        assert series(spec, key) == pytest.approx(series(alone, key), abs=2e-5, rel=1e-4)
    for key in ("moe/load_max", "moe/entropy", "moe/balance_loss", "moe/z_loss"):
        assert series(spec, key) == pytest.approx(series(alone, key), rel=1e-3), key
    steps = [
        json.loads(line) for line in (spec.folder / "comm" / "steps.jsonl").read_text().splitlines()
    ]
    sums = [c for c in steps[2]["collectives"] if c["group"] == "tp" and c["what"] == "activations"]
    backward = Counter(c["bytes"] for c in sums if c["phase"] == "backward")
    stream = 4 * 12 * 16 * 32
    assert Counter(c["bytes"] for c in sums if c["phase"] == "forward") == {stream: 2 * 3 + 1}
    assert backward == {stream: 2 * 3 + 1, 4 * 12 * 16 * 2: 2}, "lm_head's input; two gates a token"
    assert {c["ranks"] for c in steps[2]["collectives"] if c["group"] == "ep"} == {2}


@pytest.mark.full
def test_low_precision_stays_near_one_process(runs: Runs) -> None:
    """With fp16 the loss scale is on the losses of every stage's routers, too."""
    alone = runs.trained("alone", 1, precision="fp16", max_steps=4)
    spec = runs.trained("cut", 4, precision="fp16", max_steps=4, tp=2, pp=2)
    assert series(spec) == pytest.approx(series(alone), abs=1e-2)
    assert series(spec, "train/grad_norm") == pytest.approx(
        series(alone, "train/grad_norm"), rel=5e-2
    )
    assert series(spec, "train/loss_scale") == series(alone, "train/loss_scale")

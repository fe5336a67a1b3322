"""Sequence parallelism: equal to one process and to tensor parallelism without it; dropout,
pipelines, experts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness.axes import Runs, equal, final, require_one_process, run
from tests.harness.ranks import series
from tests.ranks.conftest import Pools, Wrong
from tests.stress import equivalence
from tests.stress.equivalence import ADAMW, EXPERTS, LIMITS, LOSS, NORM, SGD

MODES = ("ddp", "ddp_by_hand", "zero1", "zero2", "fsdp")
CUT: dict[str, Any] = {"tp": 2, "sequence_parallel": True}
DEEP = {"n_layer": 4}


@pytest.mark.parametrize("bias", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("settings", "modes"),
    [
        (SGD, ("ddp_by_hand", "zero1")),
        *(pytest.param(s, MODES, marks=pytest.mark.full) for s in (SGD, ADAMW)),
    ],
    ids=["sgd, two modes", "sgd", "adamw"],
)
def test_it_trains_as_one_process_does(
    pools: Pools, settings: dict[str, Any], modes: tuple[str, ...], bias: bool
) -> None:
    """tp 2, tp 4, dp 2 × tp 2 in modes of dp, tp 2 × pp 2: losses, weights, norms; replicated
    weights stay equal.
    """
    case = {"accum": 2, "settings": settings | {"bias": bias}}
    arms: dict[str, Any] = {"tp 4": CUT | {"tp": 4}} | {
        mode: CUT | {"dp_mode": mode} for mode in modes
    }
    arms |= {kind: CUT | DEEP | {"pp": 2, "pp_schedule": kind} for kind in ("1f1b", "interleaved")}
    found = run(pools, 4, arms, [case], alone=True) + run(
        pools, 2, {"tp 2": CUT}, [case], alone=True
    )
    assert len(found) == len(arms) + 1
    require_one_process(found, settings)
    digests = {each["arm"]: each["ranks"][0]["digest"] for each in found}
    assert digests["ddp_by_hand"] == digests["zero1"]


@pytest.mark.full
@pytest.mark.parametrize(
    "more",
    [
        {"shared_experts": 0},
        pytest.param({}, marks=pytest.mark.full),
        pytest.param({"activation_checkpointing": "block"}, marks=pytest.mark.full),
    ],
)
def test_experts_under_sequence_parallelism(pools: Pools, more: dict[str, Any]) -> None:
    """The router's weight has the gradient of own positions; the balance is that of the whole
    sequence.
    """
    arms = {
        "ep": CUT | {"ep": 2, "dp_mode": "zero1"},
        "pp": CUT | DEEP | {"pp": 2},
        "tp 4": CUT | {"tp": 4},
    }
    found = run(pools, 4, arms, [{"accum": 2, "settings": SGD | EXPERTS | more}], alone=True)
    require_one_process(found, SGD)


def test_a_planted_bug_makes_the_matrix_red(planted: Callable[..., Wrong]) -> None:
    wrong = planted("norms", 2, {"sound": EXPERTS | {"tp": 2}, "wrong": EXPERTS | CUT})
    assert f"SGD: {equivalence.WEIGHT}" in wrong["wrong"]
    assert not wrong["sound"]


def test_dropout_has_the_masks_of_tensor_parallelism(pools: Pools) -> None:
    """Each rank's masks are its own part of those that all ranks draw without it; so are losses and
    weights.
    """
    runs: list[list[Any]] = [
        [*pools(4).run("tests.harness.tensor:dropout_masks", {"sequence": cut})]
        for cut in (False, True)
    ]
    ranks = [events[0] for events in runs]
    for whole, own in zip(*ranks, strict=True):
        assert own["attention"] == whole["attention"]
    for d in (0, 1):
        parts = [rank["stream_masks"] for rank in ranks[1][2 * d : 2 * d + 2]]
        for whole, *cut in zip(ranks[0][2 * d]["stream_masks"], *parts, strict=True):
            assert [a + b for a, b in zip(*cut, strict=True)] == whole, (
                "by sequence, position by position"
            )
    settings = SGD | {"dropout": 0.3}
    found = run(pools, 2, {"tp": {"tp": 2}, "cut": CUT}, [{"accum": 2, "settings": settings}])
    one, other = (each["ranks"][0] for each in found)
    assert one["losses"] == pytest.approx(other["losses"], abs=LIMITS[LOSS])
    assert one["norms"] == pytest.approx(other["norms"], rel=LIMITS[NORM])


# The whole program.

RECIPE: dict[str, Any] = {
    "n_head": 4,
    "max_steps": 6,
    "global_batch_size": 24,
    "precision": "fp32",
    "bias": True,
}


@pytest.fixture
def runs(text: Path, tmp_path: Path) -> Runs:
    return Runs(text, tmp_path, RECIPE)


@pytest.mark.full
def test_a_run_resumes_to_the_bit_and_goes_on_without(runs: Runs) -> None:
    """The checkpoint is that of any mesh: what is cut is not the weights."""
    _, rest = runs.resumed(4, 4, dropout=0.1, dp_mode="zero1", **CUT)
    plain = runs.trained("plain", 2, resume=str(rest.folder), tp=2, max_steps=8)
    alone = runs.trained("alone", 1, resume=str(rest.folder), max_steps=8)
    assert series(plain) == pytest.approx(series(alone), abs=2e-5)
    assert not equal(final(plain), final(rest))

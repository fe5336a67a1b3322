"""Parameters that no rank has a gradient of, with what else a step may have: recovery, clipping,
compression, optimizers.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nanoray.checkpoint.resume import newest_valid
from nanoray.script.program import Program
from tests.harness.elastic import run_elastic
from tests.harness.zoo import BY_NAME
from tests.harness.zoo_ranks import Case, open_case, run_cases, train_case
from tests.ranks.test_zoo import alone, wrong

BRANCH = "sometimes a branch"


def steps_of(optimizer_state: dict[str, Any]) -> dict[str, int]:
    """Return the number of updates of each parameter, as AdamW counts them."""
    steps = {}
    for name, value in optimizer_state.items():
        key, _, parameter = name.partition(".")
        if key == "step":
            steps[parameter] = int(value)
    return steps


def expected_steps(exhibit: str) -> dict[str, int]:
    model, optimizer = alone(exhibit, "adamw")
    names = {p: name for name, p in model.named_parameters()}
    return {names[p]: int(state["step"]) for p, state in optimizer.state.items()}


# What a step may have besides. Weights must equal those of plain torch.
EXACT: list[Case] = [
    Case(BRANCH, "zero1", "adamw", settings={"grad_clip": 0.2}),
    *(Case(BRANCH, mode, "adamw foreach") for mode in ("ddp", "zero2")),
    *(Case(BRANCH, mode, "sgd", stops=(6,)) for mode in ("ddp_by_hand", "zero1")),
    Case(BRANCH, "ddp", settings={"allreduce": "ring"}),
]
# Gradients are rounded, so weights are only near; but the same parameters rest in the same steps.
ROUNDED: list[Case] = [
    Case(BRANCH, "ddp_by_hand", settings={"grad_compress": kind}) for kind in ("fp16", "bf16")
]


@pytest.mark.parametrize(
    ("exact_cases", "rounded_cases"),
    [(EXACT[1:3], ROUNDED[:1]), pytest.param(EXACT, ROUNDED, marks=pytest.mark.full)],
    ids=["some", "all"],
)
def test_what_else_a_step_has_does_not_move_a_parameter_that_rests(
    tmp_path: Path, exact_cases: list[Case], rounded_cases: list[Case]
) -> None:
    cases = exact_cases + rounded_cases
    found = run_cases(cases, 2, tmp_path)
    exact = len(exact_cases)
    lines = wrong(cases[:exact], found[:exact])
    assert not lines, "\n".join(lines)

    expected = expected_steps(BRANCH)
    assert expected["extra.weight"] < expected["head.weight"] == 12, "the branch rests at times"
    for case, of_case in zip(rounded_cases, found[exact:], strict=True):
        assert not of_case.errors, (case, of_case.errors)
        assert steps_of(of_case.optimizer) == expected, case


@pytest.mark.full
@pytest.mark.parametrize(
    ("mode", "world"),
    [
        pytest.param("zero1", 3, marks=pytest.mark.full),
        pytest.param("ddp", 2, marks=pytest.mark.full),
        pytest.param("ddp_by_hand", 2, marks=pytest.mark.full),
        pytest.param("zero2", 2, marks=pytest.mark.full),
    ],
)
def test_a_rank_is_lost_in_a_step_that_leaves_gradients_absent(
    tmp_path: Path, mode: str, world: int
) -> None:
    """Before the bytes are exchanged, before the norm, and after it, when the others finish the
    step; no state of an optimizer comes into being that one process would not have.
    """
    places = ["exchange_absent", "committed", "backward"]
    if mode in ("zero1", "zero2"):
        places.append("exchange_weights")
    plan = ";".join(
        f"kill@rank={i % world},step={2 + 3 * i},phase={place}" for i, place in enumerate(places)
    )
    case = Case(BRANCH, mode, settings={"faults": plan, "checkpoint_every": 0, "grad_clip": 0.2})
    spec = open_case(tmp_path, case)
    program = Program(partial(train_case, case=case), frozenset(case.settings))
    outcome = run_elastic(spec, world, train=program)
    assert not [rank for rank in outcome.ranks.values() if "error" in rank], outcome
    assert len(outcome.left) == len(places), outcome.left

    newest, _ = newest_valid(spec.checkpoints)
    assert newest is not None
    model, _ = alone(BRANCH, "adamw", 0.2)
    for name, tensor in model.state_dict().items():
        assert newest.state.model[name] == pytest.approx(tensor, abs=BY_NAME[BRANCH].tolerance)
    assert steps_of(newest.state.optimizer) == expected_steps(BRANCH)

"""Modules of the zoo in every mode and on 1, 2 and 3 ranks are those that plain torch trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from nanoray.script.data.source import ScriptData
from tests.harness.zoo import BY_NAME, SKIPS, ZOO
from tests.harness.zoo_ranks import SETTINGS, Case, Found, make_optimizer, run_cases

MODES = ("ddp", "ddp_by_hand", "zero1", "zero2", "fsdp")
STEPS = SETTINGS["max_steps"]


@cache
def alone(name: str, optimizer_name: str, clip: float = 0.0) -> tuple[nn.Module, Optimizer]:
    """Train an exhibit with plain torch, in this process, on the batches of the run."""
    exhibit = BY_NAME[name]
    model = exhibit.model()
    optimizer = make_optimizer(optimizer_name, model)
    size = SETTINGS["global_batch_size"]
    data = ScriptData(exhibit.dataset(), None, 1337, size, torch.device("cpu"))

    for step in range(STEPS):
        inputs, targets = data.train_batch(step * size, size)
        optimizer.zero_grad(set_to_none=True)
        exhibit.loss_of(model, inputs, targets).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model, optimizer


def distance(case: Case, found: Found) -> float:
    """Return how far a case's weights are from those of plain torch."""
    model, _ = alone(case.exhibit, case.optimizer, case.settings.get("grad_clip", 0.0))
    expected = model.state_dict()
    assert found.weights.keys() == expected.keys()
    far = 0.0
    for name, tensor in expected.items():
        far = max(far, (found.weights[name] - tensor).abs().max().item())
    return far


def wrong(cases: list[Case], found: list[Found]) -> list[str]:
    """Return a line for each case that failed or is far from plain torch."""
    lines = []
    for case, of_case in zip(cases, found, strict=True):
        where = f"{case.exhibit}, {case.mode}, {case.optimizer}, {case.settings}"
        refusal = BY_NAME[case.exhibit].refused.get(case.mode, "")
        if refusal and any(refusal in error for error in of_case.errors):
            continue
        if of_case.errors:
            lines.append(f"{where}: {of_case.errors[0]}")
            continue
        far = distance(case, of_case)
        if not far <= BY_NAME[case.exhibit].tolerance:
            lines.append(f"{where}: {far:.1e} away")
    return lines


def failures(world: int, modes_of: Callable[[int], Sequence[str]], folder: Path) -> str:
    """Train the zoo, each exhibit in the modes that `modes_of` returns for its number."""
    cases = []
    for number, exhibit in enumerate(ZOO):
        for mode in modes_of(number):
            if exhibit.refused.get(mode) == SKIPS:
                continue
            cases.append(Case(exhibit.name, mode, stops=(6,)))
    return "\n".join(wrong(cases, run_cases(cases, world, folder)))


@pytest.mark.parametrize(
    "world", [2, *(pytest.param(world, marks=pytest.mark.full) for world in (1, 3))]
)
def test_modules_train_as_in_plain_torch(tmp_path: Path, world: int) -> None:
    """Each module in one mode at each number of ranks, with a resume in the middle."""

    def modes_of(number: int) -> Sequence[str]:
        return ["ddp"] if world == 1 else [MODES[(number + 2 * world) % len(MODES)]]

    assert not failures(world, modes_of, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_modules_train_so_in_every_mode(tmp_path: Path, world: int, mode: str) -> None:
    assert not failures(world, lambda number: [mode], tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("mode", ["ddp", "ddp_by_hand", "zero1", "zero2"])
def test_a_resume_is_exact_where_gradients_change_their_order(tmp_path: Path, mode: str) -> None:
    """With three ranks the order of a sum shows in its last bit, and buckets decide that order."""
    name = "sometimes a branch"
    settings = {"bucket_mb": 0.001}
    cases = [Case(name, mode, stops=stops, settings=settings) for stops in ((), (5,), (3, 8))]
    unbroken, *resumed = run_cases(cases, 3, tmp_path)
    for of_case in resumed:
        assert of_case.weights.keys() == unbroken.weights.keys(), of_case.errors
        for tensor, value in unbroken.weights.items():
            assert (of_case.weights[tensor] == value).all(), tensor

"""Models of public packages train and resume as in plain torch: transformers, peft and timm."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.packages import needs
from tests.harness.zoo_packages import PACKAGES, TIMM
from tests.harness.zoo_public import MODES
from tests.ranks.test_zoo_public import wrong_kinds


@needs("transformers", "peft")
def test_models_of_packages_train_and_resume_as_in_plain_torch(tmp_path: Path) -> None:
    """Each of some models on two ranks, in one of the modes; fsdp and ddp are among them."""
    everyday = [kind for kind in PACKAGES if kind.everyday]
    lines = wrong_kinds(everyday, 2, lambda number: [MODES[-1 - number % len(MODES)]], tmp_path)
    assert not lines, "\n".join(lines)


@needs("transformers", "peft")
@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("world", [1, 2])
def test_all_models_of_packages_do_so(tmp_path: Path, world: int, mode: str) -> None:
    if world == 1 and mode != "ddp":
        pytest.skip("one rank shares nothing")
    lines = wrong_kinds(PACKAGES, world, lambda number: [mode], tmp_path)
    assert not lines, "\n".join(lines)


@needs("timm", "torchvision")
@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
def test_models_of_timm_do_so(tmp_path: Path, mode: str) -> None:
    lines = wrong_kinds(TIMM, 2, lambda number: [mode], tmp_path)
    assert not lines, "\n".join(lines)

"""Models of public packages train and resume as in plain torch: transformers and peft."""

from __future__ import annotations

from pathlib import Path

from tests.harness.packages import needs
from tests.harness.zoo_packages import PACKAGES
from tests.harness.zoo_public import MODES
from tests.ranks.test_zoo_public import wrong_kinds


@needs("transformers", "peft")
def test_models_of_packages_train_and_resume_as_in_plain_torch(tmp_path: Path) -> None:
    """Each on two ranks, in one of the modes; fsdp and ddp are among them."""
    lines = wrong_kinds(PACKAGES, 2, lambda number: [MODES[-1 - number % len(MODES)]], tmp_path)
    assert not lines, "\n".join(lines)

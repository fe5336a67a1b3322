"""Models of public packages train and resume as in plain torch: transformers and peft."""

from __future__ import annotations

from pathlib import Path

from tests.harness.packages import needs
from tests.harness.zoo import PACKAGES
from tests.harness.zoo_ranks import Case, run_cases
from tests.ranks.test_zoo import wrong


@needs("transformers", "peft")
def test_models_of_packages_train_and_resume_as_in_plain_torch(tmp_path: Path) -> None:
    """Each on two ranks, in one of the modes."""
    settings = {"bucket_mb": 0.01}
    cases = [
        Case(exhibit.name, mode, "sgd", (6,), settings)
        for exhibit, mode in zip(PACKAGES, ("fsdp", "zero2", "zero1"), strict=True)
    ]
    lines = wrong(cases, run_cases(cases, 2, tmp_path))
    assert not lines, "\n".join(lines)

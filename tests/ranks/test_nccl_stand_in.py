"""The stand-in for NCCL has what is assumed about NCCL, and in a healthy run the bits of gloo."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness.commands import forkserver
from tests.harness.nccl_assumptions import ASSUMPTIONS, Assumption, Ranks, observe
from tests.harness.nccl_stand_in import BACKEND

SHORT = ("A4", "A6", "A11", "A13")  # a second each


def marked(each: Assumption) -> Any:
    return pytest.param(each, id=each.id, marks=() if each.id in SHORT else pytest.mark.full)


@pytest.mark.parametrize("assumption", [marked(each) for each in ASSUMPTIONS])
def test_the_stand_in_has_what_is_assumed(assumption: Assumption) -> None:
    observe(assumption, Ranks(forkserver, BACKEND, "cpu", {}))

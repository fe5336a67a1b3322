"""The stand-in for NCCL has what is assumed about NCCL, and in a healthy run the bits of gloo."""

from __future__ import annotations

import pytest

from tests.harness.commands import forkserver
from tests.harness.nccl_assumptions import ASSUMPTIONS, Assumption, Ranks, observe
from tests.harness.nccl_stand_in import BACKEND


@pytest.mark.parametrize("assumption", ASSUMPTIONS, ids=lambda each: each.id)
def test_the_stand_in_has_what_is_assumed(assumption: Assumption) -> None:
    observe(assumption, Ranks(forkserver, BACKEND, "cpu", {}))

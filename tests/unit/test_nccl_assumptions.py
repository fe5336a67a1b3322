"""The list of what is assumed about NCCL: each row has a test on a GPU, and is needed by a rehearsal."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.cluster import test_nccl_rehearsal as on_ray
from tests.gpu import test_nccl_assumptions as on_gpu
from tests.harness.nccl_assumptions import ASSUMPTIONS
from tests.ranks import test_nccl_rehearsal as on_ranks
from tests.ranks import test_nccl_stand_in as on_stand_in

IDS = [each.id for each in ASSUMPTIONS]


def needed_by(module: ModuleType) -> dict[str, set[str]]:
    """Return the tests of a module, each with the assumptions that it rests on."""
    tests = {name: test for name, test in vars(module).items() if name.startswith("test_")}
    return {name: set(getattr(test, "rests_on", ())) for name, test in tests.items()}


@pytest.mark.parametrize("module", [on_gpu, on_stand_in], ids=["NCCL", "the stand-in"])
def test_each_assumption_is_checked(module: ModuleType) -> None:
    checked = []
    for name in needed_by(module):
        for mark in getattr(getattr(module, name), "pytestmark", []):
            if mark.name == "parametrize" and mark.args[0] == "assumption":
                checked += mark.args[1]
    values = [getattr(each, "values", (each,))[0] for each in checked]
    assert values == [*ASSUMPTIONS]


def test_each_assumption_is_needed_and_each_rehearsal_names_its_own() -> None:
    needed = needed_by(on_ranks) | {f"Ray: {k}": v for k, v in needed_by(on_ray).items()}
    assert not [name for name, ids in needed.items() if not ids]
    assert set().union(*needed.values()) == set(IDS)

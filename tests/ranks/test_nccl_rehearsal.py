"""NCCL's branch of recovery in real processes, over the stand-in for NCCL: nothing here has run on
NCCL.

A thread of each survivor aborts its groups, as the driver orders it. tests/cluster/test_nccl_rehearsal.py
has the same with Ray and its driver.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.harness.axes import equal, final
from tests.harness.elastic import run_elastic
from tests.harness.nccl_stand_in import BACKEND
from tests.harness.ranks import make_spec
from tests.ranks.test_abort import PATIENT, left_after, obeys
from tests.ranks.test_mirror import RECIPE, Clean, clean, ended_well, fired

__all__ = ["clean"]  # the fixture
ABORTS: dict[str, Any] = {"backend": BACKEND, "abort_nccl": True}


@pytest.mark.full
def test_wrong_sums_reach_no_weight_in_a_step_that_is_not_logged(
    text: Path, tmp_path: Path, clean: Clean
) -> None:
    """A logged step averages its loss before the update, which an aborted communicator refuses. In
    other steps nothing communicates between the gradients and the update.
    """
    seldom = {"log_every": 4, "hash_every": 4}
    faults = {"faults": "kill@rank=1,step=6,phase=backward"}
    spec = make_spec(text, tmp_path, **RECIPE | ABORTS | PATIENT | seldom | faults)
    patches = dict.fromkeys((0, 2), partial(obeys, spec.folder / "faults.jsonl"))
    outcome = run_elastic(spec, 3, patches=patches, backend=BACKEND, timeout_s=100)
    assert fired(spec) == ["backward"]
    assert not [rank for rank in outcome.ranks.values() if "error" in rank], outcome
    assert len(outcome.left) == 1, outcome.left
    assert equal(final(spec), final(clean(3, **seldom)))


@pytest.mark.full
def test_several_communicators_wait_for_the_lost_rank(
    text: Path, tmp_path: Path, clean: Clean
) -> None:
    """Each of them waits in another ring of attention, or in the sum of gradients."""
    plan = "kill@rank=1,step=5,phase=backward"
    settings = {"cp": 2, "dropout": 0.0}
    spec = make_spec(text, tmp_path, **RECIPE | ABORTS | PATIENT | settings | {"faults": plan})
    patches = dict.fromkeys((0, 2, 3), partial(obeys, spec.folder / "faults.jsonl"))
    outcome = run_elastic(spec, 4, patches=patches, backend=BACKEND, timeout_s=100)
    assert fired(spec) == ["backward"]
    ended_well(spec, outcome, clean(4, **settings), 1)


@pytest.mark.parametrize(
    "phase",
    [
        "exchange_vote",
        pytest.param("backward", marks=pytest.mark.full),
        pytest.param("forward", marks=pytest.mark.full),
        pytest.param("eval", marks=pytest.mark.full),
        pytest.param("checkpoint", marks=pytest.mark.full),
    ],
)
def test_the_others_leave_a_frozen_rank(
    text: Path, tmp_path: Path, clean: Clean, phase: str
) -> None:
    """SIGSTOP, and it stays so until the run is over: votes over gloo must end by the order, too."""
    step = 4 if phase in ("eval", "checkpoint") else 5
    faults = f"stop@rank=1,step={step},phase={phase}"
    spec = make_spec(text, tmp_path, **RECIPE | ABORTS | PATIENT | {"faults": faults})
    patches = dict.fromkeys((0, 2), partial(obeys, spec.folder / "faults.jsonl"))
    outcome = run_elastic(spec, 3, patches=patches, frozen=1, backend=BACKEND, timeout_s=100)
    assert fired(spec) == [phase]
    ended_well(spec, outcome, clean(3), 1)
    assert max(left_after(spec, slot) for slot in (0, 2)) < 30

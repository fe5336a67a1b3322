"""NCCL's branch of recovery on Ray, over a stand-in for NCCL on CPU: nothing here has run on NCCL.

A rank that is lost closes no connection that its peers' collectives notice, so the driver must
order them to abort. tests/gpu checks what is assumed about NCCL.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nanoray.faults.inject import parse_plan
from nanoray.machine.fault_points import RANK_POINTS
from tests.cluster.test_kill_points import ELSEWHERE, FLAGS, IN_RECOVERY, clean, plan_of
from tests.harness.cluster import (
    Cluster,
    assert_same_run,
    finish,
    injected,
    no_actors_left,
    reports,
    start,
    summary,
)
from tests.harness.nccl_stand_in import BACKEND, REMOTE_ERROR

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
OVER_STAND_IN = ("--backend", BACKEND, "--abort_nccl", "true", "--timeout_s", "30")
PLACES = sorted(RANK_POINTS.keys() - ELSEWHERE - {"last"})
NEWCOMER_PLACES = sorted(IN_RECOVERY - {"leave", "wait"})


def rehearse(
    cluster: Cluster, recipe: Path, out: Path, plan: str, *flags: str, **env: str
) -> list[dict[str, Any]]:
    """Train with a plan of faults; each fires, and no actor is left. Return the driver's reports."""
    command = start(
        cluster, recipe, out, *FLAGS, "--max_failures", "99", *flags, "--faults", plan, **env
    )
    code, output = finish(command, 1500)
    assert code == 0, output
    assert summary(out)["backend"] == BACKEND
    fired = Counter((event["kind"], event["rank"], event["phase"]) for event in injected(out))
    planned = Counter((fault.kind, fault.rank, fault.phase) for fault in parse_plan(plan))
    assert fired == planned, output
    assert no_actors_left(cluster)
    return reports(out)


def assert_in_place(found: Sequence[dict[str, Any]]) -> None:
    """No step was repeated, because one rank at least kept the state. `found`: the reports."""
    assert {report["recovery"] for report in found} <= {"", "in_place"}, found
    assert not [report for report in found if report["steps_repeated"]], found


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "newcomer", "places"),
    [
        pytest.param("kill", False, ["agreed"], id="one place"),
        pytest.param("kill", False, PLACES, id="kill", marks=pytest.mark.full),
        pytest.param("kill", True, NEWCOMER_PLACES, id="kill a newcomer", marks=pytest.mark.full),
        pytest.param("stop", False, PLACES, id="stop", marks=pytest.mark.full),
        pytest.param("stop", True, NEWCOMER_PLACES, id="stop a newcomer", marks=pytest.mark.full),
    ],
)
def test_ranks_end_at_every_point(
    cluster: Cluster, recipe: Path, tmp_path: Path, kind: str, newcomer: bool, places: list[str]
) -> None:
    plan, steps = plan_of(places, kind, newcomer)
    flags = ("--max_steps", str(steps), "--hang_timeout", "6" if kind == "stop" else "60")
    expected = clean(recipe, tmp_path / "clean", steps)
    found = rehearse(cluster, recipe, tmp_path / "out", plan, *OVER_STAND_IN, *flags)
    assert_in_place(found)
    assert_same_run(tmp_path / "out", expected)


@pytest.mark.full
def test_the_network_reports_a_lost_peer(cluster: Cluster, recipe: Path, tmp_path: Path) -> None:
    """The next collective raises the network's error, with or before the order."""
    plan = "kill@rank=1,step=4,phase=backward;kill@rank=2,step=8,phase=eval"
    expected = clean(recipe, tmp_path / "clean", 12)
    env = {REMOTE_ERROR: "1"}
    flags = (*OVER_STAND_IN, "--max_steps", "12")
    found = rehearse(cluster, recipe, tmp_path / "out", plan, *flags, **env)
    assert_in_place(found)
    assert_same_run(tmp_path / "out", expected)


@pytest.mark.full
def test_without_abort_the_watchdog_ends_who_waits_for_a_frozen_rank(
    cluster: Cluster, recipe: Path, tmp_path: Path
) -> None:
    """The others are ended by SIGABRT after timeout_s, before the driver looks for a hang."""
    plan = "stop@rank=1,step=10,phase=backward"
    flags = ("--backend", BACKEND, "--max_steps", "16", "--timeout_s", "5", "--hang_timeout", "60")
    expected = clean(recipe, tmp_path / "clean", 16)
    env = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100"}
    (report,) = rehearse(cluster, recipe, tmp_path / "out", plan, *flags, **env)
    assert report["recovery"] == "restart"
    assert report["signal"] == "SIGABRT", report
    assert_same_run(tmp_path / "out", expected)

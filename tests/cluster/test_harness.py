"""The tests' own harness: what a failed test has left does not disturb the next one."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.cluster import (
    Cluster,
    commands_end_here,
    launch,
    no_actors_left,
    processes_of_session,
    start,
    trains,
)
from tests.harness.commands import ROOT, wait_for

ALL_CPUS = ("--workers", "2", "--cpus_per_worker", "1", "--placement_timeout_s", "30")


@pytest.mark.full
def test_a_run_that_a_failed_test_has_left_is_ended(
    cluster: Cluster, recipe: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It ends with its actors, and what it had printed is shown; the next run finds all CPUs free."""
    with commands_end_here():
        driver = start(cluster, recipe, tmp_path / "left", *ALL_CPUS, "--max_steps", "100000")
        wait_for(lambda: trains(tmp_path / "left"), process=driver)
    assert driver.poll() is not None
    assert f"(pid {driver.pid}), which had printed:\nray    cluster at" in capfd.readouterr().out
    assert no_actors_left(cluster, 0.0)
    code, output = launch(cluster, recipe, tmp_path / "next", *ALL_CPUS)
    assert code == 0, output


@pytest.mark.full
def test_a_run_that_does_not_obey_is_killed(cluster: Cluster, recipe: Path, tmp_path: Path) -> None:
    with commands_end_here(grace_s=0.5):
        driver = start(
            cluster,
            recipe,
            tmp_path,
            *ALL_CPUS,
            "--faults",
            "hang@rank=1,step=3",
            "--hang_timeout",
            "0",
        )
        wait_for(lambda: any(tmp_path.glob("*/faults.jsonl")), process=driver)
    assert driver.poll() == -9
    assert no_actors_left(cluster, 0.0)


@pytest.mark.full
def test_a_cluster_ends_with_the_tests_that_were_killed() -> None:
    """As after Ctrl-C, when pytest-xdist ends its workers and no fixture is left to clean up."""
    code = "from tests.harness.cluster import ray_head\nwith ray_head(dashboard=False) as head:\n"
    code += "    print(head.session, flush=True)\n    input()"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as tests:
        assert tests.stdout is not None
        session = int(tests.stdout.readline())
        of_head = Path(f"/proc/{session}/environ").read_bytes().decode().split("\0")
        os.kill(tests.pid, signal.SIGKILL)
    (temp,) = [
        value
        for name, _, value in (variable.partition("=") for variable in of_head)
        if name == "TMPDIR"
    ]
    wait_for(lambda: not processes_of_session(session), 60)
    assert temp.startswith("/tmp/nr-")
    shutil.rmtree(temp)

"""A head that is gone for good, as a deleted head pod, and a new one whose workers have not joined
yet.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path

import pytest

from nanoray.checkpoint.resume import newest_valid
from tests.harness.cluster import (
    SLOW_STEP,
    TWO_RANKS,
    alive,
    assert_same_run,
    finish,
    fired,
    losses,
    pid_of,
    processes_of_session,
    ray_head,
    ray_node,
    start,
    start_slow_step,
    summary,
    trains,
    undisturbed,
)
from tests.harness.commands import wait_for
from tests.harness.ports import free_port
from tests.harness.ranks import only_run

FLAGS = (*TWO_RANKS, "--resume", "auto")
# The other rank waits in a collective as long as the slow step takes.
LOST = (*FLAGS, "--placement_timeout_s", "170", "--timeout_s", "60", "--hang_timeout", "60")


@pytest.mark.full
def test_a_lost_head_costs_no_step(recipe: Path, tmp_path: Path) -> None:
    """Head and driver are killed. The ranks on the other node save and end.

    The same command is given to a new head before its workers have joined: it waits for them, and
    goes on from there.
    """
    out = tmp_path / "runs"
    with ray_head("--num-cpus=0") as cluster, ray_node(cluster, "--num-cpus=2"):
        # The slow step outlasts the ranks' patience.
        driver = start_slow_step(cluster, recipe, out, *LOST, seconds=25)
        ranks = [pid_of(out, rank) for rank in (0, 1)]
        together = [driver.pid, *processes_of_session(cluster.session)]
        # A head that outlives its driver would end the ranks
        for signum in (signal.SIGSTOP, signal.SIGKILL):
            for pid in together:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signum)
        wait_for(lambda: not any(alive(pid) for pid in ranks))
        driver.communicate()
    newest, damaged = newest_valid(only_run(out) / "checkpoints")
    assert newest is not None
    assert newest.state.meta["step"] in (12, 13), (
        "the slow step, or the next: its vote was under way"
    )
    assert not damaged

    with ray_head("--num-cpus=0") as cluster:
        driver = start(cluster, recipe, out, *LOST, "--faults", f"{SLOW_STEP},seconds=8")
        wait_for(lambda: "wait   at most 170 s for more nodes" in driver.output, process=driver)
        with ray_node(cluster, "--num-cpus=2"):
            code, output = finish(driver)
            assert code == 0, output
    undisturbed(recipe, tmp_path / "undisturbed", *FLAGS)
    assert re.search(
        r"wait   .* for more nodes: no room for workers = 2; total per node: \S+ has nothing\n",
        output,
    )
    assert summary(out)["exit_reason"] == "finished"
    assert fired(out) == ["slow"], "no step was done again"
    assert_same_run(out, tmp_path / "undisturbed")


ENDLESS = (
    "--workers",
    "2",
    "--spares",
    "0",
    "--max_steps",
    "100000",
    "--log_every",
    "1",
    "--checkpoint_every",
    "20",
)
ENDLESS += (
    "--resume",
    "auto",
    "--placement_timeout_s",
    "170",
    "--head_timeout_s",
    "170",
    "--cpus_per_worker",
    "1",
)


@pytest.mark.full
@pytest.mark.parametrize("with_the_head", [False, True])
def test_a_new_head_in_the_place_of_the_old_one(
    recipe: Path, tmp_path: Path, with_the_head: bool
) -> None:
    """The head is killed, and one without its memory answers at the same port. The ranks live on
    another node, or not.

    Ray would abort the driver, without a word. The driver says so instead, and the run goes on with
    the new head.
    """
    out, port = tmp_path / "runs", free_port()
    with contextlib.ExitStack() as stack:
        old = stack.enter_context(
            ray_head(f"--port={port}", f"--num-cpus={2 if with_the_head else 0}")
        )
        if not with_the_head:
            stack.enter_context(ray_node(old, "--num-cpus=2"))
        driver = start(old, recipe, out, *ENDLESS)
        wait_for(lambda: trains(out) and max(losses(out)) > 40, process=driver)
        ranks = [pid_of(out, rank) for rank in (0, 1)]
        for pid in processes_of_session(old.session):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not old.runs)
        if with_the_head:
            wait_for(lambda: not any(alive(pid) for pid in ranks))  # soon after their raylet
            code, output = finish(driver)  # nothing is left to wait for
        else:
            assert all(alive(pid) for pid in ranks)
        with ray_head(f"--port={port}", "--num-cpus=2", dashboard=False) as new:
            assert new.address == old.address
            if with_the_head:
                assert (
                    "Gave up: the cluster's head is gone; start it again, and this run with "
                    "--resume auto" in output
                )
            else:
                code, output = finish(driver)
                told = "another head has taken the place of the cluster's head, and does not know this run"
                assert f"stop     {told}: stopping after this step; what is done is saved" in output
            assert code == (1 if with_the_head else 143), output
            assert "Traceback" not in output
            assert "StackTrace" not in output, "of Ray's core, which ends the process"
            wait_for(lambda: not any(alive(pid) for pid in ranks))

            newest, damaged = newest_valid(only_run(out) / "checkpoints")
            assert newest is not None
            assert not damaged
            saved, before = newest.state.meta["step"], losses(out)
            if with_the_head:
                assert max(before) - 40 < saved <= max(before), (
                    "the newest, or the one before it was under way"
                )
            else:
                assert saved == max(before), "no step is lost"

            driver = start(new, recipe, out, *ENDLESS)
            wait_for(lambda: max(losses(out)) > max(before) + 20, process=driver)
            driver.terminate()
            code, output = finish(driver)
    assert code == 143, output
    assert f"step_{saved:08d}" in output
    found = losses(out)
    assert sorted(found) == list(range(1, max(found) + 1))
    assert all(found[step] == loss for step, loss in before.items()), (
        "bit for bit, also what was done again"
    )

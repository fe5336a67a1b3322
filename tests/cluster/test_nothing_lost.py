"""Faults during recovery, and around the driver: the ranks that are left save before anything ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nanoray.checkpoint.resume import newest_valid
from tests.cluster.test_cluster_faults import FAST_HEALTH, gcs_server
from tests.harness.cluster import (
    ENDLESS,
    ROOT,
    Cluster,
    finish,
    fired,
    losses,
    no_actors_left,
    pid_of,
    processes_of_session,
    ray_head,
    ray_node,
    reports,
    start,
    summary,
    trains,
)
from tests.harness.commands import wait_for
from tests.harness.ranks import only_run

LONG = (
    *ENDLESS,
    "--log_every",
    "1",
    "--sample_tokens",
    "0",
    "--spares",
    "0",
    "--checkpoint_every",
    "0",
)
ONE_EACH = (*LONG, "--placement", "spread", "--cpus_per_worker", "1")


def saved_step(out: Path) -> int:
    newest, damaged = newest_valid(only_run(out) / "checkpoints")
    assert newest is not None
    assert not damaged
    return int(newest.state.meta["step"])


def end_node(node: subprocess.Popen[bytes]) -> None:
    """End a node as a lost machine does: raylet, agents and rank at once."""
    for pid in processes_of_session(node.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.full
def test_a_stop_while_no_node_has_room_for_a_lost_rank(recipe: Path, tmp_path: Path) -> None:
    with ray_head("--num-cpus=1", **FAST_HEALTH) as cluster, ray_node(cluster) as node:
        driver = start(cluster, recipe, tmp_path, *ONE_EACH, "--replace_timeout", "300")
        wait_for(lambda: trains(tmp_path), process=driver)
        end_node(node)
        wait_for(lambda: "failure  rank" in driver.output, process=driver)
        done = max(losses(tmp_path))
        driver.terminate()
        asked = time.monotonic()
        code, output = finish(driver)
        assert time.monotonic() - asked < 60, "half of KubeRay's grace period"
    assert code == 143, output
    assert "save     1 rank(s) are left and hold the run's state" in output
    assert saved_step(tmp_path) == summary(tmp_path)["steps"] >= done
    assert [r["recovery"] for r in reports(tmp_path)] == ["none"]


@pytest.mark.full
@pytest.mark.skipif(
    os.geteuid() != 0, reason="hides a folder from a node by a mount of its own: only root may"
)
def test_a_node_without_the_shared_folder_is_passed_over(recipe: Path, tmp_path: Path) -> None:
    """The replacement starts on a node that does not see the run's folder; a third node does."""
    out = tmp_path / "out"
    out.mkdir()
    blind = ("unshare", "--mount", "sh", "-c", f'mount -t tmpfs none "{out}" && exec "$@"', "sh")
    # Forked workers would see what the tests see.
    with (
        ray_head("--num-cpus=1", forked=False, **FAST_HEALTH) as cluster,
        contextlib.ExitStack() as nodes,
    ):
        first = nodes.enter_context(ray_node(cluster))
        driver = start(cluster, recipe, out, *ONE_EACH, "--replace_timeout", "300")
        wait_for(lambda: trains(out), process=driver)
        nodes.enter_context(ray_node(cluster, before=blind))
        end_node(first)
        wait_for(lambda: "ConfigError" in driver.output, process=driver)
        nodes.enter_context(ray_node(cluster))
        wait_for(lambda: "recover  " in driver.output, process=driver)
        driver.terminate()
        code, output = finish(driver)
    assert code == 143, output
    assert "does not see the run's folder" in output
    assert [(r["cause"], r["recovery"]) for r in reports(out)][1:] == [("refused", "in_place")]
    steps = sorted(losses(out))
    assert steps == list(range(1, steps[-1] + 1)), "no step is missing or done twice"


@pytest.mark.full
@pytest.mark.parametrize(("first", "second"), [(2, 0), pytest.param(0, 1, marks=pytest.mark.full)])
def test_a_rank_dies_while_the_replacement_of_another_is_awaited(
    cluster: Cluster, recipe: Path, tmp_path: Path, first: int, second: int
) -> None:
    ranks = ("--workers", "3", "--cpus_per_worker", "0.5", "--checkpoint_every", "0")
    driver = start(cluster, recipe, tmp_path, *LONG, *ranks)
    wait_for(lambda: trains(tmp_path), process=driver)
    pids = [pid_of(tmp_path, rank) for rank in range(3)]
    os.kill(pids[first], signal.SIGKILL)
    wait_for(lambda: "failure  " in driver.output, process=driver)
    os.kill(pids[second], signal.SIGKILL)
    wait_for(lambda: "recover  " in driver.output, process=driver)
    driver.terminate()
    code, output = finish(driver)
    assert code == 143, output
    assert output.count("died in") == 2, "both deaths are printed"
    assert "restart " not in output
    found = reports(tmp_path)
    assert [r["rank"] for r in found] == [first, second] or len(found[0]["consequences"]) == 1
    assert found[-1]["steps_repeated"] <= 1, (
        "only a step that both of the lost ranks, and no other, had completed"
    )
    steps = sorted(losses(tmp_path))
    assert steps == list(range(1, steps[-1] + 1))
    assert no_actors_left(cluster)


@pytest.mark.full
def test_a_rank_dies_while_the_head_is_frozen(recipe: Path, tmp_path: Path) -> None:
    """Its port accepts connections, and no request is answered. The other rank saves."""
    with ray_head(dashboard=False) as cluster:
        driver = start(cluster, recipe, tmp_path, *LONG)
        wait_for(lambda: trains(tmp_path), process=driver)
        victim = pid_of(tmp_path, 1)
        os.kill(gcs_server(cluster), signal.SIGSTOP)
        os.kill(victim, signal.SIGKILL)
        done, frozen = max(losses(tmp_path)), time.monotonic()
        code, output = finish(driver)
        assert time.monotonic() - frozen < 90
    assert code in (1, 143), output
    assert "the cluster's head is gone" in output or "the cluster's head has not answered" in output
    assert "failure  rank 1" in output
    assert saved_step(tmp_path) >= done - 1


def run_in_shell(cluster: Cluster, recipe: Path, out: Path, tail: str) -> tuple[int, str]:
    """Run nanoray.launch for 60 steps with a shell's redirections; return the shell's exit code and
    its output.
    """
    command = (
        f'"$0" -m nanoray.launch --config "$1" --out_dir "$2" --max_steps 60 --log_every 1 {tail}'
    )
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}", sys.executable, str(recipe), str(out)],
        cwd=ROOT,
        env=cluster.env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.full
@pytest.mark.parametrize("tail", ["> /dev/full", "2>&1 | head -n 3"])
def test_output_that_cannot_be_written_does_not_end_a_run(
    cluster: Cluster, recipe: Path, tmp_path: Path, tail: str
) -> None:
    code, output = run_in_shell(cluster, recipe, tmp_path, tail)
    assert code == 0, output
    assert summary(tmp_path)["exit_reason"] == "finished"
    assert sorted(losses(tmp_path)) == list(range(1, 61))
    if "full" in tail:
        assert (
            output.count(
                "warning  what this command prints is lost (No space left on device); it goes on"
            )
            == 1
        )
    assert no_actors_left(cluster)


@pytest.mark.full
def test_a_closed_terminal_stops_the_run_with_a_checkpoint(
    cluster: Cluster, recipe: Path, tmp_path: Path
) -> None:
    driver = start(cluster, recipe, tmp_path, *LONG)
    wait_for(lambda: trains(tmp_path), process=driver)
    os.kill(driver.pid, signal.SIGHUP)
    code, output = finish(driver)
    assert code == 128 + signal.SIGHUP, output
    assert saved_step(tmp_path) == summary(tmp_path)["steps"] == max(losses(tmp_path))
    assert no_actors_left(cluster)


@pytest.mark.full
def test_a_full_disk_during_a_recovery(cluster: Cluster, recipe: Path, tmp_path: Path) -> None:
    """Neither the attempt's number nor the report can be written: the rank is replaced all the
    same.
    """
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = (
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(disk)], check=False
        ).returncode
        == 0
    )
    if not mounted:
        pytest.skip("cannot mount a small file system here")
    try:
        driver = start(cluster, recipe, disk, *LONG, "--tensorboard", "false")
        # From now on steps are slow, and the record of each has room in the page of the first one.
        wait_for(lambda: fired(disk), process=driver)
        fill = disk / "fill"
        with contextlib.suppress(OSError), fill.open("wb", buffering=0) as file:
            while True:
                file.write(b"\0" * 4096)
        os.kill(pid_of(disk, 1), signal.SIGKILL)
        wait_for(lambda: "recover  " in driver.output, process=driver)
        fill.unlink()
        driver.terminate()
        code, output = finish(driver)
        assert code == 143, output
        assert saved_step(disk) == summary(disk)["steps"]
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
    assert no_actors_left(cluster)


@pytest.mark.full
def test_a_stop_while_resources_are_awaited(cluster: Cluster, recipe: Path, tmp_path: Path) -> None:
    holder = start(cluster, recipe, tmp_path / "a", *LONG, "--cpus_per_worker", "1")
    wait_for(lambda: trains(tmp_path / "a"), process=holder)
    waits = start(
        cluster,
        recipe,
        tmp_path / "b",
        *LONG,
        "--cpus_per_worker",
        "1",
        "--placement_timeout_s",
        "300",
    )
    wait_for(
        lambda: any(g["state"] == "PENDING" for g in cluster.states("placement_groups")),
        process=waits,
    )
    waits.terminate()
    asked = time.monotonic()
    code, output = finish(waits)
    assert time.monotonic() - asked < 20
    assert code == 143, output
    assert "stop     before any rank had trained: nothing to save" in output
    assert not (tmp_path / "b").exists() or not any((tmp_path / "b").iterdir()), "no run was begun"
    holder.terminate()
    assert finish(holder)[0] == 143
    assert no_actors_left(cluster)

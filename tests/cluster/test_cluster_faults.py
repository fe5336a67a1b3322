"""What happens around the ranks: a frozen driver, a lost node, a head that is gone, memory that
runs out.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanoray.checkpoint.resume import newest_valid
from tests.harness.cluster import (
    ENDLESS,
    Cluster,
    alive,
    assert_same_run,
    finish,
    fired,
    launch,
    losses,
    no_actors_left,
    only_report,
    pid_of,
    process_state,
    processes_of_session,
    ray_head,
    ray_node,
    start_training,
    summary,
    undisturbed,
)
from tests.harness.commands import wait_for
from tests.harness.ranks import only_run


@pytest.mark.full
def test_ranks_without_a_driver_stop_with_a_checkpoint(
    cluster: Cluster, recipe: Path, tmp_path: Path
) -> None:
    """A frozen driver (its node, or the network to it) asks nobody anything: after 20 s the ranks
    stop. If it thaws, it reports that, charges no failure, and starts them again from there.
    """
    flags = (*ENDLESS, "--log_every", "10", "--sample_tokens", "0")
    driver = start_training(cluster, recipe, tmp_path, *flags)
    pids = [pid_of(tmp_path, rank) for rank in (0, 1)]
    os.kill(driver.pid, signal.SIGSTOP)
    try:
        frozen = time.monotonic()
        wait_for(lambda: not any(alive(pid) for pid in pids))
        assert time.monotonic() - frozen > 15
        newest, damaged = newest_valid(only_run(tmp_path) / "checkpoints")
        assert newest is not None
        assert newest.state.meta["step"] > 0
        assert not damaged
        step = newest.state.meta["step"]
        os.kill(driver.pid, signal.SIGCONT)
        wait_for(lambda: max(losses(tmp_path)) > step, process=driver)
        driver.terminate()
        code, output = finish(driver)
    finally:
        if driver.poll() is None:
            os.kill(driver.pid, signal.SIGKILL)
            driver.communicate()
    assert code == 143, output
    assert "no call of this driver reached it for 20 s" in output
    assert "restart  0/3 from the newest checkpoint" in output
    report = only_report(tmp_path, output)
    assert (report["cause"], report["steps_repeated"]) == ("driver_silent", 0)
    assert no_actors_left(cluster)


FAST_HEALTH = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}


@pytest.mark.full
def test_a_lost_node_shrinks_the_group_and_a_new_one_lets_it_grow(
    recipe: Path, tmp_path: Path
) -> None:
    """Two nodes with room for one rank each; one is killed, and later another one joins."""
    with ray_head("--num-cpus=1", **FAST_HEALTH) as cluster:
        flags = (
            "--placement",
            "spread",
            "--recovery",
            "shrink",
            "--replace_timeout",
            "1",
            "--max_steps",
            "100000",
        )
        flags += ("--log_every", "20", "--cpus_per_worker", "1", "--spares", "0")
        with ray_node(cluster) as node:
            driver = start_training(cluster, recipe, tmp_path, *flags)
            for pid in processes_of_session(node.pid):  # raylet, agents and the rank
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            wait_for(lambda: (only_run(tmp_path) / "faults.jsonl").exists(), process=driver)
        with ray_node(cluster):
            wait_for(lambda: "grow " in driver.output, process=driver)
            grown = max(losses(tmp_path))
            wait_for(lambda: max(losses(tmp_path)) > grown + 20, process=driver)
            driver.terminate()
            _, output = finish(driver)
    report = only_report(tmp_path, output)
    lost = f"until rank {report['rank']} is back"  # either may have sat there
    assert f"shrink   1/3 2 -> 1 rank(s) with the same global batch, {lost}" in output
    assert "grow     1 -> 2 ranks; no step is repeated" in output
    assert (report["recovery"], report["steps_repeated"]) == ("shrink", 0)
    result = summary(tmp_path)
    assert (result["exit_reason"], result["exit_code"], result["world_size"]) == (
        "stopped",
        143,
        2,
    ), output
    last = result["steps"]
    assert sorted(losses(tmp_path)) == sorted(
        {1, *range(20, last + 1, 20)} | ({last} & losses(tmp_path).keys())
    )


@pytest.mark.full
def test_a_rank_on_a_frozen_node_is_left_by_order(recipe: Path, tmp_path: Path) -> None:
    """Ray's health check reports the node lost. Its processes live, and none of their connections
    closes.
    """
    flags = (
        "--placement",
        "spread",
        "--cpus_per_worker",
        "1",
        "--spares",
        "0",
        "--max_steps",
        "300",
    )
    flags += ("--hang_timeout", "0", "--timeout_s", "300", "--checkpoint_every", "0")
    with ray_head(**FAST_HEALTH) as cluster:
        undisturbed(recipe, tmp_path / "clean", *flags)
        with ray_node(cluster) as node:
            driver = start_training(cluster, recipe, tmp_path / "out", *flags)
            (rank,) = {pid_of(tmp_path / "out", rank, driver) for rank in (0, 1)} & {
                *processes_of_session(node.pid)
            }
            for pid in (frozen := processes_of_session(node.pid)):
                os.kill(pid, signal.SIGSTOP)
            code, output = finish(driver)
            assert process_state(rank) == "T", "until the end"
            for pid in frozen:
                os.kill(pid, signal.SIGKILL)
            assert code == 0, output
    report = only_report(tmp_path / "out", output)
    assert (report["recovery"], report["steps_repeated"], report["consequences"]) == (
        "in_place",
        0,
        [],
    ), output
    survivor = (only_run(tmp_path / "out") / "logs" / f"rank{1 - report['rank']}.log").read_text()
    assert survivor.count("leaving the group") == 1
    assert_same_run(tmp_path / "out", tmp_path / "clean")


def gcs_server(cluster: Cluster) -> int:
    """The pid of the head's server."""
    commands = {
        pid: Path(f"/proc/{pid}/cmdline").read_bytes()
        for pid in processes_of_session(cluster.session)
    }
    (found,) = [pid for pid, command in commands.items() if b"/gcs_server\0" in command]
    return found


@pytest.mark.full
def test_a_head_that_does_not_answer_stops_the_run_with_a_checkpoint(
    recipe: Path, tmp_path: Path
) -> None:
    """Ray itself would end the driver after a minute, without a word and without a checkpoint."""
    with ray_head(dashboard=False) as cluster:
        driver = start_training(cluster, recipe, tmp_path, *ENDLESS, "--log_every", "10")
        os.kill(gcs_server(cluster), signal.SIGSTOP)
        code, output = finish(driver)
        assert code == 143, output
        assert (
            "the cluster's head has not answered for 15 s: stopping after this step; what is done "
            "is saved" in output
        )
        result = summary(tmp_path)
        assert result["exit_reason"] == "stopped"
        assert (
            only_run(tmp_path) / "checkpoints" / f"step_{result['steps']:08d}" / "manifest.json"
        ).exists()


@pytest.fixture
def memory_lock() -> Iterator[None]:
    """Keep other suites from taking so much at the same time: it would count as well."""
    with Path(tempfile.gettempdir(), f"nanoray-tests-{os.getuid()}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.mark.full
@pytest.mark.usefixtures("memory_lock")
def test_a_rank_that_takes_too_much_memory_is_named(recipe: Path, tmp_path: Path) -> None:
    total, available = memory_bytes()
    threshold = (total - available + (3 << 30)) / total
    if threshold > 0.95:
        pytest.skip(
            f"{available >> 30} GiB of {total >> 30} are free: too little to let a rank take 4"
        )
    watched = {
        "RAY_memory_usage_threshold": f"{threshold:.3f}",
        "RAY_memory_monitor_refresh_ms": "100",
    }
    with ray_head(dashboard=False, **watched) as cluster:
        plan = "oom@rank=1,step=9,mib=6000"
        code, output = launch(cluster, recipe, tmp_path, "--faults", plan, "--recovery", "restart")
        assert code == 0, output
        assert fired(tmp_path) == ["oom"]
        report = only_report(tmp_path, output)
        assert report["cause"] == "out_of_memory"
        assert (
            "was ended by Ray's memory monitor" in output
            or "ended by Ray's memory monitor" in report["title"]
        )
        assert "Memory on the node" in output, "who used how much"


def memory_bytes() -> tuple[int, int]:
    """Total and available memory of this machine."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return tuple(int(lines[key].split()[0]) << 10 for key in ("MemTotal", "MemAvailable"))  # type: ignore[return-value]


SCRIPT = """
import sys, torch, nanoray

def main(run):
    x = torch.randn(200, 3)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    nanoray.RuntimeEngine(model, optimizer, run, torch.nn.functional.mse_loss).fit(data, data, steps=30)

if __name__ == "__main__":
    settings = {"workers": 2, "cpus_per_worker": 0.5, "spares": 0, "tensorboard": False, "max_steps": 30}
    settings |= {"placement_timeout_s": 60}
    code = nanoray.launch(main, settings | {"out_dir": sys.argv[1], "faults": sys.argv[2]})
    print(f"the script goes on after {code}", flush=True)
    raise SystemExit(7)
"""

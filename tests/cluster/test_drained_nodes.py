"""Nodes that are taken away while a run trains, as Kubernetes takes a pod: SIGTERM, a notice, and
then the end.

Each cluster has a head of its own, on which the driver runs. `ray start --block` gets the SIGTERM,
as in a pod.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.cluster import (
    TWO_RANKS,
    Cluster,
    assert_same_run,
    finish,
    in_driver,
    living_nodes,
    only_report,
    pid_of,
    processes_of_session,
    ray_head,
    ray_node,
    start_slow_step,
    start_training,
    summary,
    undisturbed,
)
from tests.harness.commands import wait_for
from tests.harness.ranks import only_run

NOTICE_S = 9  # from SIGTERM until `ray start` ends what is left on its node
FLAGS = ("--cpus_per_worker", "1", *TWO_RANKS)


@pytest.fixture(scope="module")
def head() -> Iterator[Cluster]:
    """A head on which one rank may run."""
    with ray_head("--num-cpus=1", RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=str(NOTICE_S)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def clean(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder's parent of a run to which nothing happens."""
    out = tmp_path_factory.mktemp("undisturbed")
    undisturbed(recipe, out, *FLAGS)
    return out


def drain(cluster: Cluster, node: str, *flags: str) -> None:
    """Announce a node's end, as an autoscaler or a spot notice does; nothing ends the node."""
    command = [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "drain-node",
        f"--address={cluster.address}",
    ]
    command += [
        f"--node-id={node}",
        "--reason=DRAIN_NODE_REASON_PREEMPTION",
        "--reason-message=test",
        *flags,
    ]
    drained = subprocess.run(
        command, env=cluster.env, capture_output=True, text=True, timeout=200, check=False
    )
    assert drained.returncode == 0, drained.stdout + drained.stderr


@pytest.mark.full
def test_a_deleted_worker_pod_costs_only_its_rank(
    head: Cluster, recipe: Path, clean: Path, tmp_path: Path
) -> None:
    """SIGTERM to its `ray start --block`; the operator's new pod joins later. The job goes on: no
    step is repeated.
    """
    with ray_node(head) as pod:
        # The rank must leave before the notice is over, so the step is shorter.
        patient = (*FLAGS, "--replace_timeout", "300")
        driver = start_slow_step(head, recipe, tmp_path, *patient, seconds=6)
        pids = [pid_of(tmp_path, rank) for rank in (0, 1)]
        pod.send_signal(signal.SIGTERM)
        wait_for(lambda: "is being drained" in driver.output, process=driver)
        with ray_node(head):
            code, output = finish(driver)
    assert code == 0, output
    report = only_report(tmp_path, output)
    rank = report["rank"]
    assert (report["cause"], report["recovery"], report["steps_repeated"]) == (
        "drained",
        "in_place",
        0,
    ), output
    assert re.search(
        rf"drain    node \w{{8}} \([\d.]+\) with rank {rank} is being drained, \d s left", output
    )
    assert f"replace  0/3 rank {rank} (pid" in output, "not charged to --max_failures"
    assert pid_of(tmp_path, 1 - rank) == pids[1 - rank], "the other rank kept its process"
    assert pid_of(tmp_path, rank) != pids[rank]
    assert_same_run(tmp_path, clean)
    assert summary(tmp_path)["exit_reason"] == "finished"


SPARES = """
from pathlib import Path
from nanoray.config import make_config
from nanoray.data.dataset import DatasetInfo
from nanoray.launch.recovery.actors import ActorPool
from nanoray.launch.placement import Placement
from nanoray.checkpoint.run_folder import RunSpec
config = make_config(
    {"global_batch_size": 12, "workers": 2, "cpus_per_worker": 1}
)
place = Placement.make(config)
data = DatasetInfo("words", "", Path("/none"), "uint16", 65, 1000, 100, "", "", {})
pool = ActorPool(RunSpec(config, data, Path("/none/run"), 0.0), place)
pool.create()
pool.add_spares(4)
ranks = [ray.get(actor.ready.remote())["node"] for actor in pool.actors.values()]
spares = [ray.get(spare.ready)["node"] for spare in pool.spares]
pool.end()
print(json.dumps([ranks, spares]))
"""


@pytest.mark.full
def test_spares_are_on_the_nodes_of_ranks_and_not_on_the_head(head: Cluster) -> None:
    """The head has a CPU to spare. Ray itself would place an actor that asks for nothing anywhere."""
    with ray_node(head, "--num-cpus=2"):
        _, node = living_nodes(head)
        ranks, spares = in_driver(head, SPARES)
    assert ranks == [node] * 2
    assert spares == [node] * 4


@pytest.mark.full
def test_a_drained_rank_moves_at_once_where_there_is_room(
    head: Cluster, recipe: Path, clean: Path, tmp_path: Path
) -> None:
    """A notice without a deadline, and another node with a free CPU: nobody waits until the drained
    node is gone.
    """
    with ray_node(head):
        # The step lasts until the other node is up and the notice is given, on a busy machine too.
        driver = start_slow_step(head, recipe, tmp_path, *FLAGS, seconds=25)
        drained = living_nodes(head)[1]
        with ray_node(head):
            drain(head, drained)
            code, output = finish(driver)
            (node,) = [node for node in head.states("nodes") if node["node_id"] == drained]
    assert code == 0, output
    report = only_report(tmp_path, output)
    assert (report["cause"], report["recovery"], report["steps_repeated"]) == (
        "drained",
        "in_place",
        0,
    ), output
    assert report["node"] == drained
    assert not 0 < node["end_time_ms"] < 1e3 * report["time"], (
        "Ray ends a drained node when it has nothing left to do"
    )
    assert_same_run(tmp_path, clean)


@pytest.mark.full
def test_a_frozen_node_is_replaced_and_what_thaws_changes_nothing(
    head: Cluster, recipe: Path, clean: Path, tmp_path: Path
) -> None:
    """All its processes stop: nobody there answers, and no connection closes. They go on when the
    run has gone on.
    """
    with ray_node(head) as node:
        driver = start_slow_step(head, recipe, tmp_path, *FLAGS, "--hang_timeout", "12")
        pids = {rank: pid_of(tmp_path, rank, driver) for rank in (0, 1)}
        frozen = processes_of_session(node.pid)
        (rank,) = (rank for rank, pid in pids.items() if pid in frozen)
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        try:
            with ray_node(head):
                wait_for(lambda: f"replace  1/3 rank {rank} (pid" in driver.output, process=driver)
                for pid in frozen:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGCONT)
                code, output = finish(driver)
        finally:
            for pid in processes_of_session(node.pid):
                os.kill(pid, signal.SIGCONT)
    assert code == 0, output
    report = only_report(tmp_path, output)
    assert (report["rank"], report["recovery"], report["steps_repeated"]) == (
        rank,
        "in_place",
        0,
    ), output
    assert pid_of(tmp_path, 1 - rank) == pids[1 - rank], "the other rank kept its process"
    assert_same_run(tmp_path, clean)


@pytest.mark.full
def test_ranks_that_all_lose_their_node_save_first(
    recipe: Path, clean: Path, tmp_path: Path
) -> None:
    """One worker pod with all ranks: its notice is time for a checkpoint, from which the new pod
    continues.
    """
    head = ray_head("--num-cpus=0", RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S="20")
    with head as cluster, ray_node(cluster, "--num-cpus=2") as pod:
        driver = start_slow_step(cluster, recipe, tmp_path, *FLAGS)
        pod.send_signal(signal.SIGTERM)
        wait_for(lambda: "is being drained" in driver.output, process=driver)
        with ray_node(cluster, "--num-cpus=2"):
            code, output = finish(driver)
    assert code == 0, output
    report = only_report(tmp_path, output)
    assert (report["cause"], report["recovery"], report["steps_repeated"]) == (
        "drained",
        "restart",
        0,
    ), output
    assert re.search(r"restart  0/3 from the newest checkpoint\n", output)
    saved = {path.name for path in (only_run(tmp_path) / "checkpoints").iterdir()}
    assert saved & {"step_00000012", "step_00000013"}, (
        "the slow step, completed, or the next: its vote was under way"
    )
    assert_same_run(tmp_path, clean)


@pytest.mark.full
def test_a_drain_of_the_drivers_node_ends_the_run_with_a_checkpoint(
    recipe: Path, tmp_path: Path
) -> None:
    with ray_head() as own:
        driver = start_training(
            own, recipe, tmp_path, "--max_steps", "100000", "--log_every", "100"
        )
        drain(own, living_nodes(own)[0], "--deadline-remaining-seconds=300")
        code, output = finish(driver)
    assert code == 143, output
    assert re.search(
        r"stop     the driver's node \w{8} is being drained, \d+ s left: stopping after this step",
        output,
    )
    result = summary(tmp_path)
    assert result["exit_reason"] == "stopped"
    assert (
        only_run(tmp_path) / "checkpoints" / f"step_{result['steps']:08d}" / "manifest.json"
    ).exists()

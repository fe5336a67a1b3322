"""Overlay `gcs-ft`: the head's pod is lost and replaced, and the ranks go on. Real Ray, with
RocksDB, in namespaces.

The operator's part, the claim and the variables in the head's and the workers' pods, is done here
by hand.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from nanoray.kube.render import KUBE_DIR
from tests.cluster.test_kube_pods import RECIPE, losses
from tests.harness.kuberay import DASHBOARD_PORT, TOKEN, Pod, head_service, pods_of
from tests.harness.manifests import build
from tests.harness.pods import Machine, RunningPod, ip, missing

AWAY_S = 20.0  # longer than a run without --head_timeout_s waits for a head


class Head:
    """The jobs API of the head that there is now."""

    def __init__(self, pod: RunningPod) -> None:
        self.pod = pod

    def ask(self, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(
            f"http://{self.pod.address}:{DASHBOARD_PORT}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)

    def job(self) -> dict[str, Any]:
        """The record of the job; empty while the head does not answer."""
        try:
            found: dict[str, Any] = self.ask("/api/jobs/job")
        except OSError:
            return {}
        return found

    def nodes(self) -> int:
        """How many nodes are alive."""
        try:
            summary = self.ask("/nodes?view=summary")["data"]["summary"]
        except (OSError, KeyError):
            return 0
        return sum(node["raylet"].get("state") == "ALIVE" for node in summary)


def until(ready: Callable[[], object], seconds: float, what: Callable[[], str]) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, what()
        time.sleep(0.3)


def start(machine: Machine, pod: Pod) -> RunningPod:
    """Start a pod with the variables that the operator adds for RocksDB."""
    if pod.group != "head":
        return machine.start(
            pod.name,
            pod.command,
            pod.env | {"RAY_gcs_rpc_server_reconnect_timeout_s": "600"},
            pod.shm_bytes,
        )
    store = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": "/data/gcs"}
    names = (head_service("run", "nanoray"), "run-head-svc")
    return machine.start(pod.name, pod.command, pod.env | store, pod.shm_bytes, names)


@pytest.mark.full
def test_a_lost_head_does_not_end_the_ranks(tmp_path: Path, text: Path) -> None:
    """With the overlay's own flags. Another address, the same state: no rank is replaced, no step
    repeated.
    """
    if reason := missing():
        pytest.skip(reason)
    objects = build(KUBE_DIR / "overlays" / "gcs-ft" / "job")
    (job,) = [thing for thing in objects if thing["kind"] == "RayJob"]
    maps = {
        thing["metadata"]["name"]: thing["data"]
        for thing in objects
        if thing["kind"] == "ConfigMap"
    }
    (tmp_path / "words.txt").write_text(text.read_text())
    recipe = RECIPE | {
        "max_steps": 100_000,
        "log_every": 10,
        "checkpoint_every": 0,
        "dataset": "/data/words.txt",
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    command = job["spec"]["entrypoint"].replace(
        "--preset shakespeare-cpu", "--config /data/recipe.yaml"
    )
    assert command != job["spec"]["entrypoint"]
    runs = tmp_path / "runs" / "gcs-ft"

    def steps() -> int:
        return sum(len(losses(run)) for run in runs.glob("*") if (run / "metrics.jsonl").exists())

    with Machine(tmp_path) as machine:
        first, *workers = pods_of("run", "nanoray", job, maps)
        head = Head(start(machine, first))
        for pod in workers:
            start(machine, pod)
        until(lambda: head.nodes() == 1 + len(workers), 200, lambda: head.pod.log)
        asked = {"entrypoint": command, "submission_id": "job"}
        head.ask(
            "/api/jobs/",
            asked | {"entrypoint_resources": json.loads(job["spec"]["entrypointResources"])},
        )
        until(lambda: steps() > 5, 200, lambda: str(head.job()))
        address = head.pod.address
        lost_pod = machine.pods.pop(first.name)  # with its machine: no SIGTERM
        lost_pod.kill()
        ip("netns", "del", lost_pod.netns)
        lost_at, lost = time.monotonic(), steps()
        until(lambda: time.monotonic() > lost_at + AWAY_S, 2 * AWAY_S, str)
        assert steps() > lost + 10, "the ranks trained without a head"
        head = Head(start(machine, first))
        assert head.pod.address != address
        until(
            lambda: head.job().get("status") == "RUNNING",
            100,
            lambda: f"{head.job()}\n{head.pod.log[-2000:]}",
        )
        until(lambda: head.nodes() == 1 + len(workers), 100, lambda: head.pod.log)
        back = steps()
        until(lambda: steps() > back + 10, 100, lambda: str(head.job()))
        time.sleep(AWAY_S)  # whatever waited for the head has found it, or given up
        assert head.job()["status"] == "RUNNING", head.job()
        head.ask("/api/jobs/job/stop", {})
        until(lambda: head.job().get("status") == "STOPPED", 100, lambda: str(head.job()))
    (run,) = runs.iterdir()
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["exit_reason"], summary["restarts"], summary["world_size"]) == ("stopped", 0, 2)
    assert not (run / "faults.jsonl").exists()

"""components/nightly-bench: a RayCronJob made of an overlay's RayCluster, and its rules."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from nanoray.kube.kustomize import groups
from nanoray.kube.render import KUBE_DIR
from tests.harness.commands import wait_for
from tests.harness.kube_rules import cluster_spec
from tests.harness.manifests import build

pytestmark = pytest.mark.usefixtures("kubectl")
Object = dict[str, Any]


def cron_job_of(objects: list[Object]) -> Object:
    (found,) = [thing for thing in objects if thing["apiVersion"] == "ray.io/v1"]
    return found


def cluster_of(thing: Object) -> Object:
    spec = cluster_spec(thing)
    assert spec is not None
    return spec


def test_a_night_is_the_overlays_cluster_without_its_commands() -> None:
    """The operator starts Ray there: a RayCronJob has no annotation that would keep it from it."""
    thing = cron_job_of(build(KUBE_DIR / "nightly-bench"))
    spec = cluster_of(thing)
    (cluster,) = [
        thing
        for thing in build(KUBE_DIR / "overlays" / "cpu" / "cluster")
        if thing["kind"] == "RayCluster"
    ]
    for group in groups(cluster["spec"]):
        container = group["template"]["spec"]["containers"][0]
        del container["command"], container["args"]
    assert spec == cluster["spec"]


def test_of_two_jobs_at_once_one_measures(tmp_path: Path) -> None:
    """KubeRay has no policy for it: the entrypoint has a lock, which ends with its process."""
    thing = cron_job_of(build(KUBE_DIR / "nightly-bench"))
    entrypoint = thing["spec"]["jobTemplate"]["entrypoint"].replace("/data", str(tmp_path))
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho $$ >> {tmp_path}/measures\nexec sleep 60\n")
    python.chmod(0o755)

    def start() -> subprocess.Popen[str]:
        env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
        return subprocess.Popen(
            ["bash", "-c", entrypoint], env=env, stdout=subprocess.PIPE, text=True
        )

    def wait_for_measures(count: int) -> None:
        measures = tmp_path / "measures"
        wait_for(lambda: measures.exists() and len(measures.read_text().split()) == count, 30)

    first = start()
    try:
        wait_for_measures(1)
        second = start()
        printed, _ = second.communicate(timeout=30)
        assert (second.returncode, printed) == (0, "skipped: another benchmark is measuring\n")
    finally:
        first.kill()
        first.wait()
    third = start()
    try:
        wait_for_measures(2)
    finally:
        third.kill()
        third.wait()

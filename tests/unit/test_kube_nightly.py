"""components/nightly-bench: a RayCronJob made of an overlay's RayCluster, and its rules."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from nanoray.bench.__main__ import load
from nanoray.bench.registry import BENCHMARKS
from nanoray.kube.kustomize import groups
from nanoray.kube.render import KUBE_DIR
from tests.harness.commands import wait_for
from tests.harness.kube_rules import cluster_spec, problems
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


def test_the_benchmark_has_a_rank_for_each_pod_and_writes_onto_the_volume(tmp_path: Path) -> None:
    thing = cron_job_of(build(KUBE_DIR / "nightly-bench"))
    job = thing["spec"]["jobTemplate"]
    command = shlex.split(job["entrypoint"])
    assert command[:3] == ["exec", "bash", "-c"]
    words = command[3].replace("$name", str(tmp_path / "report")).split()
    start = words.index("nanoray.bench")
    assert words[start - 3 : start] == ["exec", "python", "-m"]
    assert " ".join(words[start + 1 : start + 3]) == BENCHMARKS["collectives"].words
    _, args = load(BENCHMARKS["collectives"], words[start + 3 :])
    (group,) = cluster_of(thing)["workerGroupSpecs"]
    assert (args.ray_address, args.workers) == ("auto", group["replicas"])
    assert "name=/data/bench/$(date -u +%Y%m%d-%H%M%S)-collectives" in command[3]


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


def test_a_night_downloads_nothing() -> None:
    assert not [thing for thing in build(KUBE_DIR / "nightly-bench") if thing["kind"] == "Job"]


def test_a_night_on_gpus_that_are_claimed(tmp_path: Path) -> None:
    """Any overlay will do; its claims are counted in the RayCronJob."""
    shutil.copytree(KUBE_DIR, tmp_path / "kuberay")
    folder = tmp_path / "kuberay" / "nightly-bench"
    path = folder / "kustomization.yaml"
    entrypoint = "exec python -m nanoray.bench communication collectives --ray_address auto --workers 4 --device cuda"
    operation = {"op": "replace", "path": "/spec/jobTemplate/entrypoint", "value": entrypoint}
    patch = {"target": {"kind": "RayCronJob"}, "patch": yaml.safe_dump([operation])}
    rules = yaml.safe_load(path.read_text().replace("overlays/cpu", "overlays/gpu-dra"))
    path.write_text(yaml.safe_dump(rules | {"patches": [patch]}))

    objects = build(folder)
    assert problems(objects) == []
    worker = cluster_of(cron_job_of(objects))["workerGroupSpecs"][0]
    worker["rayStartParams"]["num-gpus"] = "2"
    assert any("asks for [1] GPUs, num-gpus = 2" in text for text in problems(objects))


def _container(thing: Object) -> Object:
    container: Object = cluster_of(thing)["headGroupSpec"]["template"]["spec"]["containers"][0]
    return container


BREAKS: list[tuple[Callable[[Object], Any], str]] = [
    (
        lambda t: [
            t["metadata"].update(annotations={"ray.io/overwrite-container-cmd": "true"}),
            _container(t).update(args=["$KUBERAY_GEN_RAY_START_CMD"]),
        ],
        "drop command and args, because a RayCronJob has no annotations for its jobs",
    ),
    (lambda t: t["spec"]["jobTemplate"].update(submissionMode="K8sJobMode"), "use HTTPMode"),
    (lambda t: t["spec"]["jobTemplate"].update(entrypoint="python x"), "write exec before it"),
    (lambda t: cluster_of(t).pop("authOptions"), "authOptions.mode is not token"),
]


@pytest.mark.parametrize(("change", "text"), BREAKS, ids=[text for _, text in BREAKS])
def test_each_rule_can_fail(change: Callable[[Object], Any], text: str) -> None:
    objects = build(KUBE_DIR / "nightly-bench")
    change(cron_job_of(objects))
    assert any(text in problem for problem in problems(objects)), problems(objects)

"""On a real cluster, the one that KUBECONFIG names: `make test-kube NANORAY_IMAGE=...`. Needs kubectl and KubeRay.

The image must be one that the nodes can pull or already have. Everything goes into a namespace of its own, which is
deleted at the end; storage is a claim on the cluster's default StorageClass, so kind, k3d and minikube will do.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

from nanoray.kube.kustomize import build, containers, to_yaml
from nanoray.kube.render import KUBE_DIR

NAMESPACE = "nanoray-test"
pytestmark = [pytest.mark.timeout(1500)]
Object = dict[str, Any]


def kubectl(*words: str, text: str | None = None, check: bool = True) -> str:
    done = subprocess.run(["kubectl", *words], input=text, capture_output=True, text=True, timeout=300)
    assert not check or done.returncode == 0, f"kubectl {' '.join(words)}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    if not os.environ.get("NANORAY_TEST_KUBE"):
        pytest.skip("runs on a real cluster, and only when asked to: make test-kube NANORAY_IMAGE=...")
    if not shutil.which("kubectl"):
        pytest.skip("kubectl is not installed")
    found = subprocess.run(["kubectl", "version", "--request-timeout=5s"], capture_output=True, text=True)
    if found.returncode:
        pytest.skip(f"no cluster answers: {found.stderr.strip().splitlines()[-1]}")
    if not os.environ.get("NANORAY_IMAGE"):
        pytest.skip("NANORAY_IMAGE names no image that the cluster's nodes can pull")
    if folder := os.environ.get("NANORAY_TEST_KUBERAY_CRDS"):
        kubectl("apply", "--server-side", "-f", folder)
    kubectl("get", "crd", "rayjobs.ray.io", "rayclusters.ray.io")
    yield
    kubectl("-n", NAMESPACE, "delete", "rayjobs", "--all", "--wait", "--timeout=120s", check=False)
    kubectl("delete", "namespace", NAMESPACE, "--wait", "--timeout=180s", check=False)


def overlay(flags: str) -> list[Object]:
    """The cpu job with the given image, a claim on the default class, and other flags of the run."""
    objects = [o for o in build(KUBE_DIR / "overlays" / "cpu" / "job") if o["kind"] != "PersistentVolume"]
    for thing in objects:
        if thing["kind"] == "Namespace":
            thing["metadata"]["name"] = NAMESPACE
        else:
            thing["metadata"]["namespace"] = NAMESPACE
        for container in containers(thing):
            container["image"] = os.environ["NANORAY_IMAGE"]
        if thing["kind"] == "PersistentVolumeClaim":
            del thing["spec"]["storageClassName"]
            thing["spec"] |= {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "2Gi"}}}
        if thing["kind"] == "RayJob":
            thing["spec"]["entrypoint"] += f" --dataset stdlib {flags}"
            thing["spec"]["ttlSecondsAfterFinished"] = 30
    return objects


def job() -> Object:
    status: Object = json.loads(kubectl("-n", NAMESPACE, "get", "rayjob", "nanoray", "-o", "json")).get("status", {})
    return status


def driver_log() -> str:
    head = kubectl("-n", NAMESPACE, "get", "pod", "-l", "ray.io/node-type=head", "-o", "name").split()
    read = "cat /tmp/ray/session_latest/logs/job-driver-*.log"
    return kubectl("-n", NAMESPACE, "exec", head[0], "--", "bash", "-c", read, check=False) if head else ""


def until(ready: Any, seconds: float, what: str) -> Any:
    end = time.monotonic() + seconds
    while not (found := ready()):
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}\n{job()}\n{driver_log()[-3000:]}"
        time.sleep(2)
    return found


def test_a_job_trains_and_is_gone_after_its_ttl(cluster: None) -> None:
    kubectl("apply", "--server-side", "-f", "-", text=to_yaml(overlay("--max_steps 100 --out_dir /data/runs/one")))
    until(lambda: "loss" in driver_log(), 900, "a line with a loss")
    until(lambda: job().get("jobStatus") == "SUCCEEDED", 600, "SUCCEEDED")
    assert "step 100/100" in driver_log()
    gone = lambda: not kubectl("-n", NAMESPACE, "get", "rayclusters", "-o", "name").strip()  # noqa: E731
    until(gone, 180, "the cluster is gone after its TTL")
    kubectl("-n", NAMESPACE, "delete", "rayjob", "nanoray", "--wait", "--timeout=120s")


def test_a_worker_pod_deleted_in_mid_run_is_replaced_and_the_job_succeeds(cluster: None) -> None:
    flags = "--max_steps 1500 --checkpoint_every 50 --log_every 10 --out_dir /data/runs/two"
    kubectl("apply", "--server-side", "-f", "-", text=to_yaml(overlay(flags)))
    until(lambda: "step  100/" in driver_log(), 900, "step 100")
    pods = kubectl("-n", NAMESPACE, "get", "pod", "-l", "ray.io/node-type=worker", "-o", "name").split()
    kubectl("-n", NAMESPACE, "delete", pods[0], "--wait=false", "--grace-period=0", "--force")
    until(lambda: re.search("replace|restart", driver_log()), 300, "the driver's recovery")
    until(lambda: job().get("jobStatus") == "SUCCEEDED", 900, "SUCCEEDED")
    assert "step 1500/1500" in driver_log()

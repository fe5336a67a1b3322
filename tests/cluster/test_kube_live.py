"""On a real cluster, the one that KUBECONFIG names: `make test-kube NANORAY_IMAGE=...`. Needs
kubectl and KubeRay.

The image must be one that the nodes can pull or already have; nothing else is fetched, so the
cluster may be offline. Everything goes into two namespaces of its own, deleted at the end. Storage
is a claim on the cluster's default StorageClass, so kind, k3d and minikube will do; a job's pods
ask for 1.6 CPU and 4.4 GiB.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nanoray.config import load_config
from nanoray.kube.kustomize import to_yaml
from nanoray.kube.render import render

NAMESPACES = ("nanoray-test", "nanoray-test-2")
pytestmark = [pytest.mark.timeout(2400)]
Object = dict[str, Any]


def kubectl(*words: str, text: str | None = None, check: bool = True) -> str:
    done = subprocess.run(
        ["kubectl", *words], input=text, capture_output=True, text=True, timeout=300
    )
    assert not check or done.returncode == 0, (
        f"kubectl {' '.join(words)}: {done.stdout}{done.stderr}"
    )
    return done.stdout if check else done.stdout + done.stderr


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    if not os.environ.get("NANORAY_TEST_KUBE"):
        pytest.skip(
            "runs on a real cluster, and only when asked to: make test-kube NANORAY_IMAGE=..."
        )
    if not shutil.which("kubectl"):
        pytest.skip("kubectl is not installed")
    found = subprocess.run(
        ["kubectl", "version", "--request-timeout=5s"], capture_output=True, text=True
    )
    if found.returncode:
        pytest.skip(
            f"no cluster answers: {(found.stderr.strip().splitlines() or ['no reason given'])[-1]}"
        )
    if not os.environ.get("NANORAY_IMAGE"):
        pytest.skip("NANORAY_IMAGE names no image that the cluster's nodes have or can pull")
    if folder := os.environ.get("NANORAY_TEST_KUBERAY_CRDS"):
        kubectl("apply", "--server-side", "--force-conflicts", "-f", folder)
    kubectl("get", "crd", "rayjobs.ray.io", "rayclusters.ray.io")
    yield
    for space in NAMESPACES:
        kubectl("-n", space, "delete", "rayjobs", "--all", "--wait", "--timeout=180s", check=False)
        kubectl(
            "delete",
            "namespace",
            space,
            "--ignore-not-found",
            "--wait",
            "--timeout=180s",
            check=False,
        )


def name_of(test: str) -> str:
    """Return the name of a test's job: unique also where two tests begin with the same words."""
    slug = re.sub(r"[^a-z0-9]+", "-", test.removeprefix("test_").lower())
    digest = hashlib.sha256(test.encode()).hexdigest()[:6]
    return f"{slug[:23].strip('-')}-{digest}"


@dataclass(frozen=True)
class Job:
    """A RayJob of these tests."""

    name: str
    namespace: str = NAMESPACES[0]

    def k(self, *words: str, **options: Any) -> str:
        """Run kubectl in the job's namespace."""
        return kubectl("-n", self.namespace, *words, **options)

    def apply(self, steps: int, workers: int = 2, **values: Any) -> None:
        """Apply what `nanoray kube submit --overlay laptop` would."""
        objects = self.objects(steps, workers, **values)
        kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", text=to_yaml(objects))

    def objects(self, steps: int, workers: int = 2, **values: Any) -> list[Object]:
        """Return the job's objects, with a claim on the default StorageClass."""
        kube = {
            "overlay": "laptop",
            "ranks_per_pod": 1,
            "cpus": 0.5,
            "memory_gib": 1.25,
            "ttl_s": 60,
        }
        kube |= {
            "namespace": self.namespace,
            "image": os.environ["NANORAY_IMAGE"],
            "retries": values.pop("retries", 2),
        }
        run = {
            "name": self.name,
            "workers": workers,
            "device": "cpu",
            "dataset": "stdlib",
            "max_steps": steps,
        }
        run |= {"log_every": 10, "checkpoint_every": 50, "eval_every": 0}
        return render(load_config(None, "tiny", run | values | {"kube": kube}), time.time())

    @property
    def status(self) -> Object:
        found: Object = json.loads(self.k("get", "rayjob", self.name, "-o", "json")).get(
            "status", {}
        )
        return found

    def pods(self, kind: str) -> list[str]:
        """The names of the head or worker pods of the job's present cluster that are not being
        deleted.
        """
        selector = f"ray.io/cluster={self.status.get('rayClusterName', '')},ray.io/node-type={kind}"
        found = json.loads(self.k("get", "pod", "-l", selector, "-o", "json"))["items"]
        return [
            pod["metadata"]["name"] for pod in found if "deletionTimestamp" not in pod["metadata"]
        ]

    @property
    def log(self) -> str:
        """The driver's log; empty while there is no head to ask."""
        read = "cat /tmp/ray/session_latest/logs/job-driver-*.log"
        words = ["exec", *self.pods("head")[:1], "-c", "ray-head", "--", "bash", "-c", read]
        return self.k(*words, check=False) if self.pods("head") else ""

    @property
    def steps(self) -> list[int]:
        """The steps in the driver's log, in the order in which they were printed."""
        return [int(step) for step in re.findall(r"^step +(\d+)/", self.log, re.MULTILINE)]

    def until(self, ready: Any, seconds: float, what: str) -> Any:
        end = time.monotonic() + seconds
        while not (found := ready()):
            status = self.status
            ended = status.get("jobDeploymentStatus") == "Failed"
            assert not ended, f"failed before: {what}\n{status}\n{self.log[-4000:]}"
            assert time.monotonic() < end, (
                f"not within {seconds:g} s: {what}\n{status}\n{self.log[-4000:]}"
            )
            time.sleep(2)
        return found

    def trains(self) -> None:
        """Wait until it has printed a few steps."""
        self.until(lambda: len(self.steps) >= 5, 900, "five lines with a step")

    def succeeds(self, steps: int) -> None:
        self.until(lambda: self.status.get("jobStatus") == "SUCCEEDED", 1200, "SUCCEEDED")
        assert f"step {steps}/{steps}" in self.log


@pytest.fixture
def job(cluster: None, request: pytest.FixtureRequest) -> Iterator[Job]:
    """A job named after the test. Deleted at its end."""
    job = Job(name_of(request.node.name))
    yield job
    job.k(
        "delete", "rayjob", job.name, "--ignore-not-found", "--wait", "--timeout=180s", check=False
    )


def test_a_job_trains_and_its_cluster_is_gone_after_the_ttl(job: Job) -> None:
    job.apply(steps=100)
    job.succeeds(100)
    job.until(lambda: not job.pods("head"), 300, "the cluster is gone after its TTL")


@pytest.mark.parametrize("how", [(), ("--grace-period=0", "--force")], ids=["deleted", "lost"])
def test_a_worker_pod_in_mid_run_costs_no_retry_and_no_step(job: Job, how: tuple[str, ...]) -> None:
    """Deleted: SIGTERM and a grace period. Lost: the pod is gone at once, as with its node."""
    job.apply(steps=6000)
    job.trains()
    before, victim = job.status, job.pods("worker")[0]
    job.k("delete", "pod", victim, "--wait=false", *how)
    job.until(lambda: re.search("replace|shrink|restart", job.log), 300, "the driver's recovery")
    assert victim not in job.pods("worker")
    job.succeeds(6000)
    after = job.status
    assert (after["rayClusterName"], after["jobId"]) == (
        before["rayClusterName"],
        before["jobId"],
    ), "a retry"
    assert not after.get("failed")
    if not how:
        assert len(job.steps) == len(set(job.steps)), "a step was repeated"


def test_a_deleted_head_costs_one_attempt_and_the_run_goes_on(job: Job) -> None:
    """The operator makes a new head and runs the job again, which resumes from the newest
    checkpoint.
    """
    job.apply(steps=6000)
    job.until(lambda: len(job.steps) >= 12, 900, "120 steps, and so two checkpoints")
    job.k("delete", "pod", *job.pods("head"), "--wait=false")
    first = job.until(
        lambda: "resume" in job.log and job.steps, 900, "the job on a new head, resumed"
    )[0]
    assert first > 50, "it began anew"
    assert "can never hold" not in job.log
    job.succeeds(6000)
    assert int(job.status.get("failed") or 0) <= 1


def test_the_run_of_a_failed_job_can_be_fetched(job: Job, tmp_path: Path) -> None:
    job.apply(steps=100, retries=0, faults="nan@rank=0,step=60", on_nan="stop")
    end = time.monotonic() + 900
    while job.status.get("jobDeploymentStatus") != "Failed":
        assert time.monotonic() < end, f"{job.status}\n{job.log}"
        time.sleep(2)
    job.k("rollout", "status", "deployment/nanoray-tensorboard", "--timeout=200s")
    command = [
        sys.executable,
        "-m",
        "nanoray",
        "kube",
        "fetch",
        job.name,
        "--namespace",
        job.namespace,
    ]
    done = subprocess.run(
        [*command, "--out_dir", str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    (run,) = tmp_path.iterdir()
    assert json.loads((run / "summary.json").read_text())["exit_code"] == 5
    assert '"kind": "nan"' in (run / "faults.jsonl").read_text(), "the fault fired"
    assert (run / "checkpoints" / "step_00000050" / "manifest.json").is_file()
    assert (run / "logs" / "rank0.log").stat().st_size

"""Overlay `laptop`: its pods, limited by the kernel to the CPU and memory that they ask for, train
the tiny preset.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from nanoray.kube.__main__ import main
from nanoray.kube.kustomize import quantity
from nanoray.kube.render import KUBE_DIR
from tests.harness.kube_rules import templates
from tests.harness.kube_server import ApiServer
from tests.harness.kuberay import Operator
from tests.harness.manifests import build
from tests.harness.pods import Machine, RunningPod, missing

CGROUPS = Path("/sys/fs/cgroup")


class LimitedMachine(Machine):
    """A machine whose pods are in control groups (v1) with the limits of their manifest. Removes
    them at its end.
    """

    def __init__(self, volume: Path, limits: dict[str, tuple[float, int]]) -> None:
        """`limits`: CPUs and bytes of a pod, by a part of its name."""
        super().__init__(volume)
        self.limits = limits
        self.peaks: dict[str, int] = dict.fromkeys(limits, 0)  # bytes that cannot be reclaimed
        self._groups: dict[str, list[Path]] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def start(self, name: str, *args: Any, **kwargs: Any) -> RunningPod:
        """Start a pod and limit it before its first process has started another one."""
        pod = super().start(name, *args, **kwargs)
        (part,) = [part for part in self.limits if part in name]
        cpus, size = self.limits[part]
        folders = [CGROUPS / kind / f"{self._id}-{name}" for kind in ("cpu", "memory")]
        for folder in folders:
            folder.mkdir()
        (folders[0] / "cpu.cfs_quota_us").write_text(str(int(cpus * 100_000)))
        (folders[1] / "memory.limit_in_bytes").write_text(str(size))
        for folder in folders:
            (folder / "cgroup.procs").write_text(str(pod._process.pid))
            with contextlib.suppress(IndexError, OSError):
                (folder / "cgroup.procs").write_text(str(pod.init))
        self._groups[part] = folders
        return pod

    def _sample(self) -> None:
        while not self._over.wait(0.2):
            for part, (_, memory) in list(self._groups.items()):
                with contextlib.suppress(OSError):
                    stat = dict(
                        line.split() for line in (memory / "memory.stat").read_text().splitlines()
                    )
                    held = int(stat["total_rss"]) + int(stat["total_shmem"])
                    self.peaks[part] = max(self.peaks[part], held)

    def __exit__(self, *args: Any) -> None:
        self._over.set()
        self._thread.join()
        super().__exit__(*args)
        for folder in [folder for folders in self._groups.values() for folder in folders]:
            for _ in range(50):
                with contextlib.suppress(OSError):
                    folder.rmdir()
                    break
                time.sleep(0.1)


def test_the_laptops_pods_ask_for_little() -> None:
    """All pods of the overlay together, at most 1.5 CPU and 4 GiB: a laptop with an operator on it
    has that left.
    """
    for form in ("cluster", "job"):
        total = {"cpu": 0.0, "memory": 0.0}
        for thing in build(KUBE_DIR / "overlays" / "laptop" / form):
            for template, count in templates(thing):
                for container in template["spec"]["containers"]:
                    for name, value in container["resources"]["requests"].items():
                        total[name] += count * quantity(value)
        assert 0 < total["cpu"] <= 1.5
        assert 0 < total["memory"] <= 4 * 2**30


@pytest.mark.full
def test_the_laptops_job_trains_within_its_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The kernel enforces the limits, and the job still finishes; no pod comes near its memory."""
    if reason := missing():
        pytest.skip(reason)
    if not os.access(CGROUPS / "memory" / "memory.limit_in_bytes", os.R_OK) or not os.access(
        CGROUPS / "cpu", os.W_OK
    ):
        pytest.skip(
            "there are no writable control groups (v1) here, so nothing would limit the pods"
        )
    objects = build(KUBE_DIR / "overlays" / "laptop" / "job")
    (job,) = [thing for thing in objects if thing["kind"] == "RayJob"]
    limits = {}
    for part, (template, _) in zip(("head", "worker"), templates(job), strict=True):
        own = template["spec"]["containers"][0]["resources"]["limits"]
        limits[part] = quantity(own["cpu"]), int(quantity(own["memory"]))
    with ApiServer(tmp_path) as server, LimitedMachine(tmp_path, limits) as machine:
        for thing in objects:
            if thing["kind"] == "ConfigMap":
                server.objects["configmaps", "nanoray", thing["metadata"]["name"]] = thing
        with Operator(server, machine) as operator:
            server.objects["rayjobs", "nanoray", "nanoray"] = job
            end = time.monotonic() + 420
            while job.get("status", {}).get("jobDeploymentStatus") not in ("Complete", "Failed"):
                logs = "\n".join(pod.log[-2000:] for pod in machine.pods.values())
                assert operator.errors == [], logs
                assert time.monotonic() < end, f"{job.get('status')}\n{logs}"
                time.sleep(0.5)
            assert job["status"]["jobStatus"] == "SUCCEEDED", job["status"]
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path)))
        tensorboard = {"name": "tb", "labels": {"app.kubernetes.io/name": "nanoray-tensorboard"}}
        server.objects["pods", "nanoray", "tb"] = {
            "metadata": tensorboard,
            "spec": {},
            "status": {"phase": "Running"},
        }
        assert main(["status", "nanoray"]) == 0
        assert "run    folder /data/runs/laptop/" in (said := capsys.readouterr().out)
        assert " · step 40/40 · loss " in said
    (run,) = (tmp_path / "runs" / "laptop").iterdir()
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["exit_reason"], summary["steps"], summary["world_size"]) == ("finished", 40, 2)
    used = {part: machine.peaks[part] / size for part, (_, size) in limits.items()}
    print({part: f"{peak / 2**20:.0f} MiB" for part, peak in machine.peaks.items()})
    assert all(0.1 < share < 0.8 for share in used.values()), (
        f"share of each pod's memory at its peak: {used}"
    )

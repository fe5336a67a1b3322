"""kuberay/nightly-bench, run: one night's RayJob in pods as namespaces, and its report."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from nanoray.kube.render import KUBE_DIR
from tests.harness.kube_server import ApiServer
from tests.harness.kuberay import Operator, job_of_cron_job
from tests.harness.manifests import build
from tests.harness.pods import Machine, missing


@pytest.mark.full
def test_a_night_leaves_a_report_on_the_volume(tmp_path: Path) -> None:
    """With the operator's own command in the containers, because none of ours is left there.

    Shorter than a night: one collective, small messages.
    """
    if reason := missing():
        pytest.skip(reason)
    objects = build(KUBE_DIR / "nightly-bench")
    (cron_job,) = [thing for thing in objects if thing["kind"] == "RayCronJob"]
    job = job_of_cron_job(cron_job, "fghij")
    entrypoint = job["spec"]["entrypoint"]
    short = "--workers 2 --quick --ops all_reduce --max_bytes 65536 "
    job["spec"]["entrypoint"] = entrypoint.replace("--workers 2 ", short)
    assert job["spec"]["entrypoint"] != entrypoint

    volume = tmp_path / "volume"
    volume.mkdir()
    with ApiServer(volume) as server, Machine(volume) as machine:
        for thing in objects:
            if thing["kind"] == "ConfigMap":
                name = thing["metadata"]["name"]
                server.objects["configmaps", "nanoray", name] = thing
        server.objects["rayjobs", "nanoray", "nanoray-bench-fghij"] = job
        with Operator(server, machine) as operator:
            deadline = time.monotonic() + 240
            while job.get("status", {}).get("jobDeploymentStatus") not in ("Complete", "Failed"):
                assert not operator.errors, operator.errors
                assert time.monotonic() < deadline, job.get("status")
                time.sleep(0.5)
    assert job["status"]["jobStatus"] == "SUCCEEDED", job["status"]

    page, report = sorted((volume / "bench").glob("*-collectives.*"))
    assert page.name.endswith("-collectives.html")
    assert report.name.endswith("-collectives.json")
    found = json.loads(report.read_text())
    assert found["bench"] == "collectives"
    assert found["conditions"]["ranks"]["on hosts"] == "2 (1 + 1)", "a rank in each worker pod"
    assert [row for row in found["rows"] if row.get("op") == "all_reduce"]

"""`nanoray kube` calls Ray by exec in the head's pod, and says what is missing where it cannot."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanoray.kube.__main__ import main
from tests.harness.commands import wait_for
from tests.harness.kube_server import ApiServer, ray_head, submit_of

pytestmark = pytest.mark.usefixtures("kubectl")
Object = dict[str, Any]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    (tmp_path / "volume" / "runs").mkdir(parents=True)
    with ApiServer(tmp_path / "volume") as server:
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path)))
        yield server


@pytest.fixture
def ray(server: ApiServer) -> Iterator[dict[str, str]]:
    with ray_head(server, "words-abc") as found:
        found["words-1"] = "start\nstep 1\n"
        found["words-1 metadata"] = json.dumps({"nanoray_step": "7/40"})
        yield found


def running_job(server: ApiServer) -> Object:
    """Put a RayJob into the server whose driver trains."""
    status = {"rayClusterName": "words-abc", "jobId": "words-1"}
    status |= {"jobDeploymentStatus": "Running", "jobStatus": "RUNNING"}
    spec = {
        "entrypoint": "exec python -m nanoray.launch --out_dir /data/runs/words-1 --resume auto"
    }
    thing = {"kind": "RayJob", "metadata": {"name": "words"}, "spec": spec, "status": status}
    server.objects["rayjobs", "nanoray", "words"] = thing
    return thing


def test_logs_go_by_exec(server: ApiServer, ray: dict[str, str], capsys: Any) -> None:
    running_job(server)
    assert main(["logs", "words"]) == 0
    assert capsys.readouterr().out == "start\nstep 1\n"
    assert server.execs == ["words-abc-head"]
    assert server.exec_containers == ["ray-head"], "a mesh may put another one into the pod"


def test_submit_goes_by_exec(
    server: ApiServer, ray: dict[str, str], tmp_path: Path, capsys: Any
) -> None:
    """From the first object to the job's end, with an operator that runs it at once."""
    key = ("rayjobs", "nanoray", "words")

    def run_job() -> None:
        wait_for(lambda: key in server.objects, 60)
        status = {"rayClusterName": "words-abc", "jobId": "words-1"}
        status |= {"jobDeploymentStatus": "Running", "jobStatus": "RUNNING"}
        server.objects[key]["status"] = status
        wait_for(lambda: server.execs, 60)  # the log has been read
        status |= {"jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED"}

    operator = threading.Thread(target=run_job, daemon=True)
    operator.start()
    assert main(submit_of(tmp_path)) == 0
    operator.join()
    out = capsys.readouterr().out
    assert "start\nstep 1\n" in out


# No way at all.

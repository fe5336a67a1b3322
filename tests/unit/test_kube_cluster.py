"""What `nanoray kube` prints when the cluster refuses: each error with its remedy, over real HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanoray.kube.__main__ import main
from nanoray.kube.cluster import Api, ApiError, KubeError
from nanoray.kube.follow import Follower
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
def submit(tmp_path: Path) -> list[str]:
    return submit_of(tmp_path)


def rayjob(server: ApiServer, name: str = "words", **status: Any) -> Object:
    thing = {"kind": "RayJob", "metadata": {"name": name}, "spec": {}, "status": status}
    server.objects["rayjobs", "nanoray", name] = thing
    return thing


def pod(server: ApiServer, name: str, status: Object) -> None:
    labels = {"ray.io/cluster": "words-abc"}
    thing = {"metadata": {"name": name, "labels": labels}, "spec": {}, "status": status}
    server.objects["pods", "nanoray", name] = thing


# No cluster, no right, no KubeRay.


def test_a_job_that_runs_is_not_replaced(server: ApiServer, submit: list[str], capsys: Any) -> None:
    rayjob(server, jobDeploymentStatus="Running")
    assert main(submit) == 4
    assert "RayJob words runs already; follow it with" in capsys.readouterr().err


# A dry run.


def test_a_dry_run_asks_no_cluster(
    server: ApiServer, submit: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    assert main([*submit, "--dry_run"]) == 0
    out = capsys.readouterr().out
    assert "would apply Namespace nanoray\n" in out
    assert "would apply RayJob words\n" in out
    assert server.objects == {}


def test_what_the_api_server_refuses_is_said_with_its_reason(
    server: ApiServer, submit: list[str], capsys: Any
) -> None:
    server.refusals["PATCH rayjobs"] = (422, "spec.rayClusterSpec: Required value")
    assert main(submit) == 4
    assert "RayJob words: spec.rayClusterSpec: Required value" in capsys.readouterr().err


# Pods that do not come.

PENDING = {
    "phase": "Pending",
    "conditions": [
        {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "0/1 nodes: 1 Insufficient cpu",
        }
    ],
}


def test_an_unschedulable_pod_is_said_at_once_and_waited_for(server: ApiServer) -> None:
    rayjob(server, jobDeploymentStatus="Initializing", rayClusterName="words-abc")
    pod(server, "words-w", PENDING)
    said: list[str] = []
    follower = Follower(Api(), "nanoray", "words", said.append, poll_s=0.01, start_timeout_s=0.3)
    with pytest.raises(KubeError, match="Insufficient cpu"):
        follower.run()
    assert len([line for line in said if "Insufficient cpu" in line]) == 1, (
        "once, though it was seen many times"
    )


# Commands on jobs.


# Attempts.


@pytest.fixture
def logs(server: ApiServer) -> Iterator[dict[str, str]]:
    """The log that Ray's jobs API returns, by the job's id."""
    with ray_head(server, "words-abc", "words-def") as found:
        yield found


def test_the_log_of_each_attempt_is_followed(server: ApiServer, logs: dict[str, str]) -> None:
    """Between two looks the operator has deleted the cluster and taken back the status.

    What it names for the next attempt is no attempt before something runs.
    """
    running = {"jobDeploymentStatus": "Running", "jobStatus": "RUNNING"}
    first = {"rayClusterName": "words-abc", "jobId": "words-1"}
    unused = {"rayClusterName": "words-not", "jobId": "words-2"}
    second = {"rayClusterName": "words-def", "jobId": "words-3"}
    job = rayjob(server, **running, **first)
    logs["words-1"] = "step 1\n"
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if line == "step 1":
            job["status"] = unused | {"jobDeploymentStatus": "Initializing", "failed": 1}
        elif line.startswith("job    Initializing"):
            logs["words-3"] = "step 9\n"
            job["status"] = second | running | {"failed": 1}
        elif line == "step 9":
            job["status"] = {"failed": 2}  # refused before it has opened the run
        elif line.startswith("job    accepted"):
            job["status"] = {"jobDeploymentStatus": "Failed"}

    Follower(Api(), "nanoray", "words", say, poll_s=0.01).run()
    assert [line for line in said if not line.startswith("job")] == [
        "try    1: Ray job words-1 on RayCluster words-abc",
        "step 1",
        "try    2: Ray job words-3 on RayCluster words-def",
        "step 9",
    ]


# Commands in pods.


def test_output_that_breaks_off_is_not_taken_for_all_of_it(
    server: ApiServer, tmp_path: Path
) -> None:
    """The connection is lost on the way: the error says so."""
    labels = {"app.kubernetes.io/name": "nanoray-tensorboard"}
    server.objects["pods", "nanoray", "tb"] = {"metadata": {"name": "tb", "labels": labels}}
    (tmp_path / "volume" / "runs" / "record").write_text("x" * 200_000)
    command = ["cat", "/data/runs/record"]
    assert Api().run_in("tb", "nanoray", command) == "x" * 200_000
    server.exec_limit = 60_000
    match = "cat .* the connection was closed, so its output is not complete; try again"
    with pytest.raises(KubeError, match=match):
        Api().run_in("tb", "nanoray", command)


def test_an_api_server_that_is_away_is_waited_for(server: ApiServer) -> None:
    rayjob(server, jobDeploymentStatus="Complete", jobStatus="SUCCEEDED")
    server.refusals["GET rayjobs"] = (503, "the server is currently unable to handle the request")
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        server.refusals.clear()  # it comes back after the first line about it

    assert Follower(Api(), "nanoray", "words", say, poll_s=0.01).run()["jobStatus"] == "SUCCEEDED"
    assert "503" in said[0]
    server.refusals["GET rayjobs"] = (503, "away")
    with pytest.raises(ApiError, match="503: away"):
        Follower(Api(), "nanoray", "words", print, poll_s=0.01, silence_s=0.1).run()
    server.refusals["GET rayjobs"] = (403, "forbidden")
    with pytest.raises(ApiError, match="403: forbidden"):
        Follower(Api(), "nanoray", "words", print, poll_s=0.01).run()

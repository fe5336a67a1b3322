"""What `nanoray kube` prints when the cluster refuses: each error with its remedy, over real HTTP."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanoray.kube.__main__ import main
from nanoray.kube.cluster import Api, ApiError, KubeError
from nanoray.kube.fetch import fetch
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


def test_the_end_of_an_attempt_whose_cluster_is_gone_is_read_from_the_volume(
    server: ApiServer, logs: dict[str, str]
) -> None:
    """Between two looks the operator has deleted the cluster and taken back the status.

    What it names for the next attempt is no attempt before something runs. A summary that was there
    before an attempt is not of that attempt.
    """
    _tensorboard(server)
    run = Path(str(server.volume)) / "runs" / "words-1" / "2026-01-01_000000_words"
    run.mkdir(parents=True)
    summary = run / "summary.json"
    running = {"jobDeploymentStatus": "Running", "jobStatus": "RUNNING"}
    first = {"rayClusterName": "words-abc", "jobId": "words-1"}
    unused = {"rayClusterName": "words-not", "jobId": "words-2"}
    second = {"rayClusterName": "words-def", "jobId": "words-3"}
    job = rayjob(server, **running, **first)
    job["spec"]["entrypoint"] = "exec python -m nanoray.launch --out_dir /data/runs/words-1"
    logs["words-1"] = "step 1\n"
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if line == "step 1":
            reason = "failed: rank 0 failed in checkpoint of step 9: disk full"
            summary.write_text(json.dumps({"exit_reason": reason}))
            job["status"] = unused | {"jobDeploymentStatus": "Initializing", "failed": 1}
        elif line.startswith("job    Initializing"):
            logs["words-3"] = "step 9\n"
            os.utime(summary, (0, 0))
            job["status"] = second | running | {"failed": 1}
        elif line == "step 9":
            job["status"] = {"failed": 2}  # refused before it has opened the run
        elif line.startswith("job    accepted"):
            job["status"] = {"jobDeploymentStatus": "Failed"}

    Follower(Api(), "nanoray", "words", say, poll_s=0.01).run()
    assert [line for line in said if not line.startswith("job")] == [
        "try    1: Ray job words-1 on RayCluster words-abc",
        "step 1",
        "end    of try 1: failed: rank 0 failed in checkpoint of step 9: disk full",
        "try    2: Ray job words-3 on RayCluster words-def",
        "step 9",
        "end    of try 2: not known: its run in /data/runs/words-1 has no summary",
    ]


# fetch.


def _tensorboard(server: ApiServer) -> None:
    labels = {"app.kubernetes.io/name": "nanoray-tensorboard"}
    server.objects["pods", "nanoray", "tb"] = {
        "metadata": {"name": "tb", "labels": labels},
        "status": {"phase": "Running"},
    }


def test_fetch_takes_the_newest_run_and_all_of_it(server: ApiServer, tmp_path: Path) -> None:
    _tensorboard(server)
    runs = tmp_path / "volume" / "runs"
    for folder, name in (
        ("words-20260102-000000", "2026-01-02_000000_words"),
        ("words-20260101-000000", "2026-01-01_000000_words"),
        ("words-and-more-20260103-000000", "2026-01-03_000000_words-and-more"),
    ):
        (runs / folder / name / "checkpoints").mkdir(parents=True)
        (runs / folder / name / "checkpoints" / "model.bin").write_bytes(bytes(range(256)) * 1000)
    path = fetch(Api(), "nanoray", "words", "", str(tmp_path / "out"))
    assert path == tmp_path / "out" / "2026-01-02_000000_words"
    assert (path / "checkpoints" / "model.bin").read_bytes() == bytes(range(256)) * 1000
    assert [p.name for p in (tmp_path / "out").iterdir()] == [path.name], "nothing else is left"
    with pytest.raises(KubeError, match="is there already; move it away"):
        fetch(Api(), "nanoray", "words", "", str(tmp_path / "out"))
    with pytest.raises(
        KubeError, match="no run of none on the volume; there: words-20260101-000000/2026-01-01"
    ):
        fetch(Api(), "nanoray", "none", "", str(tmp_path / "out"))


def test_fetch_refuses_links_out_of_the_folder(server: ApiServer, tmp_path: Path) -> None:
    _tensorboard(server)
    run = tmp_path / "volume" / "runs" / "words" / "2026-01-01_000000_words"
    run.mkdir(parents=True)
    (run / "link").symlink_to("/etc/passwd")
    with pytest.raises(KubeError, match="cannot unpack"):
        fetch(Api(), "nanoray", "words", "", str(tmp_path / "out"))
    assert list((tmp_path / "out").iterdir()) == []


def test_an_archive_that_breaks_off_is_not_taken_for_the_run(
    server: ApiServer, tmp_path: Path
) -> None:
    """The connection is lost on the way: the error says so, and nothing is left."""
    _tensorboard(server)
    run = tmp_path / "volume" / "runs" / "words" / "2026-01-01_000000_words"
    run.mkdir(parents=True)
    (run / "model.bin").write_bytes(random.Random(1).randbytes(200_000))
    server.exec_limit = 60_000
    with pytest.raises(
        KubeError,
        match=r"tar .* the connection was closed, so its output is not complete; try again",
    ):
        fetch(Api(), "nanoray", "words", run.name, str(tmp_path / "out"))
    server.exec_limit = None
    assert list((tmp_path / "out").iterdir()) == []
    assert fetch(Api(), "nanoray", "words", run.name, str(tmp_path / "out")).name == run.name


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

"""`nanoray kube` where the API server does not reach the head's port, over real HTTP.

A network policy, a missing right or packets that are dropped: each command either goes by exec in
the head's pod, or says what is missing.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nanoray.kube.__main__ import main
from nanoray.kube.cluster import Api
from nanoray.kube.follow import Follower
from tests.harness.commands import wait_for
from tests.harness.kube_server import ApiServer, ray_head, submit_of
from tests.harness.messages import find_line

pytestmark = pytest.mark.usefixtures("kubectl")
Object = dict[str, Any]
DIAL = "error trying to reach service: dial tcp 10.42.1.5:8265: i/o timeout"
REFUSED = "error trying to reach service: dial tcp 10.42.1.5:8265: connect: connection refused"
FORBIDDEN = 'services "words-abc-head-svc:8265" is forbidden: cannot get services/proxy'


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    (tmp_path / "volume" / "runs").mkdir(parents=True)
    monkeypatch.setattr("nanoray.kube.ray_jobs.PROXY_TIMEOUT_S", 0.2)
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


def end_when(job: Object, found: dict[str, str], key: str) -> None:
    """Let the job end STOPPED once `key` is in what Ray was asked."""

    def wait() -> None:
        while key not in found and not done.wait(0.02):
            pass
        job["status"] |= {"jobDeploymentStatus": "Complete", "jobStatus": "STOPPED"}

    done = threading.Event()
    threading.Timer(20, done.set).start()
    threading.Thread(target=wait, daemon=True).start()


# What keeps the API server from the head, what the user reads of it, and the remedy.
BLOCKS: list[tuple[str, Callable[[ApiServer], Any], str, str]] = [
    (
        "policy",
        lambda s: setattr(s, "proxy_refusal", (503, DIAL)),
        f"503: {DIAL}",
        "`out of reach`",
    ),
    (
        "gateway",
        lambda s: setattr(s, "proxy_refusal", (504, "late")),
        "504: late",
        "network policy",
    ),
    ("dropped", lambda s: setattr(s, "proxy_is_silent", True), "no answer from", "network policy"),
    (
        "right",
        lambda s: setattr(s, "proxy_refusal", (403, FORBIDDEN)),
        f"403: {FORBIDDEN}",
        "rights",
    ),
    (
        "secret",
        lambda s: s.refusals.update({"GET secrets": (403, "secrets is forbidden")}),
        "403: secrets is forbidden",
        "rights",
    ),
]
blocked = pytest.mark.parametrize(
    ("block", "reason", "remedy"),
    [block[1:] for block in BLOCKS],
    ids=[block[0] for block in BLOCKS],
)


@blocked
def test_logs_and_status_go_by_exec(
    server: ApiServer, ray: dict[str, str], capsys: Any, block: Any, reason: str, remedy: str
) -> None:
    """And say once why. A log that is written into a file has no line of ours."""
    running_job(server)
    block(server)
    assert main(["logs", "words"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "start\nstep 1\n"
    find_line(captured.err, "ray", "by exec in pod words-abc-head", reason, remedy)

    assert main(["status", "words"]) == 0
    out = capsys.readouterr().out
    assert "run    step 7/40\n" in out
    find_line(out, "ray", "by exec in pod words-abc-head", reason, remedy)
    assert server.execs == ["words-abc-head"] * 2
    assert server.exec_containers == ["ray-head"] * 2, "a mesh may put another one into the pod"


@blocked
def test_stop_goes_by_exec(
    server: ApiServer, ray: dict[str, str], capsys: Any, block: Any, reason: str, remedy: str
) -> None:
    end_when(running_job(server), ray, "words-1 stopped")
    block(server)
    assert main(["stop", "words"]) == 0
    out = capsys.readouterr().out
    assert ray["words-1 stopped"] == "POST"
    assert "job    words STOPPED\n" in out
    find_line(out, "ray", "by exec in pod words-abc-head", reason, remedy)


@blocked
def test_a_follower_goes_by_exec(
    server: ApiServer, ray: dict[str, str], block: Any, reason: str, remedy: str
) -> None:
    """As submit and `logs --follow` do: the whole log, one line about the way, and the way stays."""
    job = running_job(server)
    block(server)
    printed: list[str] = []

    def print_line(line: str) -> None:
        printed.append(line)
        if line == "step 1":
            ray["words-1"] += "step 2\n"
        elif line == "step 2":
            job["status"] |= {"jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED"}

    follower = Follower(Api(), "nanoray", "words", print_line, poll_s=0.01, annotate_s=0.0)
    assert follower.run()["jobStatus"] == "SUCCEEDED"
    assert [line for line in printed if line[:4] in ("star", "step")] == [
        "start",
        "step 1",
        "step 2",
    ]
    assert len([line for line in printed if line.startswith("ray    ")]) == 1
    find_line("\n".join(printed), "ray", reason, remedy)
    assert job["metadata"]["annotations"] == {"nanoray/step": "7/40"}


def test_submit_goes_by_exec(
    server: ApiServer, ray: dict[str, str], tmp_path: Path, capsys: Any
) -> None:
    """From the first object to the job's end, with an operator that runs it at once."""
    server.proxy_refusal = (503, DIAL)
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
    find_line(out, "ray", "by exec in pod words-abc-head", DIAL, "`out of reach`")


def test_fetch_needs_no_way_to_the_head(
    server: ApiServer, ray: dict[str, str], tmp_path: Path, capsys: Any
) -> None:
    running_job(server)
    server.proxy_refusal = (503, DIAL)
    labels = {"app.kubernetes.io/name": "nanoray-tensorboard"}
    server.objects["pods", "nanoray", "tb"] = {
        "metadata": {"name": "tb", "labels": labels},
        "status": {"phase": "Running"},
    }
    run = tmp_path / "volume" / "runs" / "words-1" / "2026-01-01_000000_words"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("{}\n")
    assert main(["fetch", "words", "--out_dir", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / run.name / "metrics.jsonl").is_file()


# No way at all.


def test_without_any_way_each_command_gives_reason_and_remedy(
    server: ApiServer, ray: dict[str, str], capsys: Any
) -> None:
    running_job(server)
    server.proxy_refusal = (503, DIAL)
    server.exec_refused = True
    for command in ("stop", "logs"):
        assert main([command, "words"]) == 4
        error = capsys.readouterr().err
        find_line(error, DIAL, "needs create on pods/exec", "API server's address at 8265")
    assert main(["status", "words"]) == 0
    find_line(capsys.readouterr().out, "run", "steps unknown", DIAL, "no TensorBoard pod runs")


@pytest.mark.parametrize("status", ["SUCCEEDED", "FAILED"])
def test_a_follower_without_any_way_says_why_there_is_no_log(
    server: ApiServer, ray: dict[str, str], status: str
) -> None:
    """The first requests fail before the job runs, when a failure is no news."""
    job = running_job(server)
    job["status"] |= {"jobStatus": "PENDING"}
    server.proxy_refusal = (503, DIAL)
    server.exec_refused = True
    printed: list[str] = []
    ended = {"jobDeploymentStatus": "Complete", "jobStatus": status}

    def print_line(line: str) -> None:
        printed.append(line)
        if line.startswith("job    Running/PENDING"):
            threading.Timer(0.2, lambda: job["status"].update(jobStatus="RUNNING")).start()
        elif line.startswith("log    out of reach, trying again"):
            threading.Timer(0.2, lambda: job["status"].update(ended)).start()

    Follower(Api(), "nanoray", "words", print_line, poll_s=0.01).run()
    missing = [line for line in printed if line.startswith("log    ")]
    assert len(missing) == 2, "while it runs, once, and at its end"
    for line in missing:
        find_line(line, "out of reach", DIAL, "pods/exec", "API server's address at 8265")


def test_a_head_that_does_not_answer_yet_is_no_matter_of_policies(
    server: ApiServer, ray: dict[str, str], capsys: Any
) -> None:
    running_job(server)
    server.proxies["words-abc-head-svc"] = "http://127.0.0.1:9"
    server.proxy_refusal = (503, "no endpoints available")
    assert main(["stop", "words"]) == 4
    error = capsys.readouterr().err
    find_line(error, "Ray does not answer in pod words-abc-head", "refused")
    assert "policy" not in error
    del server.objects["pods", "nanoray", "words-abc-head"]
    assert main(["stop", "words"]) == 4
    assert "no head pod of words-abc has a token" in capsys.readouterr().err


def test_status_says_what_kubernetes_knows_before_it_waits_for_ray(
    server: ApiServer, ray: dict[str, str], capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dashboard takes a connection and does not answer, neither the proxy nor in its own pod."""
    running_job(server)
    monkeypatch.setattr("nanoray.kube.fetch.RAY_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        server.proxies["words-abc-head-svc"] = f"http://127.0.0.1:{silent.getsockname()[1]}"
        began = time.monotonic()
        assert main(["status", "words"]) == 0
        assert time.monotonic() - began < 10
    job_line, pod_line, run_line = capsys.readouterr().out.splitlines()
    assert job_line == "job    words Running/RUNNING"
    assert pod_line.startswith("pod    words-abc-head Running on ")
    find_line(run_line, "run", "steps unknown: Ray did not answer within 1 s; no TensorBoard pod")


@pytest.mark.parametrize("message", [REFUSED, "no endpoints available for service"])
def test_a_dashboard_that_was_not_up_yet_is_asked_through_the_proxy_again(
    server: ApiServer, ray: dict[str, str], message: str
) -> None:
    """It starts between a 503 of the proxy and the call in the pod: no policy is to blame."""
    job = running_job(server)
    server.proxy_refusal = (503, message)
    server.proxy_opens = message == REFUSED  # else the head's pod is not ready yet
    printed: list[str] = []

    def print_line(line: str) -> None:
        printed.append(line)
        if line == "step 1":
            server.proxy_refusal = None
            ray["words-1"] += "step 2\n"
        elif line == "step 2":
            job["status"] |= {"jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED"}

    Follower(Api(), "nanoray", "words", print_line, poll_s=0.01).run()
    assert "step 2" in printed
    assert [line for line in printed if line.startswith("ray")] == []
    assert server.execs == ["words-abc-head"], "the proxy is used from then on"


def test_what_ray_refuses_is_not_asked_again(
    server: ApiServer, ray: dict[str, str], capsys: Any
) -> None:
    """A wrong token, through the proxy or in the pod: Ray's own answer is the error."""
    running_job(server)
    server.objects["secrets", "nanoray", "token"]["data"]["auth_token"] = "bm90LWl0"
    for refusal in (None, (503, DIAL)):
        server.proxy_refusal = refusal
        assert main(["stop", "words"]) == 4
        find_line(capsys.readouterr().err, "401", "Unauthorized")

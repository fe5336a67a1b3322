"""A Ray cluster of the tests' own, and runs of nanoray.launch on it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOKEN = "nanoray-test-token-nanoray-test-token"


@dataclass
class Cluster:
    """A running `ray start --head` of the tests' own."""

    address: str
    dashboard: str
    env: dict[str, str]
    session: int  # of all its processes


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextmanager
def ray_head(*flags: str, **env: str) -> Iterator[Cluster]:
    """Start a Ray head with its own ports, token and temporary folder; end its whole session afterwards."""
    port, dashboard = free_port(), free_port()
    base = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    base |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "RAY_USAGE_STATS_ENABLED": "0"} | env
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus=2"]
    command += [
        f"--port={port}",
        f"--dashboard-port={dashboard}",
        f"--dashboard-agent-listen-port={free_port()}",  # where jobs are submitted: another Ray may have the usual one
        "--dashboard-host=127.0.0.1",
        "--node-ip-address=127.0.0.1",
    ]
    with tempfile.TemporaryDirectory(prefix="nr-", dir="/tmp", ignore_cleanup_errors=True) as temp:
        head = subprocess.Popen(
            [*command, f"--temp-dir={temp}", *flags],
            env=base | {"TMPDIR": temp},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
        )
        try:
            wait_for(lambda: answers(dashboard), 60, head)
            address = f"127.0.0.1:{port}"
            client = base | {"RAY_ADDRESS": address, "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard}"}
            client.pop("CUDA_VISIBLE_DEVICES", None)
            yield Cluster(address, f"http://127.0.0.1:{dashboard}", client, head.pid)
        finally:
            end_session(head)


def end_session(leader: subprocess.Popen[Any]) -> None:
    """End a process that a test started as a session leader, and what is left of its session."""
    leader.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        leader.wait(3)
    for pid in processes_of_session(leader.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    leader.wait(5)


def processes_of_session(session: int) -> list[int]:
    """Return the live processes of a session that a test started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


def answers(port: int) -> bool:
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


def wait_for(ready: Any, seconds: float, process: subprocess.Popen[str] | None = None) -> None:
    end = time.monotonic() + seconds
    while not ready():
        if process is not None and process.poll() is not None:
            raise AssertionError(f"ended with {process.returncode}: {process.stdout.read() if process.stdout else ''}")
        assert time.monotonic() < end, f"not ready after {seconds} s"
        time.sleep(0.1)


def start(cluster: Cluster | None, recipe: Path, out: Path, *flags: str, **env: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "nanoray.launch", "--config", str(recipe), "--out_dir", str(out), *flags]
    base = cluster.env if cluster else {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=base | {"RAY_USAGE_STATS_ENABLED": "0"} | env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], seconds: float = 90) -> tuple[int, str]:
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"no end after {seconds} s:\n{output}")
    return process.returncode, output


def launch(cluster: Cluster | None, recipe: Path, out: Path, *flags: str) -> tuple[int, str]:
    return finish(start(cluster, recipe, out, *flags))


def only_run(out: Path) -> Path:
    (run,) = [p for p in out.iterdir() if p.is_dir()]
    return run


def summary(out: Path) -> dict[str, Any]:
    return json.loads((only_run(out) / "summary.json").read_text())


def losses(out: Path) -> dict[int, float]:
    lines = (only_run(out) / "metrics.jsonl").read_text().splitlines()
    return {r["step"]: r["train/loss"] for r in map(json.loads, lines)}


def fired(out: Path) -> list[str]:
    """The kinds of the planned faults that fired."""
    lines = (only_run(out) / "faults.jsonl").read_text().splitlines()
    return [event["kind"] for event in map(json.loads, lines) if event["event"] == "injected"]


def in_driver(cluster: Cluster, code: str) -> Any:
    """Run code in a driver process of its own connected to the cluster; return what it prints as JSON."""
    head = (
        "import json, os, ray\nray.init(address=os.environ['RAY_ADDRESS'], namespace='nanoray', log_to_driver=False)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", head + code], cwd=ROOT, env=cluster.env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def no_actors_left(cluster: Cluster) -> bool:
    code = """
from ray.util.state import list_actors
from ray.util.placement_group import placement_group_table
groups = [g["state"] for g in placement_group_table().values()]
print(json.dumps([a.name for a in list_actors() if a.state != "DEAD"] + [g for g in groups if g != "REMOVED"]))"""
    return in_driver(cluster, code) == []

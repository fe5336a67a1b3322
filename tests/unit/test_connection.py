"""The connection to Ray: a local one that does not start, the watch over the head, what nodes report."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from nanoray.cli import stop_signals
from nanoray.errors import PlacementError
from nanoray.host.slots import local_slots
from nanoray.launch import cluster_watch, connection
from nanoray.launch.cluster_watch import HEAD_COMING, HEAD_TIMEOUT_S, LEAVE_S, ClusterWatch
from nanoray.launch.connection import addresses_of, connected
from nanoray.launch.node_errors import NodeErrors
from nanoray.launch.placement import Placement
from nanoray.launch.ray_compat import errors_of_nodes
from nanoray.launch.signals import Stop, StopRequested
from tests.harness.cluster import alive
from tests.harness.commands import wait_for
from tests.harness.scripted_ray import ScriptedTime

# A local Ray.


def connect_by(init: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let `init` take the place of ray.init, and `folder` be that of a local Ray."""
    monkeypatch.setattr(connection.ray, "init", init)
    monkeypatch.setattr(connection.tempfile, "mkdtemp", lambda **_: str(folder))


@pytest.mark.parametrize("failures", [1, 4, 5])
def test_a_local_ray_that_a_busy_machine_starts_too_slowly_is_started_again(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    failures: int,
) -> None:
    """Ray gives its own node 30 s, which no setting changes, and then raises a bare Exception."""
    calls: list[str] = []

    def init(address: str, **options: Any) -> Any:
        calls.append(options["_temp_dir"])
        if len(calls) <= failures:
            raise Exception(
                "The current node timed out during startup. This could happen because ..."
            )
        return SimpleNamespace(dashboard_url="")

    connect_by(init, monkeypatch, tmp_path)
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_MODE", "RAY_USAGE_STATS_ENABLED"):
        monkeypatch.setenv(name, "")
    slots = local_slots("cpu", 2, [], 2.0)
    if failures < 5:
        with connected("local", slots):
            pass
    else:
        with (
            pytest.raises(
                PlacementError,
                match=r"timed out during startup, 5 times .* is busy \(load .* on .* CPUs\); wait",
            ),
            connected("local", slots),
        ):
            pass
    assert calls == [str(tmp_path)] * min(5, failures + 1)
    printed = capsys.readouterr().out
    assert printed.count("was not up within 30 s: this machine is busy (load ") == min(4, failures)


def test_what_an_interrupted_start_has_just_started_does_not_make_the_folder_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A part of Ray's dashboard that has no file there yet, when Ray ends the dashboard alone."""
    folder = tmp_path / "ray"
    folder.mkdir()
    note = tmp_path / "pid"
    part = """sh -c 'sleep 1; mkdir -p "$0/logs"' "$0" > /dev/null 2>&1 & echo $! > "$1"; wait"""
    dashboards: list[subprocess.Popen[bytes]] = []

    def init(address: str, **options: Any) -> None:
        with (folder / "log").open("w") as log:
            command = ["sh", "-c", part, str(folder), str(note)]
            # A process of Ray has a group of its own
            dashboards.append(
                subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=os.setpgrp)
            )
        wait_for(lambda: note.exists() and note.read_text().strip())
        raise StopRequested

    def shutdown() -> None:
        dashboards[0].kill()
        dashboards[0].wait()

    connect_by(init, monkeypatch, folder)
    monkeypatch.setattr(connection.ray, "shutdown", shutdown)
    with pytest.raises(StopRequested), connected("local", local_slots("cpu", 2, [], 2.0)):
        pass
    wait_for(lambda: not alive(int(note.read_text())), 10)
    assert not folder.exists()


def test_a_stop_counts_where_python_ignores_what_its_handler_raises(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The handler of ray.init only raises, and a signal may come within a finalizer: the run went on."""

    class Freed:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    def init(address: str, **options: Any) -> Any:
        ray._private.utils.set_sigterm_handler(lambda signum, frame: sys.exit(signum))
        Freed()
        return SimpleNamespace(dashboard_url="")

    connect_by(init, monkeypatch, tmp_path)
    stop = Stop()
    with (
        stop_signals(stop),
        pytest.raises(StopRequested),
        connected("local", local_slots("cpu", 2, [], 2.0), stop),
    ):
        pass
    assert stop.signal == signal.SIGTERM
    said = capfd.readouterr().err
    assert "stopping" in said
    assert "Traceback" not in said
    assert "Exception ignored" not in said


def test_a_stop_counts_after_rays_core_has_taken_the_handler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The core sets its own in C, which ends the process: SIGTERM once aborted a run that recovered."""

    def init(address: str, **options: Any) -> Any:
        ctypes.CDLL(None).signal(int(signal.SIGTERM), int(signal.SIG_IGN))
        return SimpleNamespace(dashboard_url="")

    connect_by(init, monkeypatch, tmp_path)
    stop = Stop()
    with stop_signals(stop), connected("local", local_slots("cpu", 2, [], 2.0), stop):
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal == signal.SIGTERM


@pytest.mark.parametrize("kind", [Exception, RuntimeError])
@pytest.mark.parametrize("variable", ["", "PYTHONOPTIMIZE", "PYTHONWARNINGS"])
def test_a_local_ray_that_does_not_start_is_an_error_of_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: type[Exception], variable: str
) -> None:
    """Ray's own error has the traceback of its dashboard."""

    def init(address: str, **options: Any) -> Any:
        raise kind("The last 20 lines of dashboard.log:\n  import x\nTypeError: of a docstring\n")

    connect_by(init, monkeypatch, tmp_path)
    for name in ("PYTHONOPTIMIZE", "PYTHONWARNINGS", "RAY_AUTH_TOKEN", "RAY_USAGE_STATS_ENABLED"):
        monkeypatch.setenv(name, "1" if name == variable else "")
    remedy = f"unset {variable}, which Ray's processes inherit, or train without Ray"
    with (
        pytest.raises(PlacementError) as error,
        connected("local", local_slots("cpu", 2, [], 2.0)),
    ):
        pass
    assert str(error.value).startswith(
        f"a local Ray did not start: TypeError: of a docstring; {remedy if variable else 'train'}"
    )
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        (
            resource.RLIMIT_FSIZE,
            2**20,
            "a file may have 1,048,576 bytes (ulimit -f), and the object",
        ),
        (
            resource.RLIMIT_NOFILE,
            64,
            "a process may have 64 open files (ulimit -n), and a local Ray",
        ),
    ],
)
def test_a_limit_that_no_local_ray_bears_is_found_before_it_is_started(
    kind: int, value: int, message: str
) -> None:
    """A file that grows beyond the limit, or a raylet that ends, would be taken for a busy machine."""
    command = (
        "from nanoray.host.slots import local_slots\n"
        "from nanoray.launch.connection import connected\n"
        "with connected('local', local_slots('cpu', 2, [], 2.0)): pass"
    )
    done = subprocess.run(
        [sys.executable, "-c", command],
        capture_output=True,
        text=True,
        timeout=200,
        preexec_fn=lambda: resource.setrlimit(kind, (value, value)),
    )
    assert f"PlacementError: {message}" in done.stderr
    assert done.returncode == 1


# The watch over the head.


def watch(
    clock: ScriptedTime,
) -> tuple[ClusterWatch, socket.socket, dict[str, int], dict[str, float]]:
    """A watch over a head that listens, a run on node1 and node2 with a driver on node0, and node3
    without it.
    """
    head, draining, free = (
        socket.create_server(("127.0.0.1", 0)),
        dict[str, int](),
        {"node2": 5.0, "node3": 0.0},
    )
    address = f"127.0.0.1:{head.getsockname()[1]}"
    state = SimpleNamespace(
        state=SimpleNamespace(get_draining_nodes=lambda: draining),
        available_resources_per_node=lambda: {node: {"CPU": cpus} for node, cpus in free.items()},
    )
    gcs = SimpleNamespace(internal_kv_get=lambda *_: b"")
    api = SimpleNamespace(
        get_runtime_context=lambda: SimpleNamespace(
            gcs_address=address, get_node_id=lambda: "node0"
        ),
        util=SimpleNamespace(
            placement_group_table=lambda group: {"bundles_to_node_id": {0: "node1", 1: "node2"}}
        ),
        nodes=lambda: [
            {"NodeID": n, "NodeManagerAddress": "", "Resources": {}, "Alive": True} for n in free
        ],
        _private=SimpleNamespace(
            state=state, worker=SimpleNamespace(global_worker=SimpleNamespace(gcs_client=gcs))
        ),
    )
    place = Placement(None, "cpu", {"CPU": 1.0}, (0, 1))  # type: ignore[arg-type]
    return ClusterWatch(place, api, clock), head, draining, free


def test_a_head_that_is_gone_is_known_at_once_and_reported_after_a_while() -> None:
    clock = ScriptedTime()
    cluster, head, _, _ = watch(clock)
    with cluster:
        clock.sleep(10.0)
        cluster.check()
        assert cluster.head_answers()
        head.close()
        assert not cluster.head_answers()
        clock.sleep(HEAD_TIMEOUT_S - 1)
        cluster.check()
        assert cluster.trouble() is None
        clock.sleep(2.0)
        assert cluster.trouble() == "the cluster's head has not answered for 15 s"
        cluster.head_timeout_s = 300.0  # with GCS fault tolerance
        assert cluster.trouble() is None
        cluster._answered_at -= 300.0 - HEAD_TIMEOUT_S
        assert cluster.trouble() == "the cluster's head has not answered for 300 s"


@pytest.mark.parametrize("sign", ["listens", "moved"])
def test_a_run_waits_longer_while_a_head_is_on_its_way(
    sign: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy node it starts several times. It is on its way when its name has another address, or
    when something listens again that does not answer yet.
    """
    clock = ScriptedTime()
    cluster, head, _, _ = watch(clock)

    def starting(*_: Any) -> bytes:
        raise RuntimeError("failed to connect to GCS")

    with cluster, contextlib.ExitStack() as stack:
        assert cluster.head_answers()
        port = head.getsockname()[1]
        head.close()
        cluster.check()
        assert cluster.patience_s == HEAD_TIMEOUT_S
        gcs = cluster._api._private.worker.global_worker.gcs_client
        answer, gcs.internal_kv_get = gcs.internal_kv_get, starting
        if sign == "listens":
            head = stack.enter_context(socket.create_server(("127.0.0.1", port)))
        else:
            monkeypatch.setattr(cluster_watch, "addresses_of", lambda _: {"10.0.0.7"})
        cluster.check()
        clock.sleep(HEAD_TIMEOUT_S + 1)
        assert cluster.trouble() is None
        clock.sleep(HEAD_TIMEOUT_S * (HEAD_COMING - 1))
        late = "the cluster's head has not answered for 22.5 s, although a new one is on its way"
        assert cluster.trouble() == late

        # It answers: the next loss is one of its own.
        if sign == "moved":
            head = stack.enter_context(socket.create_server(("127.0.0.1", port)))
        gcs.internal_kv_get = answer
        assert cluster.head_answers()
        assert (cluster.trouble(), cluster.patience_s) == (None, HEAD_TIMEOUT_S)


def test_a_frozen_head_is_not_on_its_way() -> None:
    """The kernel accepts connections for it."""
    clock = ScriptedTime()
    cluster, head, _, _ = watch(clock)

    def frozen(*_: Any) -> bytes:
        raise TimeoutError

    with cluster, head:
        assert cluster.head_answers()
        cluster._api._private.worker.global_worker.gcs_client.internal_kv_get = frozen
        clock.sleep(HEAD_TIMEOUT_S + 1)
        cluster.check()
        assert cluster.trouble() == "the cluster's head has not answered for 15 s"


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("127.0.0.1:6379", {"127.0.0.1"}),
        ("[::1]:6379", {"::1"}),
        ("no-such-head.invalid:6379", set()),
    ],
)
def test_the_addresses_of_a_head(address: str, found: set[str]) -> None:
    assert addresses_of(address) == found


def test_another_head_in_the_place_of_the_old_one_is_asked_nothing_more() -> None:
    """Ray aborts a driver whose question about drained nodes such a head refuses."""
    cluster, head, draining, _ = watch(ScriptedTime())

    def refuse(*_: Any) -> bytes:
        raise RuntimeError(
            "RPC error: WrongClusterID: Perhaps the client is accessing GCS after it has restarted."
        )

    with cluster, head:
        assert cluster.head_answers()
        cluster._api._private.worker.global_worker.gcs_client.internal_kv_get = refuse
        cluster._api._private.state.state.get_draining_nodes = lambda: pytest.fail(
            "Ray aborts here"
        )
        draining["node0"] = 0
        cluster.check()
        assert cluster.replaced
        assert cluster.head_lost
        assert not cluster.head_answers()
        assert (
            cluster.trouble()
            == "another head has taken the place of the cluster's head, and does not know this run"
        )
        assert not cluster.draining


def test_only_a_drain_of_the_drivers_node_is_trouble() -> None:
    cluster, head, draining, _ = watch(ScriptedTime())
    with cluster, head:
        draining |= {"node2": 0, "node9": 0}
        cluster.check()
        assert cluster.trouble() is None
        draining["node0"] = 0
        cluster.check()
        assert cluster.trouble() == "the driver's node node0 is being drained"
        draining["node0"] = 1
        cluster.check()
        assert cluster.trouble() == "the driver's node node0 is being drained, 0 s left"


def test_ranks_leave_a_drained_node_when_others_have_room_or_time_is_short() -> None:
    cluster, head, draining, free = watch(ScriptedTime())

    def notice(left_s: float | None) -> None:
        draining["node2"] = int(1e3 * (time.time() + left_s)) if left_s else 0
        cluster.check()

    with cluster, head:
        notice(None)
        assert not cluster.should_leave(["node2"], save_first=False), (
            "its own free CPUs are no room"
        )
        notice(LEAVE_S + 5)
        assert not cluster.should_leave(["node2"], save_first=False)
        assert cluster.should_leave(["node2"], save_first=True), (
            "a checkpoint takes longer than a step"
        )
        assert cluster.vacated_in_s == pytest.approx(LEAVE_S + 5, abs=1.0)
        assert cluster.avoided(1) == set(), "a new actor waits in its bundle"
        notice(LEAVE_S - 1)
        assert cluster.should_leave(["node2"], save_first=False)
        notice(None)
        assert cluster.vacated_in_s == 0.0
        free["node3"] = 1.0
        cluster.check()
        assert cluster.should_leave(["node2"], save_first=False)
        assert not cluster.should_leave(["node2", "node2"], save_first=False), (
            "there is room for one"
        )
        assert cluster.avoided(0) == set(), "its bundle is on a node that stays"
        assert cluster.avoided(1) == {"node2"}
        assert cluster.avoided(1) == set(), "the room is taken"


# What nodes report.

RAYLET_ENDED = (
    "Raylet is terminated. Termination is unexpected. Possible reasons include: (1) SIGKILL by the "
    "user or system OOM killer, (2) Invalid memory access from Raylet causing SIGSEGV or SIGBUS, (3) "
    "Other termination signals. Last 20 lines of the Raylet logs:\n"
) + "    [2026-11-26 12:00:00,000 C 7 7] (raylet) node_manager.cc:1: Check failed\n" * 20


def test_what_nodes_report_is_one_line_for_both_agents(capsys: pytest.CaptureFixture[str]) -> None:
    """Ray prints it by this function; the agents of a node report the same within seconds."""
    clock = ScriptedTime()

    def report(error: str) -> None:
        data = {"lines": [error], "pid": "raylet", "is_err": False}
        ray._private.worker.print_to_stdstream(data, ignore_prefix=False)

    short = "Raylet is terminated. Termination is unexpected. (more in the log of its node, or pod)"
    before = ray._private.worker.print_to_stdstream
    with errors_of_nodes(NodeErrors(clock).show):
        report(RAYLET_ENDED)
        clock.sleep(2.0)
        report(RAYLET_ENDED)
        report("The node with node id ab has been marked dead")
        assert capsys.readouterr().out.splitlines() == [
            f"ray    a node reports: {short}",
            "ray    a node reports: The node with node id ab has been marked dead",
        ]
        clock.sleep(46.0)  # the next try of the same pod
        report(RAYLET_ENDED)
        assert capsys.readouterr().out == f"ray    a node reports: {short}\n"
    assert ray._private.worker.print_to_stdstream is before


WORKER_DIED = (
    "A worker died or was killed while executing a task by an unexpected system error. To "
    "troubleshoot the problem, check the logs for the dead worker. Lease ID: {lease:056x} Worker ID: "
    "{lease:056x} Node ID: {node:056x} Worker IP address: 10.0.0.{node} Worker port: {port} Worker "
    "PID: {port} Worker exit type: SYSTEM_ERROR"
)


def test_a_node_reports_workers_that_died_alike_once(capsys: pytest.CaptureFixture[str]) -> None:
    """They differ in the ids of lease and worker, in port and pid. Another node is another report."""
    clock = ScriptedTime()
    errors = NodeErrors(clock)
    for number in range(3):
        errors.show(WORKER_DIED.format(lease=number + 7, node=1, port=4700 + number))
        clock.sleep(5.0)
    assert len(capsys.readouterr().out.splitlines()) == 1
    errors.show(WORKER_DIED.format(lease=9, node=2, port=4701))
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_a_user_without_a_home_folder_can_launch(tmp_path: Path) -> None:
    """As in a container that runs under any number: neither HOME nor an entry in passwd."""
    folder = tmp_path / "runtime_resources"  # as of the working directory of a Ray job
    folder.mkdir()
    program = """
import os, pwd
def unknown(uid): raise KeyError(uid)
pwd.getpwuid = unknown
os.environ.pop("HOME", None)
from nanoray.config import make_config
from nanoray.errors import ConfigError
from nanoray.launch.__main__ import lasting_out_dir
config = make_config({"micro_batch_size": 1})
try:
    lasting_out_dir(config)
except ConfigError as error:
    print(error)
print(lasting_out_dir(config.model_copy(update={"out_dir": "/data"})))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=True
    )
    refusal, kept = done.stdout.splitlines()
    assert "no home folder; give --out_dir an absolute path" in refusal
    assert kept == "/data"

"""Placement without a cluster: what is reserved, how ranks are ordered, what is refused; the watch
over the head.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
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
from ray.exceptions import GetTimeoutError

import nanoray
from nanoray.config import load_config
from nanoray.errors import ConfigError, PlacementError
from nanoray.host.slots import local_slots
from nanoray.launch import cluster_watch, placement
from nanoray.launch.cluster_watch import HEAD_COMING, HEAD_TIMEOUT_S, LEAVE_S, ClusterWatch
from nanoray.launch.node_errors import NodeErrors
from nanoray.launch.placement import Placement, addresses_of, connected
from nanoray.launch.ray_compat import errors_of_nodes
from nanoray.launch.signals import Stop, StopRequested
from tests.harness.parsing import parse
from tests.harness.scripted_ray import ScriptedTime


class Cluster:
    """The part of ray's surface that a placement uses, over nodes that do not exist."""

    def __init__(
        self, *nodes: dict[str, float], free: bool = True, devices: tuple[str, ...] = ()
    ) -> None:
        self.all, self.free, self.devices = nodes, free, devices
        self.bundles: list[dict[str, float]] = []
        self.reserved = self.removed = 0
        self.looks_until_created = 0  # at a group that the nodes have room for
        self.util = SimpleNamespace(
            placement_group=self._reserve,
            placement_group_table=self._table,
            remove_placement_group=self._remove,
        )
        self._private = SimpleNamespace(
            state=SimpleNamespace(available_resources_per_node=self._available)
        )

    def _available(self) -> dict[str, dict[str, float]]:
        return {f"id{i}": ({} if not self.free else node) for i, node in enumerate(self.all)}

    def nodes(self) -> list[dict[str, Any]]:
        alive = [
            {
                "Alive": True,
                "NodeID": f"id{i}",
                "NodeManagerAddress": f"10.0.0.{i}",
                "Resources": node,
            }
            for i, node in enumerate(self.all)
        ]
        return [
            *alive,
            {
                "Alive": False,
                "NodeID": "gone",
                "NodeManagerAddress": "10.0.0.9",
                "Resources": {"CPU": 64.0},
            },
        ]

    def _reserve(self, bundles: list[dict[str, float]], strategy: str) -> Any:
        self.bundles, self.strategy = bundles, strategy
        self.reserved += 1
        return SimpleNamespace(ready=lambda: "ready")

    def _table(self, group: Any) -> dict[str, Any]:
        last = len(self.bundles) - 1  # bundles come in no useful order
        nodes = {i: f"node{(last - i) % len(self.all)}" for i in range(len(self.bundles))}
        self.looks_until_created -= 1
        state = "PENDING" if self.looks_until_created > 0 else "CREATED"
        stats = {"scheduling_state": "PENDING"}
        return {"bundles_to_node_id": nodes, "state": state, "stats": stats}

    def _remove(self, group: Any) -> None:
        self.removed += 1

    def remote(self, **_: Any) -> Any:
        handle = SimpleNamespace(remote=lambda: "probe")
        return lambda function: SimpleNamespace(options=lambda scheduling_strategy: handle)

    def wait(
        self, refs: list[Any], timeout: float, num_returns: int = 1
    ) -> tuple[list[Any], list[Any]]:
        return (refs, []) if self.free else ([], refs)

    def get(self, refs: Any, timeout: float) -> Any:
        if refs == "ready":
            if not self.free:
                raise GetTimeoutError("timed out")
            return None
        return [("node0", [device]) for device in self.devices]


def make(cluster: Cluster, check: Callable[[], None] = lambda: None, **config: Any) -> Placement:
    values: dict[str, Any] = {"device": "auto", "global_batch_size": 12, "micro_batch_size": 1}
    return Placement.make(load_config(preset="tiny", overrides=values | config), check, api=cluster)


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

    monkeypatch.setattr(placement.ray, "init", init)
    monkeypatch.setattr(placement.tempfile, "mkdtemp", lambda **_: str(tmp_path))
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


@pytest.mark.parametrize("kind", [Exception, RuntimeError])
@pytest.mark.parametrize("variable", ["", "PYTHONOPTIMIZE", "PYTHONWARNINGS"])
def test_a_local_ray_that_does_not_start_is_an_error_of_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: type[Exception], variable: str
) -> None:
    """Ray's own error has the traceback of its dashboard."""

    def init(address: str, **options: Any) -> Any:
        raise kind("The last 20 lines of dashboard.log:\n  import x\nTypeError: of a docstring\n")

    monkeypatch.setattr(placement.ray, "init", init)
    monkeypatch.setattr(placement.tempfile, "mkdtemp", lambda **_: str(tmp_path))
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
        "from nanoray.launch.placement import connected\n"
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


def test_a_precision_of_gpus_is_refused_on_a_cluster_without_any() -> None:
    cluster = Cluster({"CPU": 4.0})
    with pytest.raises(
        ConfigError,
        match=r"precision = tf32 with device = cpu: .* use precision fp32",
    ):
        make(cluster, workers=2, precision="tf32")
    assert cluster.bundles == [], "before anything is reserved"


def test_ranks_are_ordered_by_node() -> None:
    cluster = Cluster({"CPU": 2.0}, {"CPU": 2.0})
    place = make(cluster, workers=4)
    assert (place.kind, place.workers, place.threads) == ("cpu", 4, 1)
    nodes = cluster.util.placement_group_table(place.group)["bundles_to_node_id"]
    assert [nodes[index] for index in place.order] == ["node0", "node0", "node1", "node1"]
    assert cluster.bundles == [{"CPU": 1.0}] * 4


def test_ranks_are_ordered_by_device_and_ten_comes_after_nine() -> None:
    cluster = Cluster({"CPU": 16.0, "GPU": 11.0}, devices=("10", "9", "2"))
    place = make(cluster, workers=3)
    assert (place.kind, place.order) == ("cuda", (2, 1, 0))
    assert cluster.bundles == [{"GPU": 1.0, "CPU": 1.0}] * 3


def test_slices_are_known_by_their_ids() -> None:
    cluster = Cluster({"CPU": 16.0, "GPU": 2.0}, devices=("MIG-b", "MIG-a"))
    place = make(cluster, workers=2, device="mig")
    assert (place.kind, place.order, cluster.removed) == ("mig", (1, 0), 0)


def test_whole_gpus_are_not_taken_for_slices() -> None:
    cluster = Cluster({"CPU": 16.0, "GPU": 2.0}, devices=("0", "1"))
    with pytest.raises(
        PlacementError, match=r"device = mig, but Ray handed out \['0000', '0001'\]; start Ray with"
    ):
        make(cluster, workers=2, device="mig")
    assert cluster.removed == 1


def test_auto_takes_every_gpu() -> None:
    assert (
        make(Cluster({"CPU": 9.0, "GPU": 3.0}, devices=("0", "1", "2")), workers="auto").workers
        == 3
    )
    assert make(Cluster({"CPU": 9.0}), workers="auto").workers == 2
    assert make(Cluster({"CPU": 1.0}), workers="auto").workers == 1


@pytest.mark.parametrize(
    ("nodes", "config", "text"),
    [
        (
            [{"CPU": 2.0}],
            {"workers": 3, "cpus_per_worker": 1},
            "asked for 3 × 1 CPU, but the cluster can never hold it",
        ),
        (
            [{"CPU": 2.0}],
            {"workers": 3, "cpus_per_worker": 1},
            "total per node: 10.0.0.0 has 2 CPU; lower --workers",
        ),
        (
            [{"CPU": 3.0}, {"CPU": 3.0}],
            {"workers": 3, "cpus_per_worker": 2},
            "asked for 3 × 2 CPU, but the cluster",
        ),
        (
            [{"CPU": 4.0, "GPU": 1.0}],
            {"workers": 2},
            "asked for 2 × 1 GPU + 1 CPU, but the cluster can never hold it",
        ),
        (
            [{"CPU": 4.0}],
            {"workers": 2, "device": "cuda"},
            "asked for 2 × 1 GPU + 1 CPU, but the cluster",
        ),
    ],
)
def test_a_request_that_never_fits_is_refused_at_once(
    nodes: list[dict[str, float]], config: dict[str, Any], text: str
) -> None:
    cluster = Cluster(*nodes)
    with pytest.raises(PlacementError) as caught:
        make(cluster, **config)
    assert text in str(caught.value)
    assert cluster.bundles == [], "nothing was reserved"


@pytest.fixture
def in_a_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a pod that KubeRay's operator made."""
    monkeypatch.setenv("RAY_USAGE_STATS_KUBERAY_IN_USE", "1")


def joining(cluster: Cluster, *later: dict[str, float], after: int = 2) -> Callable[[], None]:
    """A check that is called while a placement waits: every `after` calls another node has joined
    the cluster.
    """
    calls, nodes = itertools.count(1), list(later)

    def check() -> None:
        if next(calls) % after == 0 and nodes:
            cluster.all = (*cluster.all, nodes.pop(0))

    return check


def test_a_head_without_workers_waits_for_them(capsys: pytest.CaptureFixture[str]) -> None:
    """The operator submits the job again before the worker pods have come back."""
    cluster = Cluster({})
    place = make(
        cluster,
        joining(cluster, {"CPU": 1.0}, {"CPU": 1.0}),
        workers=2,
        cpus_per_worker=1,
        placement_timeout_s=60,
    )
    assert place.workers == 2
    assert cluster.bundles == [{"CPU": 1.0}] * 2
    first, second = capsys.readouterr().out.splitlines()
    assert (
        first
        == "wait   at most 60 s for more nodes: no room for workers = 2; total per node: 10.0.0.0 has nothing"
    )
    assert second.endswith("10.0.0.0 has nothing; 10.0.0.1 has 1 CPU")


@pytest.mark.usefixtures("in_a_pod")
def test_in_kubernetes_fewer_pods_than_ranks_need_are_waited_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also for GPUs, while some pods are there; one line per change, not per look."""
    cluster = Cluster({}, {"CPU": 4.0, "GPU": 1.0}, devices=("0", "0"))
    place = make(
        cluster, joining(cluster, {"CPU": 4.0, "GPU": 1.0}, after=4), workers=2, device="cuda"
    )
    assert (place.kind, place.workers) == ("cuda", 2)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    assert lines[0].endswith(
        "no room for workers = 2; total per node: 10.0.0.0 has nothing; 10.0.0.1 has 1 GPU + 4 CPU"
    )


@pytest.mark.usefixtures("in_a_pod")
@pytest.mark.parametrize("second", [True, False])
def test_ranks_share_no_cpu_while_pods_are_still_coming(
    second: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks would fit on the first pod, at half a CPU each; where no other one comes they do."""
    monkeypatch.setattr("nanoray.launch.placement.ASSEMBLED_S", 1.5)
    cluster = Cluster({}, {"CPU": 1.0})
    make(cluster, joining(cluster, *[{"CPU": 1.0}] * second), workers=2, device="cpu")
    assert cluster.bundles == [{"CPU": 1.0 if second else 0.5}] * 2


def test_an_autoscaler_hears_what_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    """It adds nodes for placement groups that wait; that it may is said by a longer timeout."""
    cluster, heard = Cluster({"CPU": 8.0}, devices=("0", "0")), list[Any]()

    def check() -> None:
        heard.append((cluster.bundles, cluster.removed))
        if len(heard) == 3:
            cluster.all = ({"CPU": 8.0}, {"CPU": 4.0, "GPU": 1.0}, {"CPU": 4.0, "GPU": 1.0})

    place = make(cluster, check, workers=2, device="cuda", placement_timeout_s=60)
    assert (place.kind, place.workers) == ("cuda", 2)
    assert heard == [([{"GPU": 1.0, "CPU": 1.0}] * 2, 0)] * 3
    assert (cluster.reserved, cluster.removed) == (1, 0), "the one that waited is the run's own"
    with pytest.raises(PlacementError, match="but the cluster can never hold it"):
        make(Cluster({"CPU": 8.0}), workers=2, device="cuda")
    assert "no room for workers = 2" in capsys.readouterr().out


def test_a_group_that_waited_is_reserved_before_it_is_removed() -> None:
    """Ray may lose what it is reserving. The nodes have more CPUs than were awaited, so another
    group takes its place.
    """
    cluster, left = Cluster({}), list[int]()
    remove = cluster.util.remove_placement_group

    def record(group: Any) -> None:
        left.append(cluster.looks_until_created)
        remove(group)

    cluster.util.remove_placement_group = record
    cluster.looks_until_created = 3
    make(cluster, joining(cluster, {"CPU": 4.0}), workers=2, device="cpu")
    assert cluster.bundles == [{"CPU": 2.0}] * 2
    assert (cluster.reserved, cluster.removed) == (2, 1)
    assert left == [0]


def test_ranks_that_share_cpus_start_at_once_where_no_pods_are_coming() -> None:
    """Also with a longer timeout, which only says that a cluster may grow."""
    started = time.monotonic()
    make(Cluster({"CPU": 2.0}), workers=4, device="cpu", placement_timeout_s=20)
    assert time.monotonic() - started < 5


@pytest.mark.usefixtures("in_a_pod")
def test_nodes_that_never_join_are_an_error_in_time() -> None:
    cluster = Cluster({})
    with pytest.raises(PlacementError) as caught:
        make(cluster, workers=2, device="cpu", placement_timeout_s=1)
    assert "available per node: none CPUs" in str(caught.value)
    assert (
        "waited 1 s for more nodes: see why they do not join, or raise --placement_timeout_s"
        in str(caught.value)
    )
    assert cluster.bundles == [{"CPU": 1.0}] * 2, "what an autoscaler hears"
    assert cluster.removed == 1


def test_a_stop_ends_the_wait_for_nodes() -> None:
    stop, calls = Stop(), itertools.count()

    def check() -> None:
        if next(calls) == 2:
            stop(signal.SIGTERM, None)
        stop.check()

    with pytest.raises(StopRequested):
        make(Cluster({}), check, workers=2, device="cpu")
    assert next(calls) == 3


def test_a_busy_cluster_is_an_error_in_time() -> None:
    cluster = Cluster({"CPU": 2.0}, free=False)
    with pytest.raises(PlacementError) as caught:
        make(cluster, workers=2, cpus_per_worker=1, placement_timeout_s=2)
    assert "asked for 2 × 1 CPU, not free within 2 s (PENDING)" in str(caught.value)
    assert "available per node: 10.0.0.0 has nothing; wait for other jobs" in str(caught.value)
    assert cluster.removed == 1


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


# Actors and tasks that ask for nothing.


def test_what_asks_for_no_resource_is_bound_to_a_node() -> None:
    """Ray places it on any node, the head included, unless its affinity is hard."""
    found = []
    for path in sorted(Path(nanoray.__file__).parent.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "num_cpus" not in text and "NodeAffinity" not in text:
            continue
        for call in ast.walk(parse(text)):
            if not isinstance(call, ast.Call):
                continue
            given = {word.arg: ast.unparse(word.value) for word in call.keywords if word.arg}
            where = f"{path.name}:{call.lineno}"
            if ast.unparse(call.func).endswith("NodeAffinitySchedulingStrategy"):
                assert given.get("soft") == "False", where
            if given.get("num_cpus") == "0":
                found.append(path.name)
                asks = given.get("num_gpus", "0") != "0"
                assert asks or "scheduling_strategy" in given, where
    assert found == ["actors.py", "placement.py", "rank_end.py"]


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

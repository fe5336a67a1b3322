"""Placement without a cluster: what is reserved, how ranks are ordered, what is refused."""

from __future__ import annotations

import ast
import itertools
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError

import nanoray
from nanoray.config import load_config
from nanoray.errors import ConfigError, PlacementError
from nanoray.launch.placement import Placement
from nanoray.launch.signals import Stop, StopRequested
from tests.harness.parsing import parse


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
    assert sorted(found) == ["actors.py", "placement.py", "rank_end.py"]

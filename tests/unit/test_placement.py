"""Placement without a cluster: what is reserved, how ranks are ordered, what is refused; the watch over the head."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError

from nanoray.config import load_config
from nanoray.errors import PlacementError
from nanoray.launch.placement import HEAD_TIMEOUT_S, ClusterWatch, Placement
from tests.harness.scripted_ray import ScriptedTime


class Cluster:
    """The part of ray's surface that a placement uses, over nodes that do not exist."""

    def __init__(self, *nodes: dict[str, float], free: bool = True, devices: tuple[str, ...] = ()) -> None:
        self.all, self.free, self.devices = nodes, free, devices
        self.bundles: list[dict[str, float]] = []
        self.removed = 0
        self.util = SimpleNamespace(
            placement_group=self._reserve,
            placement_group_table=self._table,
            remove_placement_group=self._remove,
        )
        available = {f"id{i}": ({} if not free else node) for i, node in enumerate(nodes)}
        self._private = SimpleNamespace(state=SimpleNamespace(available_resources_per_node=lambda: available))

    def nodes(self) -> list[dict[str, Any]]:
        alive = [
            {"Alive": True, "NodeID": f"id{i}", "NodeManagerAddress": f"10.0.0.{i}", "Resources": node}
            for i, node in enumerate(self.all)
        ]
        return [
            *alive,
            {"Alive": False, "NodeID": "gone", "NodeManagerAddress": "10.0.0.9", "Resources": {"CPU": 64.0}},
        ]

    def _reserve(self, bundles: list[dict[str, float]], strategy: str) -> Any:
        self.bundles, self.strategy = bundles, strategy
        return SimpleNamespace(ready=lambda: "ready")

    def _table(self, group: Any) -> dict[str, Any]:
        last = len(self.bundles) - 1  # bundles come in no useful order
        nodes = {i: f"node{(last - i) % len(self.all)}" for i in range(len(self.bundles))}
        return {"bundles_to_node_id": nodes, "stats": {"scheduling_state": "PENDING"}}

    def _remove(self, group: Any) -> None:
        self.removed += 1

    def remote(self, **_: Any) -> Any:
        handle = SimpleNamespace(remote=lambda: "probe")
        return lambda function: SimpleNamespace(options=lambda scheduling_strategy: handle)

    def wait(self, refs: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return (refs, []) if self.free else ([], refs)

    def get(self, refs: Any, timeout: float) -> Any:
        if refs == "ready":
            if not self.free:
                raise GetTimeoutError("timed out")
            return None
        return [("node0", [device]) for device in self.devices]


def make(cluster: Cluster, **config: Any) -> Placement:
    values: dict[str, Any] = {"device": "auto", "global_batch_size": 12, "micro_batch_size": 1}
    return Placement.make(load_config(preset="tiny", overrides=values | config), api=cluster)


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
    with pytest.raises(PlacementError, match=r"device = mig, but Ray handed out \['0000', '0001'\]; start Ray with"):
        make(cluster, workers=2, device="mig")
    assert cluster.removed == 1


def test_auto_takes_every_gpu() -> None:
    assert make(Cluster({"CPU": 9.0, "GPU": 3.0}, devices=("0", "1", "2")), workers="auto").workers == 3
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
        ([{"CPU": 2.0}], {"workers": 3, "cpus_per_worker": 1}, "total per node: 10.0.0.0 has 2 CPU; lower --workers"),
        ([{"CPU": 3.0}, {"CPU": 3.0}], {"workers": 3, "cpus_per_worker": 2}, "asked for 3 × 2 CPU, but the cluster"),
        ([{"CPU": 4.0, "GPU": 1.0}], {"workers": 2}, "asked for 2 × 1 GPU + 1 CPU, but the cluster can never hold it"),
        ([{"CPU": 4.0}], {"workers": 2, "device": "cuda"}, "asked for 2 × 1 GPU + 1 CPU, but the cluster"),
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


def test_a_busy_cluster_is_an_error_in_time() -> None:
    cluster = Cluster({"CPU": 2.0}, free=False)
    with pytest.raises(PlacementError) as caught:
        make(cluster, workers=2, cpus_per_worker=1, placement_timeout_s=2)
    assert "asked for 2 × 1 CPU, not free within 2 s (PENDING)" in str(caught.value)
    assert "available per node: 10.0.0.0 has nothing; wait for other jobs" in str(caught.value)
    assert cluster.removed == 1


# The watch over the head.


def watch(time: ScriptedTime) -> tuple[ClusterWatch, socket.socket, dict[str, int]]:
    """A watch over a head that listens, and a run on node 1 and node 2."""
    head, draining = socket.create_server(("127.0.0.1", 0)), dict[str, int]()
    api = SimpleNamespace(
        get_runtime_context=lambda: SimpleNamespace(gcs_address=f"127.0.0.1:{head.getsockname()[1]}"),
        util=SimpleNamespace(placement_group_table=lambda group: {"bundles_to_node_id": {0: "node1", 1: "node2"}}),
        _private=SimpleNamespace(state=SimpleNamespace(state=SimpleNamespace(get_draining_nodes=lambda: draining))),
    )
    return ClusterWatch(Placement(None, "cpu", {"CPU": 1.0}, (0, 1)), api, time), head, draining  # type: ignore[arg-type]


def test_a_head_that_is_gone_is_known_at_once_and_reported_after_a_while() -> None:
    time = ScriptedTime()
    cluster, head, _ = watch(time)
    with cluster:
        time.sleep(10.0)
        cluster.check()
        assert cluster.head_answers()
        head.close()
        assert not cluster.head_answers()
        time.sleep(HEAD_TIMEOUT_S - 1)
        cluster.check()
        assert cluster.trouble() == ""
        time.sleep(2.0)
        assert cluster.trouble() == "the cluster's head has not answered for 15 s"


def test_only_the_nodes_of_this_run_matter() -> None:
    cluster, head, draining = watch(ScriptedTime())
    with cluster, head:
        draining["node9"] = 0
        cluster.check()
        assert cluster.trouble() == ""
        draining["node2"] = 0
        cluster.check()
        assert cluster.trouble() == "node node2 is being drained"
        draining["node2"] = 1
        cluster.check()
        assert cluster.trouble() == "node node2 is being drained, 0 s left"

"""The nodes of a benchmark's cluster: how they come, go, and come back, with made-up processes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nanoray.bench.harness.processes import ChildFailed
from nanoray.machine.slots import Slots
from tests.stress import cluster as module
from tests.stress.cluster import MOST_FAILED_STARTS, NodeCluster


class Node:
    """A `ray start` that says whether it is up, and whether it has ended."""

    def __init__(self, *_: Any) -> None:
        self.is_up = False
        self.code: int | None = None
        self.killed = 0
        self.process = SimpleNamespace(poll=lambda: self.code, pid=1)

    def kill(self) -> int:
        self.killed += 1
        return 6

    def end(self) -> None:
        self.code = -9

    def tail(self) -> str:
        return "its last lines"


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NodeCluster:
    """A cluster of two nodes whose head runs."""
    monkeypatch.setattr(module, "Child", Node)
    monkeypatch.setattr(module, "is_up", lambda node: node.is_up)
    slots = Slots("cpu", (), 2, "ranks on CPUs")
    found = NodeCluster(tmp_path, {}, slots, nodes=2, head_cpus=1)
    found.head = Node()  # type: ignore[assignment]
    return found


def bring_up(cluster: NodeCluster) -> list[Any]:
    nodes: Any = cluster.nodes
    for _ in range(4):
        cluster.is_complete()
        for node in nodes.values():
            node.is_up = True
    assert cluster.is_complete()
    return list(nodes.values())


def test_nodes_start_one_after_the_other(cluster: NodeCluster) -> None:
    assert not cluster.is_complete()
    assert not cluster.is_complete()
    assert list(cluster.nodes) == ["node1"]
    assert len(bring_up(cluster)) == 2


def test_a_node_that_is_taken_is_killed_and_another_one_comes_when_its_time_has_come(
    cluster: NodeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    first, _ = bring_up(cluster)
    assert cluster.take("node1", back_s=5.0) == 6
    assert first.killed == 1
    assert not cluster.is_complete()
    assert list(cluster.nodes) == ["node2"]
    now[0] += 5.0
    assert not cluster.is_complete()
    assert list(cluster.nodes) == ["node2", "node3"]
    bring_up(cluster)


def test_a_node_that_does_not_come_up_is_tried_again_but_not_for_ever(
    cluster: NodeCluster,
) -> None:
    for _ in range(MOST_FAILED_STARTS):
        cluster.is_complete()
        (node,) = cluster.nodes.values()
        node.end()
    cluster.is_complete()
    (node,) = cluster.nodes.values()
    node.end()
    with pytest.raises(ChildFailed, match="a node ended by itself\nits last lines"):
        cluster.is_complete()


@pytest.mark.parametrize("which", ["head", "node"])
def test_what_ends_by_itself_is_no_fault_of_the_benchmark(cluster: NodeCluster, which: str) -> None:
    node, _ = bring_up(cluster)
    (cluster.head if which == "head" else node).end()
    with pytest.raises(ChildFailed, match="ended by itself"):
        cluster.is_complete()

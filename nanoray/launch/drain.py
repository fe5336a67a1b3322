"""Ranks on nodes that will be taken away: whether they leave their group, when, and what the others
do then.

    notice ─► room elsewhere, or little time left ─► all finish the step ─► those ranks end, new ones take their slots
                                                                        └─► or all save, and start again

They train on as long as they can: where a new node comes only when the old one is gone, as on
Kubernetes, the others would only wait. A node that is gone before its ranks have left is a lost
node, which costs the step in progress.
"""

from __future__ import annotations

from enum import Enum

from nanoray.faults.cause import FailureCollector
from nanoray.launch.cluster_watch import ClusterWatch
from nanoray.launch.worker_group import WorkerGroup


class Leave(Enum):
    """What the ranks on drained nodes should do."""

    STAY = "train on"
    IN_PLACE = "leave after this step, while the others keep the run's state in memory"
    SAVE = "save with all others, which then start again: nobody elsewhere could go on from memory"


class Drains:
    """Decides when ranks leave nodes that are drained, and announces each such node once."""

    def __init__(self, cluster: ClusterWatch) -> None:
        self._cluster, self._announced = cluster, set[str]()

    def decide(self, group: WorkerGroup) -> Leave:
        """Return what the members on drained nodes should do now; STAY if there are none."""
        slots = group.drained
        if not slots:
            return Leave.STAY
        in_place = (
            group.in_place and len(slots) < len(group.members) and not group.lost_share(slots)
        )
        nodes = [group.facts[slot]["node"] for slot in slots]
        if not self._cluster.should_leave(nodes, save_first=not in_place):
            return Leave.STAY
        return Leave.IN_PLACE if in_place else Leave.SAVE

    def announce(self, group: WorkerGroup) -> None:
        """Print a line for each drained node that has members and is new."""
        for slot in group.drained:
            node, ip = group.facts[slot]["node"], group.facts[slot]["ip"]
            if node not in self._announced:
                self._announced.add(node)
                ranks = ", ".join(
                    str(other) for other in group.drained if group.facts[other]["node"] == node
                )
                notice = self._cluster.notice(node)
                print(
                    f"\ndrain    node {node[:8]} ({ip}) with rank {ranks} is being drained{notice}",
                    flush=True,
                )

    def end(self, group: WorkerGroup, collector: FailureCollector) -> bool:
        """End the members on drained nodes, if all members wait for orders and these should leave
        the others.

        Returns whether any was ended.
        """
        waits = collector.all_waiting and not collector.failures
        leaving = group.drained if waits and self.decide(group) is Leave.IN_PLACE else []
        for slot in leaving:
            group.end_drained(slot, collector)
        return bool(leaving)

    def failures(self, group: WorkerGroup) -> FailureCollector:
        """Return the drained members as the cause why all ranks save and start again."""
        collector = FailureCollector(group.drained, False, 0.0, 0.0)
        for slot in group.drained:
            collector.ended(slot, group.drain_of(slot), group.clock.monotonic())
        return collector

"""Ranks leave a node that will be taken away.

    notice ─► room elsewhere, or little time left ─► all finish the step
                 ├─► its ranks end, and new ones take their slots
                 └─► or all ranks save, and start again

The ranks on it train on as long as they can. Where a new node comes only when the old one is gone,
as on Kubernetes, the others would only wait. A node that is gone before its ranks have left is a
lost node, which costs the step in progress.
"""

from __future__ import annotations

from enum import Enum

from nanoray.faults.cause import FailureCollector
from nanoray.launch.recovery.cluster_watch import ClusterWatch
from nanoray.launch.recovery.rank_end import drain_of, end_drained
from nanoray.launch.recovery.worker_group import WorkerGroup
from nanoray.machine.output import say


class Leave(Enum):
    """What the ranks on drained nodes should do."""

    STAY = "train on"
    IN_PLACE = "leave after this step, while the others keep the run's state in memory"
    SAVE = "save with all others, which then start again: none elsewhere can go on from memory"


class Drains:
    """Decides when ranks leave nodes that are drained, and prints each such node once."""

    def __init__(self, cluster: ClusterWatch) -> None:
        self._cluster = cluster
        self._announced: set[str] = set()

    def decide(self, group: WorkerGroup) -> Leave:
        """Return what the members on drained nodes should do now; STAY if there are none."""
        slots = group.drained
        if not slots:
            return Leave.STAY

        # The others can keep the state if there are others, and every share of it is among them.
        others_remain = len(slots) < len(group.members)
        in_place = group.in_place and others_remain and not group.lost_share(slots)
        in_place = in_place and not group.in_script

        nodes = [group.facts[slot]["node"] for slot in slots]
        if not self._cluster.should_leave(nodes, save_first=not in_place):
            return Leave.STAY
        return Leave.IN_PLACE if in_place else Leave.SAVE

    def announce(self, group: WorkerGroup) -> None:
        """Print a line for each newly drained node that has members."""
        drained = group.drained
        for slot in drained:
            node = group.facts[slot]["node"]
            if node in self._announced:
                continue
            self._announced.add(node)
            on_this_node = [other for other in drained if group.facts[other]["node"] == node]
            ranks = ", ".join(str(other) for other in on_this_node)
            say(
                f"\ndrain    node {node[:8]} ({group.facts[slot]['ip']}) with rank {ranks} "
                f"is being drained{self._cluster.notice(node)}"
            )

    def end(self, group: WorkerGroup, collector: FailureCollector) -> bool:
        """End the members on drained nodes if all members wait and these should leave the others.

        Returns whether any was ended.
        """
        all_wait = collector.all_waiting and not collector.failures
        if not all_wait or self.decide(group) is not Leave.IN_PLACE:
            return False
        leaving = group.drained
        for slot in leaving:
            end_drained(group, slot, collector)
        return bool(leaving)

    def failures(self, group: WorkerGroup) -> FailureCollector:
        """Return the drained members as the cause why all ranks save and start again."""
        collector = FailureCollector(group.drained, False, 0.0, 0.0)
        for slot in group.drained:
            collector.ended(slot, drain_of(group, slot), group.pool.clock.monotonic())
        return collector

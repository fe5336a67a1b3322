"""Orders to the ranks of a group that broke: leave it, although no connection to the lost rank has
closed.

    a rank is lost ─► most see that their connections close ─► the others are told ─► and again, until all wait

A process that is frozen, a node that is cut off, and NCCL close no connection. Without an order the
ranks that wait for such a peer would find out when the collective's timeout is over.
"""

from __future__ import annotations

from typing import Any

from nanoray.faults.cause import FailureCollector
from nanoray.launch.worker_group import WorkerGroup

NOTICE_S = 0.1  # a closed connection is noticed within a few hundredths


class AbortOrders:
    """Decides when members are ordered to abort their process groups."""

    def __init__(self, clock: Any) -> None:
        self._clock, self._due = clock, 0.0

    def look(self, group: WorkerGroup, collector: FailureCollector) -> None:
        """Order members to abort that have neither failed nor left the group, once one has been
        lost.
        """
        now = self._clock.monotonic()
        if not collector.failures:
            self._due = 0.0
        elif collector.in_place and now >= max(self._due, collector.first_failure_at + NOTICE_S):
            self._due = now + group.heartbeat_s
            for slot in collector.silent:
                group.actors[slot].abort.remote(group.spec.attempt)

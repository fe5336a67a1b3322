"""Ranks that trained on outside of their slot go back to it, once their slot has a node again.

    a node is lost ─► a spare on another node takes the rank over ─► the cluster gets a new node
                                                                            │
    the group goes on, the rank in its slot ◄─ all leave the group ◄─ a new actor starts there

While a rank is outside of its slot it uses CPUs that others have reserved, and its own slot stands
empty: a placement that no start would choose. The new actor imports and rehearses a step while the
ranks train on. Then they leave their group after the same step, the new actor receives the state
from their memory, and the old one ends: no step is repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nanoray.base.output import say
from nanoray.launch.actors import START_TRIES
from nanoray.launch.worker_group import WorkerGroup

LOOK_S = 2.0  # between two questions to the head, while a rank is outside of its slot


class Moves:
    """Decides when ranks go back to their slots, and says so once."""

    def __init__(self, clock: Any) -> None:
        self._clock = clock
        self._looked_at = 0.0  # monotonic seconds
        self._announced: set[int] = set()  # ranks outside of their slots
        self._failed: dict[int, int] = {}  # slot -> new actors that died before they were ready

    def due(self, group: WorkerGroup) -> bool:
        """Return whether all ranks should leave their group now, because a rank can move.

        Starts new actors for ranks that are outside of their slots. It costs nothing while there
        are none.
        """
        displaced = [slot for slot in group.members if slot in group.pool.displaced]
        now = self._clock.monotonic()
        if not displaced or not group.in_place or now < self._looked_at + LOOK_S:
            return False
        self._looked_at = now

        homes = group.pool.homes()
        for slot in displaced:
            if homes.get(slot) == group.facts[slot]["node"]:
                group.pool.displaced.discard(slot)
                self._announced.discard(slot)
                continue
            self._announce(group, slot)
            can_start = slot in homes and slot not in group.pool.prepared
            if can_start and self._failed.get(slot, 0) < START_TRIES:
                group.pool.prepare(slot)
        for slot in group.pool.drop_dead_prepared():
            self._failed[slot] = self._failed.get(slot, 0) + 1
        return bool(self.ready(group))

    def ready(self, group: WorkerGroup) -> list[int]:
        """Return the members that can move together now: their new actors are ready.

        The others must hold each share of the run's state. Who is left out moves the next time.
        """
        ready = group.pool.prepared_and_ready()
        moving: list[int] = []
        for slot in group.members:
            others_remain = len(moving) + 1 < len(group.members)
            if slot in ready and others_remain and not group.lost_share([*moving, slot]):
                moving.append(slot)
        return moving

    def announce_moved(self, group: WorkerGroup, slots: Sequence[int]) -> None:
        """Print a line for each rank that has moved."""
        for slot in slots:
            facts = group.facts[slot]
            say(
                f"move     rank {slot} (pid {facts['pid']}) is back in its slot, on node "
                f"{facts['node'][:8]} ({facts['ip']}); no step is repeated\n"
            )

    def _announce(self, group: WorkerGroup, slot: int) -> None:
        """Print once that a rank is outside of its slot, and with which ranks it shares a node."""
        if slot in self._announced:
            return
        self._announced.add(slot)
        facts = group.facts[slot]
        neighbours = []
        for other in group.members:
            if other != slot and group.facts[other]["node"] == facts["node"]:
                neighbours.append(str(other))
        shared = f" and shares it with rank {', '.join(neighbours)}" if neighbours else ""
        say(
            f"move     rank {slot} trains on node {facts['node'][:8]} ({facts['ip']}), outside of "
            f"its slot{shared}, until its slot has a node"
        )

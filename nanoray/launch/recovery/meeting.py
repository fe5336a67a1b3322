"""Where the ranks of a group find each other: one's store, a secret, and the backend to use then.

begin:   open_first (in rank 0)    ─► address ─┐
regroup: open (in a rank that has  ─► address ─┼─► rendezvous ─► each rank's `run` or `go_on`
         the run's state)                      │
a rank is lost before all have met ─► break_for ─► the others fail at once
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ray.exceptions import RayError

from nanoray.launch.recovery.actors import ActorPool, start_timeout_s
from nanoray.parallel.rendezvous import (
    BackendChoice,
    RankDevice,
    Rendezvous,
    choose_backend,
    rendezvous_of,
)

STORE_TIMEOUT_S = 5.0  # a rank that waits opens a store in milliseconds


class Meeting:
    """The newest meeting of a run's ranks. The backend is chosen in the first, for all of them."""

    def __init__(self, pool: ActorPool) -> None:
        self._pool = pool
        self.choice: BackendChoice | None = None
        self._store_slot: int | None = None  # the slot whose process serves the store
        self._secret = ""

    @property
    def backend(self) -> str:
        """Return the process groups' backend; empty before it is chosen."""
        return self.choice.backend if self.choice else ""

    def rendezvous(self, members: Sequence[int]) -> list[Rendezvous]:
        """Return each member's rank and peers; the store's address is not known yet."""
        facts = [self._pool.facts[slot] for slot in members]
        if self.choice is None:  # a run keeps its backend
            self.choice = self._choose_backend(members[0], facts)
        # The secret keeps processes of an older meeting out of this one.
        self._secret = secrets.token_hex(16)
        return rendezvous_of([fact["node"] for fact in facts], self.choice, self._secret)

    def _choose_backend(self, first: int, facts: list[dict[str, Any]]) -> BackendChoice:
        kind = self._pool.place.kind
        version = None
        if kind != "cpu":
            asked = self._pool.actors[first].nccl_version.remote()
            [version] = self._pool.wait_for([asked], start_timeout_s(self._pool.spec.config))
        cards = []
        for fact in facts:
            # Ray does not report which card a slice belongs to, so all slices of a node count as
            # slices of one card.
            card = "" if kind == "mig" else ",".join(fact["devices"])
            cards.append(RankDevice(kind, fact["node"], card))
        return choose_backend(cards, self._pool.spec.config.backend, version)

    def open_first(self, world_size: int) -> tuple[str, int]:
        """Open a store in rank 0's process, for a start. Returns its address. Raises RayError.

        That process may still be importing torch.
        """
        if world_size == 1:
            return "", 0
        store = self._request_store(0, world_size)
        [(address, port)] = self._pool.wait_for([store], start_timeout_s(self._pool.spec.config))
        self._store_slot = 0
        return address, port

    def open(self, world_size: int, holders: Sequence[int]) -> tuple[str, int]:
        """Open a store in the first of the slots `holders` that answers. Returns its address.

        Raises RayError if none of them does: they are dead or frozen.
        """
        if world_size == 1:
            return "", 0
        for slot in holders:
            store = self._request_store(slot, world_size)
            with suppress(RayError):
                address, port = self._pool.api.get(store, timeout=STORE_TIMEOUT_S)
                self._store_slot = slot
                return address, port
        ranks = ", ".join(map(str, holders))
        raise RayError(f"none of the ranks {ranks}, which hold the state, answers")

    def _request_store(self, slot: int, world_size: int) -> Any:
        timeout_s = self._pool.spec.config.init_timeout_s
        return self._pool.actors[slot].open_store.remote(world_size, timeout_s)

    def break_for(self, rank: int, running: Sequence[int]) -> None:
        """Let members that still wait for a lost rank in the store's meeting fail at once.

        running: the slots whose process is alive. The store is lost with its process.
        """
        if self._store_slot is not None and self._store_slot in running:
            server = self._pool.actors[self._store_slot]
            server.break_meeting.remote(self._secret, rank)
            self._store_slot = None

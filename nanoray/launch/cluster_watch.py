"""The watch over the cluster of a run: whether its head answers, which nodes are being drained, and
who has room.

Kubernetes ends a pod with SIGTERM, and Ray then drains its node: nothing new is started there, and
after a notice everything on it ends. `kubectl drain`, a spot notice and `ray drain-node` look the
same.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

import ray

from nanoray.launch.placement import Placement, dial, nodes_of, room_on

HEAD_ANSWER_S = 2.0  # it answers in milliseconds
# After 60 s without a head Ray ends the driver, without an error; with GCS fault tolerance 600
HEAD_TIMEOUT_S = 15.0
# Of a notice are left when ranks leave whose place cannot be taken yet: a step, and a new group
LEAVE_S = 10.0
ANOTHER_HEAD = "another head has taken the place of the cluster's head, and does not know this run"
SAVE_AHEAD_S = 90.0  # the same where all ranks must save first


class ClusterWatch:
    """Checks every second, in a thread, that the cluster's head answers, and which nodes are being
    drained.
    """

    def __init__(
        self,
        place: Placement,
        api: Any = ray,
        clock: Any = time,
        head_timeout_s: float = HEAD_TIMEOUT_S,
    ) -> None:
        self._place, self._api, self._clock = place, api, clock
        self.head_timeout_s = head_timeout_s
        self._address, self._home = "", ""  # of the head; the driver's node
        self._answered_at = clock.monotonic()
        self._asked, self._answered = 0, 0  # questions of head_answers
        self.replaced = False  # a head answers that was started anew, without what the old one knew
        # Node -> when it will be gone, Unix ms; 0 without such a time
        self.draining: Mapping[str, int] = {}
        self._lost_bundles: Mapping[int, str] = {}  # the bundles on those nodes, and the nodes
        self._room = 0  # how many more ranks the other nodes can hold
        self._over, self._ask = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._check_until_exit, daemon=True)

    def __enter__(self) -> ClusterWatch:
        context = self._api.get_runtime_context()  # not earlier: the call starts Ray if need be
        self._address, self._home = context.gcs_address, context.get_node_id()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._ask.set()

    # The head.

    @property
    def head_lost(self) -> bool:
        """Whether the head has not answered for `head_timeout_s`, or is another one."""
        return self.replaced or self._clock.monotonic() - self._answered_at > self.head_timeout_s

    def head_answers(self, within_s: float = HEAD_ANSWER_S) -> bool:
        """Whether the head answers a request of now. Without a head, creating or ending an actor
        blocks for ever.

        A connection proves nothing: the kernel accepts it for a process that is frozen.
        """
        self._asked += 1
        question, deadline = self._asked, time.monotonic() + within_s
        self._ask.set()
        while self._answered < question:
            try:
                dial(self._address)
            except OSError:
                return False
            if self.replaced or time.monotonic() > deadline:
                return False
            time.sleep(0.002)  # the thread answers within a millisecond or two
        return True

    def trouble(self) -> str:
        """Return why this run should stop now, with a checkpoint; empty if it need not."""
        if self.replaced:
            return ANOTHER_HEAD
        if self.head_lost:
            return f"the cluster's head has not answered for {self.head_timeout_s:g} s"
        if self._home in self.draining:
            return f"the driver's node {self._home[:8]} is being drained{self.notice(self._home)}"
        return ""

    # Drained nodes.

    def notice_s(self, node: str) -> float:
        """Return how many seconds a drained node has left; infinite where nobody said."""
        at = self.draining.get(node, 0)
        return max(0.0, at / 1e3 - time.time()) if at else math.inf

    def notice(self, node: str) -> str:
        """Return the same for people; empty where nobody said."""
        left_s = self.notice_s(node)
        return f", {left_s:.0f} s left" if left_s < math.inf else ""

    def should_leave(self, nodes: Collection[str], save_first: bool) -> bool:
        """Whether the ranks on these drained nodes (one entry per rank) should leave now.

        They train on while no other node has room for them and enough of the notice is left: a new
        node often comes only when the old one is gone.
        """
        ahead_s = SAVE_AHEAD_S if save_first else LEAVE_S
        return self._room >= len(nodes) or any(self.notice_s(node) < ahead_s for node in nodes)

    @property
    def vacated_in_s(self) -> float:
        """Seconds until the drained nodes with bundles of this run are gone; 0 if there are none or
        nobody said.
        """
        left = (self.notice_s(node) for node in self._lost_bundles.values())
        return max((left_s for left_s in left if left_s < math.inf), default=0.0)

    def avoided(self, bundle: int) -> set[str]:
        """Return the nodes that a new actor must avoid whose bundle is on a drained node: those, if
        others have room.

        Where none has, it waits in its bundle, which Ray moves to another node when the drained one
        is gone.
        """
        if bundle not in self._lost_bundles or self._room < 1:
            return set()
        self._room -= 1
        return set(self.draining)

    def check(self) -> None:
        """Ask the head which nodes are being drained, and if there are any, what that means for
        this run.

        Not a head that is another one: Ray would abort this process.
        """
        question, asked_at = self._asked, self._clock.monotonic()
        with suppress(Exception):  # any error means that the head did not answer
            dial(self._address)
            self.replaced = self.replaced or self._is_another_head()
            if self.replaced:
                return
            # Ray has no public call for this. A frozen head blocks it, and so this thread.
            draining = dict(self._api._private.state.state.get_draining_nodes())
            self._answered, self._answered_at = question, asked_at
            lost, room = self._consequences(draining) if draining else ({}, 0)
            self._lost_bundles, self._room, self.draining = lost, room, draining

    def _is_another_head(self) -> bool:
        """Whether the head that answers has another cluster id than the one that this process
        connected to.
        """
        try:
            kv = self._api._private.worker.global_worker.gcs_client
            kv.internal_kv_get(b"session_name", b"session", HEAD_ANSWER_S)
        except Exception as error:
            if "WrongClusterID" in str(error):
                return True
            raise
        return False

    def _consequences(self, draining: Collection[str]) -> tuple[dict[int, str], int]:
        """Return the bundles on drained nodes, with the nodes, and how many ranks the other nodes
        can still hold.
        """
        nodes = self._api.util.placement_group_table(self._place.group)["bundles_to_node_id"]
        others = [node for node in nodes_of(self._api) if node["id"] not in draining]
        lost = {bundle: node for bundle, node in nodes.items() if node in draining}
        return lost, room_on(others, self._place.bundle, "available")

    def _check_until_exit(self) -> None:
        while not self._over.is_set():
            self._ask.wait(1.0)
            self._ask.clear()
            self.check()

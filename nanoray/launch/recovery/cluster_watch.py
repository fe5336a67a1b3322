"""The watch over the cluster of a run: whether its head answers, and which nodes are drained.

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

from nanoray.launch.connection import dial
from nanoray.launch.placement import Placement, nodes_of, room_on
from nanoray.launch.ray_compat import draining_nodes, request_session_name

HEAD_ANSWER_S = 2.0  # a head answers in milliseconds
# After 60 s without a head Ray ends the driver, without an error; with GCS fault tolerance 600 s.
HEAD_TIMEOUT_S = 15.0
# Ranks that cannot be replaced elsewhere yet leave when a notice has this much left: enough for a
# step and a new group, or for a checkpoint of all ranks.
LEAVE_S = 10.0
SAVE_AHEAD_S = 90.0
ANOTHER_HEAD = "another head has taken the place of the cluster's head, and does not know this run"


class ClusterWatch:
    """Checks every second, in a thread, whether the head answers and which nodes are drained."""

    def __init__(
        self,
        place: Placement,
        api: Any = ray,
        clock: Any = time,
        head_timeout_s: float = HEAD_TIMEOUT_S,
    ) -> None:
        self._place = place
        self._api = api
        self._clock = clock
        self.head_timeout_s = head_timeout_s

        # The head. A request is numbered: the thread notes the newest one that it has answered.
        self._address = ""
        self._answered_at = clock.monotonic()
        self._requested = 0
        self._answered = 0
        self.replaced = False  # a head answers that was started anew, without the old one's memory

        # Drained nodes, each with the Unix ms at which it will be gone; 0 without such a time.
        self.draining: Mapping[str, int] = {}
        self._driver_node = ""
        self._lost_bundles: Mapping[int, str] = {}  # the bundles on those nodes, and the nodes
        self._room = 0  # how many more ranks the other nodes can hold

        self._over = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._check_until_exit, daemon=True)

    def __enter__(self) -> ClusterWatch:
        context = self._api.get_runtime_context()  # not earlier: the call starts Ray if need be
        self._address = context.gcs_address
        self._driver_node = context.get_node_id()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._wake.set()

    # The head.

    @property
    def head_lost(self) -> bool:
        """Return whether the head has not answered for `head_timeout_s`, or is another one."""
        silent_s = self._clock.monotonic() - self._answered_at
        return self.replaced or silent_s > self.head_timeout_s

    def head_answers(self, within_s: float = HEAD_ANSWER_S) -> bool:
        """Return whether the head answers a request that is sent now.

        Without a head, creating or ending an actor blocks for ever. A connection proves nothing:
        the kernel accepts it for a process that is frozen.
        """
        self._requested += 1
        request = self._requested
        deadline = time.monotonic() + within_s
        self._wake.set()
        while self._answered < request:
            try:
                dial(self._address)
            except OSError:
                return False
            if self.replaced or time.monotonic() > deadline:
                return False
            time.sleep(0.002)  # the thread answers within a millisecond or two
        return True

    def trouble(self) -> str | None:
        """Return why this run should stop now, with a checkpoint; None if it need not."""
        if self.replaced:
            return ANOTHER_HEAD
        if self.head_lost:
            return f"the cluster's head has not answered for {self.head_timeout_s:g} s"
        if self._driver_node in self.draining:
            notice = self.notice(self._driver_node)
            return f"the driver's node {self._driver_node[:8]} is being drained{notice}"
        return None

    # Drained nodes.

    def notice_s(self, node: str) -> float:
        """Return how many seconds a drained node has left; infinite if that was not announced."""
        gone_at_ms = self.draining.get(node, 0)
        if not gone_at_ms:
            return math.inf
        return max(0.0, gone_at_ms / 1e3 - time.time())

    def notice(self, node: str) -> str:
        """Return the seconds left as the end of a message; empty if its end was not announced."""
        left_s = self.notice_s(node)
        return f", {left_s:.0f} s left" if left_s < math.inf else ""

    def should_leave(self, nodes: Collection[str], save_first: bool) -> bool:
        """Return whether the ranks on these drained nodes (one entry per rank) should leave now.

        They train on while no other node has room for them and enough of the notice is left: a new
        node often comes only when the old one is gone.
        """
        if self._room >= len(nodes):
            return True
        ahead_s = SAVE_AHEAD_S if save_first else LEAVE_S
        return any(self.notice_s(node) < ahead_s for node in nodes)

    @property
    def vacated_in_s(self) -> float:
        """Return the seconds until the drained nodes with bundles of this run are gone.

        0 if there are none, or their end was not announced.
        """
        notices_s = [self.notice_s(node) for node in self._lost_bundles.values()]
        return max((notice_s for notice_s in notices_s if notice_s < math.inf), default=0.0)

    def avoided(self, bundle: int) -> set[str]:
        """Return the nodes that a new actor must avoid: drained ones, if it has room elsewhere.

        That concerns an actor whose bundle is on a drained node. Without room elsewhere it waits in
        its bundle, which Ray moves to another node when the drained one is gone.
        """
        if bundle not in self._lost_bundles or self._room < 1:
            return set()
        self._room -= 1
        return set(self.draining)

    def check(self) -> None:
        """Request the drained nodes from the head; if there are any, evaluate what is lost.

        Not from another head: Ray would abort this process.
        """
        request = self._requested
        requested_at = self._clock.monotonic()
        with suppress(Exception):  # any error means that the head did not answer
            dial(self._address)
            self.replaced = self.replaced or self._is_another_head()
            if self.replaced:
                return
            draining = draining_nodes(self._api)  # a frozen head blocks this thread
            self._answered = request
            self._answered_at = requested_at

            lost_bundles: dict[int, str] = {}
            room = 0
            if draining:
                lost_bundles, room = self._consequences(draining)
            # `draining` is set last: a thread that sees a drained node finds the rest.
            self._lost_bundles = lost_bundles
            self._room = room
            self.draining = draining

    def _is_another_head(self) -> bool:
        """Return whether the head has another cluster id than the one at the start."""
        try:
            request_session_name(self._api, HEAD_ANSWER_S)
        except Exception as error:
            if "WrongClusterID" in str(error):
                return True
            raise
        return False

    def _consequences(self, draining: Collection[str]) -> tuple[dict[int, str], int]:
        """Return the bundles on drained nodes, and how many ranks the other nodes can hold."""
        nodes = self._api.util.placement_group_table(self._place.group)["bundles_to_node_id"]
        others = [node for node in nodes_of(self._api) if node["id"] not in draining]
        lost = {bundle: node for bundle, node in nodes.items() if node in draining}
        return lost, room_on(others, self._place.bundle, "available")

    def _check_until_exit(self) -> None:
        while not self._over.is_set():
            self._wake.wait(1.0)
            self._wake.clear()
            self.check()

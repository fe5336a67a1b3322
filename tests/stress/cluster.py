"""A Ray cluster whose nodes are taken away, and come back: for `tests.stress soak`.

    head   the driver, and perhaps ranks
    nodes  1 CPU each, for one rank

A node ends as a cloud ends it: by SIGKILL of everything on it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from nanoray.bench.harness.processes import (
    CLUSTER_START_S,
    FEW_OBJECTS,
    Child,
    ChildFailed,
    is_up,
    python_in,
    ray_head,
)
from nanoray.machine.slots import Slots

MOST_FAILED_STARTS = 3  # of nodes, until a cluster is given up
POLL_S = 0.1


def node_command(folder: Path, address: str, gpus: int = 0) -> list[str]:
    """Return the command for a node of one CPU that joins the head at `address`.

    `folder` is the head's.
    """
    command = [python_in(folder), "-m", "ray.scripts.scripts", "start", f"--address={address}"]
    command += ["--block", "--num-cpus=1", f"--num-gpus={gpus}", FEW_OBJECTS]
    return [*command, "--min-worker-port=0", "--max-worker-port=0", "--disable-usage-stats"]


class NodeCluster:
    """A Ray head and nodes beside it; leaving the `with` block ends them."""

    def __init__(
        self, folder: Path, env: Mapping[str, str], slots: Slots, nodes: int, head_cpus: int
    ) -> None:
        """Prepare a cluster that keeps its files in `folder`, whose path must be short.

        Of the devices of `slots` a single node gets the last one, and the head has the others.
        """
        self.folder = folder
        self.env = dict(env)
        self.address = ""
        self.nodes: dict[str, Child] = {}  # by name
        self.head: Child | None = None
        self._size = nodes
        self._head_cpus = head_cpus
        self._head_slots = replace(slots, devices=slots.devices[: len(slots.devices) - nodes])
        self._devices = [device.uuid for device in slots.devices[len(slots.devices) - nodes :]]
        self._stack = ExitStack()
        self._up: set[str] = set()
        self._started = 0
        self._failed = 0
        self._back_at = 0.0

    def __enter__(self) -> NodeCluster:
        self.folder.mkdir(exist_ok=True)
        try:
            ray = self.folder / "ray"
            head = ray_head(ray, self.env, self._head_slots, cpus=self._head_cpus)
            self.address, self.head = self._stack.enter_context(head)
            self.env["RAY_ADDRESS"] = self.address
            self.fill()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes.values():
            node.end()
        self._stack.close()

    def fill(self) -> None:
        """Wait until all nodes are there. Raises ChildFailed."""
        deadline = time.monotonic() + CLUSTER_START_S * (MOST_FAILED_STARTS + 1)
        while not self.is_complete():
            if time.monotonic() > deadline:
                raise ChildFailed("the nodes did not come up")
            time.sleep(POLL_S)

    def is_complete(self) -> bool:
        """Whether all nodes are there; starts one that is missing when its time has come.

        Raises ChildFailed when the head or a node has ended by itself.
        """
        if self.head and self.head.process.poll() is not None:
            raise ChildFailed(f"`ray start --head` ended by itself\n{self.head.tail()}")
        for name, node in list(self.nodes.items()):
            if is_up(node):
                self._up.add(name)
            if node.process.poll() is None:
                continue
            self._failed += name not in self._up
            if name in self._up or self._failed > MOST_FAILED_STARTS:
                raise ChildFailed(f"`ray start` of a node ended by itself\n{node.tail()}")
            # Ray gives a node 30 s to start, and a busy machine may need longer.
            self.nodes.pop(name).end()
        # One after the other: several at once need longer.
        is_starting = bool(self.nodes.keys() - self._up)
        is_missing = len(self.nodes) < self._size
        if is_missing and not is_starting and time.monotonic() >= self._back_at:
            self._start_node()
        return len(self.nodes.keys() & self._up) == self._size

    def _start_node(self) -> None:
        self._started += 1
        name = f"node{self._started}"
        devices = self._devices[:1]
        command = node_command(self.folder / "ray", self.address, len(devices))
        env = self.env | ({"CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else {})
        log = self.folder / f"{name}.log"
        self.nodes[name] = Child([*command, f"--node-name={name}"], env, log)

    def take(self, name: str, back_s: float = 0.0) -> int:
        """Kill everything on a node, at once, and return how many processes that were.

        Another node takes its place in `back_s` seconds.
        """
        node = self.nodes.pop(name)
        killed = node.kill()
        node.end()
        self._back_at = time.monotonic() + back_s
        return killed

"""A Ray cluster whose nodes are taken away, and come back: for `bench recovery` and `soak`.

    head   the driver, or Ray Train's controller, and perhaps ranks
    nodes  1 CPU each, for one rank

A node ends as a cloud ends it: by SIGKILL of everything on it, at once or at the end of a notice.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from nanoray.base.proc import stat_of
from nanoray.bench.harness.processes import (
    CLUSTER_START_S,
    Child,
    ChildFailed,
    is_up,
    node_command,
    ray_head,
)
from nanoray.host.slots import Slots

MOST_FAILED_STARTS = 3  # of nodes, until a cluster is given up
COMMAND_S = 60.0  # for one command of Ray's
POLL_S = 0.1
# The id of each living node of one name, as a line of JSON
ASK_NODES = (
    "import json, ray; ray.init(address='auto', log_to_driver=False); "
    "print(json.dumps({n['NodeName']: n['NodeID'] for n in ray.nodes() if n['Alive']}))"
)


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

    def node_of(self, pid: int) -> str | None:
        """Return the name of the node that a process is on; None for the head."""
        stat = stat_of(pid)
        for name, node in self.nodes.items():
            if stat and int(stat[3]) == node.process.pid:
                return name
        return None

    def drain(self, name: str, notice_s: float) -> float:
        """Announce the end of a node; return the moment of the notice. Raises ChildFailed."""
        ids = json.loads(self._ask([sys.executable, "-c", ASK_NODES]))
        command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node"]
        command += [f"--address={self.address}", f"--node-id={ids[name]}"]
        command += ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=bench recovery"]
        command += [f"--deadline-remaining-seconds={round(notice_s)}"]
        self._ask(command)
        # The command takes seconds to start, and sends its request at its end.
        return time.time()

    def _ask(self, command: list[str]) -> str:
        try:
            done = subprocess.run(
                command, env=self.env, capture_output=True, text=True, timeout=COMMAND_S
            )
        except subprocess.TimeoutExpired:
            raise ChildFailed(f"{' '.join(command[:4])} took over {COMMAND_S:g} s") from None
        if done.returncode:
            raise ChildFailed(f"{' '.join(command[:4])} failed\n{done.stdout}{done.stderr}")
        return done.stdout.splitlines()[-1] if done.stdout else ""

    def take(self, name: str, back_s: float = 0.0) -> int:
        """Kill everything on a node, at once, and return how many processes that were.

        Another node takes its place in `back_s` seconds.
        """
        node = self.nodes.pop(name)
        killed = node.kill()
        node.end()
        self._back_at = time.monotonic() + back_s
        return killed

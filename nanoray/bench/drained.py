"""A node that is announced to go, and goes: one run of an arm of `bench recovery`.

    head   1 CPU: the driver, or Ray Train's controller, and perhaps a rank
    nodes  1 CPU each; of all three, two have a rank, and one is free

`ray drain-node` announces the end of the node of one rank, with a deadline; the head's is never
taken. At the deadline all processes of the node are killed, as a cloud does it. Then a new node
takes its place for the next run. What an arm does with the notice is its own affair. The head has a
CPU because Ray's TorchftConfig needs one there: its lighthouse is an actor that is bound to the
controller's node, and on a head without CPUs, which KubeRay recommends, it is never scheduled.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from nanoray.base.proc import stat_of
from nanoray.bench.harness.processes import (
    Child,
    ChildFailed,
    node_command,
    ray_head,
    wait_until_up,
)
from nanoray.bench.killed import TrainingProcess, first_times, wrong_losses
from nanoray.host.slots import Slots

NODES = 2  # beside the head
WORLD = 2  # ranks
NO_DEVICES = Slots("cpu", (), WORLD, "ranks on CPUs")
# Set for the peer on Ray Train, it asks for notices and saves when there is one
PEER_DRAINS = "NANORAY_PEER_DRAINS"
LEAST_STEPS = 100  # new ones after the end of a node, until a run counts as recovered
MOST_FAILED_STARTS = 3  # of nodes, until a cluster is given up
COMMAND_S = 60.0  # for one command of Ray's
# The id of each living node of one name, as a line of JSON
ASK_NODES = (
    "import json, ray; ray.init(address='auto', log_to_driver=False); "
    "print(json.dumps({n['NodeName']: n['NodeID'] for n in ray.nodes() if n['Alive']}))"
)


class Drain(NamedTuple):
    """One announced end of a node, and its consequences."""

    round: int
    rank: int
    step: int  # the last one before the longest time without a new step
    standstill_s: float  # that time, from the notice on
    repeated: int  # steps done again after the notice
    after_s: float  # from the notice to the end of that time
    wrong: int  # steps whose loss is not that of a run without a notice


class Pause(NamedTuple):
    """The longest time without a new step."""

    seconds: float
    step: int  # the last one before
    end: float  # the moment of the next one
    repeated: int  # steps of the whole time that were done before


def longest_pause(done: Mapping[tuple[int, int], float], since: float) -> Pause | None:
    """Return the longest time without a step that was new, from a moment on; None without steps.

    A step that is done a second time is none, and counts as repeated.
    """
    first = first_times(done)
    repeated = sum(at > first[step] and at >= since for (_, step), at in done.items())

    # The last step before the moment begins the first pause.
    moments = sorted((at, step) for step, at in first.items())
    before = [pair for pair in moments if pair[0] < since][-1:]
    later = [*before, *(pair for pair in moments if pair[0] >= since)]
    pauses = []
    for (start, step), (end, _) in itertools.pairwise(later):
        pauses.append(Pause(end - max(start, since), step, end, repeated))
    return max(pauses, default=None)


class DrainedCluster:
    """A Ray head and NODES nodes; leaving the `with` block ends them."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        """Prepare a cluster that keeps its files in `folder`, whose path must be short."""
        self.folder = folder
        self.env = dict(env)
        self.address = ""
        self.nodes: dict[str, Child] = {}  # by name
        self.head: Child | None = None
        self._stack = ExitStack()
        self._started = 0
        self._ids: dict[str, str] = {}  # of Ray, by name

    def __enter__(self) -> DrainedCluster:
        self.folder.mkdir(exist_ok=True)
        try:
            head = ray_head(self.folder / "ray", self.env, NO_DEVICES, cpus=1)
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
        """Start nodes until there are NODES. Raises ChildFailed."""
        # One after the other: Ray gives a node 30 s to start, and three at once need longer on a
        # busy machine.
        failed = 0
        while len(self.nodes) < NODES:
            self._started += 1
            name = f"node{self._started}"
            command = [*node_command(self.folder / "ray", self.address), f"--node-name={name}"]
            node = Child(command, self.env, self.folder / f"{name}.log")
            try:
                wait_until_up(node, "a node")
            except ChildFailed:
                node.end()
                failed += 1
                if failed > MOST_FAILED_STARTS:
                    raise
                continue
            self.nodes[name] = node
        if not self.nodes.keys() <= self._ids.keys():
            self._ids = json.loads(self._ask([sys.executable, "-c", ASK_NODES]))

    def node_of(self, pid: int) -> str:
        """Return the name of the node that a process is on; "" for the head."""
        stat = stat_of(pid)
        for name, node in self.nodes.items():
            if stat and int(stat[3]) == node.process.pid:
                return name
        return ""

    def drain(self, name: str, notice_s: float) -> float:
        """Announce the end of a node; return the moment of the notice. Raises ChildFailed."""
        command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node"]
        command += [f"--address={self.address}", f"--node-id={self._ids[name]}"]
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

    def take(self, name: str) -> None:
        """End a node and everything on it, at once."""
        node = self.nodes.pop(name)
        node.kill()
        node.end()


def run_drained(
    run: TrainingProcess,
    cluster: DrainedCluster,
    rank: int,
    at_step: int,
    notice_s: float,
    watch_s: float,
    timeout_s: float,
) -> Pause:
    """Announce the end of a rank's node at a step, take the node away, and watch what follows.

    It ends `watch_s` seconds after the node, or later, with LEAST_STEPS new steps. Raises
    ChildFailed.
    """
    run.wait_until(lambda: run.step >= at_step, timeout_s, f"step {at_step}")
    # torchft begins with the ranks that are there: the other one may come later.
    ranks = range(WORLD)
    run.wait_until(lambda: all(map(run.process_of, ranks)), timeout_s, "all ranks")
    # This rank, or the next one if this one is on the head
    pids = [run.process_of((rank + turn) % WORLD) for turn in ranks]
    names = [cluster.node_of(pid) for pid in pids if pid]
    name = next(filter(None, names), "")
    if not name:
        raise ChildFailed(f"no rank is on a node beside the head\n{run.child.tail()}")
    announced = cluster.drain(name, notice_s)
    run.follow(announced + notice_s)
    cluster.take(name)
    reached = run.step + LEAST_STEPS
    run.follow(announced + notice_s + watch_s)
    what = f"{LEAST_STEPS} new steps after the end of the node"
    run.wait_until(lambda: run.step >= reached, timeout_s, what)
    pause = longest_pause(run.done, announced)
    assert pause is not None, "there were new steps"
    return pause._replace(end=pause.end - announced)


def run_undrained(
    run: TrainingProcess, at_step: int, seconds: float, timeout_s: float
) -> dict[int, float]:
    """Return step -> loss of a run for as long as one with a drained node. Raises ChildFailed."""
    run.wait_until(lambda: run.step >= at_step, timeout_s, f"step {at_step}")
    run.follow(time.time() + seconds)
    return run.losses()


def wrong_among(losses: Mapping[int, float], reference: Mapping[int, float], most: float) -> int:
    """Return how many steps are missing or have another loss, up to the last one of both.

    most: the relative difference that is no other loss; 0 requires the same bits.
    """
    last = min(max(losses, default=0), max(reference, default=0))
    common = {step: loss for step, loss in reference.items() if step <= last}
    return wrong_losses({step: losses[step] for step in losses if step <= last}, common, most)

"""Ranks on several nodes of this machine: a function runs on all of them, and links are counted.

A node is a process, `python -m nanoray.bench.harness.node ORDER`, that starts its ranks and ends
with them. On thin links (thin_links.py) it lives at the end of a link: its ranks reach each other
through its loopback, and other nodes by the link.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass

from nanoray.bench.harness.processes import (
    Child,
    answers_only,
    arm_environment,
    free_port,
    scratch_folder,
)
from nanoray.bench.harness.report import Record
from nanoray.bench.harness.thin_links import DEVICE, LinkSpeed, ThinLinks, address_of
from nanoray.host.host import available_cpus


def run_on_nodes(
    nodes: int,
    ranks: int,
    speed: LinkSpeed | None,
    function: str,
    order: Record,
    timeout_s: float,
) -> Record:
    """Run "module:function" on `ranks` ranks of each of `nodes` nodes; return rank 0's answer.

    It has facts, backend and events. An event with `began` and `ended` also gets `crossed`: the
    bytes that all links carried in between. speed: of each node's link; None: all ranks are on one
    node. Raises ChildFailed.
    """
    with scratch_folder() as folder, ExitStack() as stack:
        links = None
        address = "127.0.0.1"
        interface = "lo"
        if speed:
            links = stack.enter_context(ThinLinks(nodes, speed, folder))
            address = address_of(0)
            interface = DEVICE
        else:
            ranks *= nodes
            nodes = 1

        port = free_port()
        children = []
        for node in range(nodes):
            task = NodeOrder(
                node, nodes, ranks, address, port, interface, timeout_s, function, order
            )
            command = task.command()
            if links:
                command = links.command(node, command)
            child = Child(command, arm_environment(), folder / f"node{node}.log", pipes=True)
            children.append(stack.enter_context(child))

        answer: Record = children[0].answer(timeout_s)
        for event in answer["events"]:
            if links and "began" in event:
                event["crossed"] = links.sent_between(event["began"], event["ended"])
        return answer


@dataclass(frozen=True)
class NodeOrder:
    """What the ranks of a node run, and how they find the others."""

    node: int
    nodes: int
    ranks: int  # of each node
    address: str  # of rank 0
    port: int
    interface: str  # that gloo uses
    timeout_s: float
    function: str  # "module:function", see RankPool
    order: Record

    def command(self) -> list[str]:
        """Return the command line of the node."""
        return [sys.executable, "-m", "nanoray.bench.harness.node", json.dumps(asdict(self))]

    def environment(self, local_rank: int) -> dict[str, str]:
        """Return the variables of a rank: those that torchrun sets, and the interface."""
        values = {
            "RANK": self.node * self.ranks + local_rank,
            "WORLD_SIZE": self.nodes * self.ranks,
            "LOCAL_RANK": local_rank,
            "LOCAL_WORLD_SIZE": self.ranks,
            "MASTER_ADDR": self.address,
            "MASTER_PORT": self.port,
            "GLOO_SOCKET_IFNAME": self.interface,
        }
        return {name: str(value) for name, value in values.items()}


def start_ranks(order: NodeOrder) -> int:
    """Start the ranks of a node; return 0, or the exit code of one that failed."""
    ranks = []
    for local_rank in range(order.ranks):
        env = arm_environment() | order.environment(local_rank)
        ranks.append(subprocess.Popen([*order.command(), "rank"], env=env))
    for rank in ranks:
        code = rank.wait()
        if code:
            # The others wait for it; they end with the session of this process.
            return code
    return 0


def run_rank(order: NodeOrder) -> None:
    """Join the ranks of all nodes and run the function; rank 0 prints its events as a JSON line."""
    import torch

    from nanoray.bench.harness.rank_pool import RankPool
    from nanoray.bench.harness.ranks import Where

    say = answers_only()
    ranks = order.nodes * order.ranks
    where = Where(ranks, launcher="torchrun", device="cpu", timeout_s=order.timeout_s)
    with RankPool(where) as pool:
        # All nodes are on this machine, so their ranks share its cores.
        torch.set_num_threads(max(1, int(available_cpus()) // ranks))
        # A pool of torchrun's kind has all events at the end.
        events = list(pool.run(order.function, order.order))
        if os.environ["RANK"] == "0":
            say({"facts": pool.facts, "backend": pool.backend, "events": events})


def main() -> int:
    """Be a node, or with `rank` as a second argument one of its ranks."""
    order = NodeOrder(**json.loads(sys.argv[1]))
    if len(sys.argv) == 2:
        return start_ranks(order)
    run_rank(order)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""End a rank's process for certain, by SIGKILL from a Ray task on its node.

`ray.kill` lets the node's raylet ask the process to end, and kill it after 5 s without an answer.
But if the raylet has tried for 20 s to connect to the process and failed, as with one that is
frozen, the question fails at once, and Ray 2.60 takes that for an answer: the process, and with it
the slot's share of the node, stays until the driver has ended.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nanoray.faults.proc import start_time


def end_for_certain(facts: dict[str, Any], api: Any = ray) -> None:
    """End the process that an actor has described: its node, pid and start. Returns at once."""
    on_its_node = NodeAffinitySchedulingStrategy(facts["node"], soft=False)
    task = api.remote(num_cpus=0, max_retries=0, scheduling_strategy=on_its_node)(end_process)
    task.remote(facts["pid"], facts["start"])


def end_process(pid: int, start: str) -> None:
    """End a process of this host, unless it is another one by now, which started later under the
    same pid.
    """
    if start and start_time(pid) == start:
        os.kill(pid, signal.SIGKILL)

"""An event-driven simulation of one rank's step: compute, and collectives that run beside it.

    simulate()     compute, buckets, lanes    -> the schedule of a step: busy, exposed, hidden

Pure arithmetic: a step of 16,384 ranks takes a millisecond.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from nanoray.cli.forecast.links import Cost

NOTHING = Cost(0.0, 0.0)


class SimulatedBucket(NamedTuple):
    """Gradients that are sent together."""

    ready_s: float  # seconds of backward's own work, after which they are complete
    nbytes: int


@dataclass(frozen=True)
class Step:
    """The compute of a DDP step on one rank, in seconds of work when nothing disturbs it."""

    forward_s: float
    backward_s: float
    optimizer_s: float
    buckets: tuple[SimulatedBucket, ...]  # in the order in which they get ready
    # Of forward and of backward: sums in the midst of the layers, for which compute waits
    waits: tuple[Cost, Cost] = (NOTHING, NOTHING)
    one_link: bool = True  # whether buckets share the link of those sums

    @property
    def compute_s(self) -> float:
        return self.forward_s + self.backward_s + self.optimizer_s


class Event(NamedTuple):
    """A stretch of a schedule: a phase of compute, or a collective on its lane."""

    track: str
    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class SimulatedStep:
    """The events of a simulated step, and their sums."""

    events: tuple[Event, ...]
    step_s: float
    busy_s: float  # some collective was running
    exposed_s: float  # of it: backward was over, and the optimizer waited


@dataclass(eq=False)
class _Task:
    """Work in progress: seconds left of its latency (or of compute), then of its transfer."""

    track: str
    name: str
    left: list[float]
    cpu: float
    start_s: float = 0.0
    closes: bool = False  # a stretch of backward, after which a bucket is ready

    @property
    def in_latency(self) -> bool:
        return self.left[0] > 0

    @property
    def work_s(self) -> float:
        """Seconds left of the latency, or of the transfer that follows it."""
        return self.left[0] if self.in_latency else self.left[1]

    def advance(self, seconds: float, is_over: bool) -> None:
        """Work off `seconds` of latency or transfer. `is_over`: all of it, without a rounding error."""
        part = 0 if self.in_latency else 1
        self.left[part] = 0.0 if is_over else self.left[part] - seconds


def simulate(
    step: Step,
    collective: Callable[[int], Cost],
    lanes: int = 1,
    cores: float = math.inf,
    threads: float = 1.0,
) -> SimulatedStep:
    """Simulate one step of a rank; all ranks are equal.

    Compute and the sums that it waits for (step.waits) alternate. Buckets become ready in backward;
    their collectives start in that order, each on the first free one of `lanes`; the optimizer waits
    for the last. Transfers in flight at the same time share the link equally. Compute keeps
    `threads` cores busy and a collective `Cost.cpu` of them. When together they need more than
    `cores`, this rank's share of the machine, all slow down equally (processor sharing), so no step
    is shorter than its CPU work over its cores.
    """
    compute = _chain(step, threads)
    stretches_left = sum(task.closes for task in compute)
    queue = deque(enumerate(step.buckets))
    running: list[_Task] = []  # collectives
    events: list[Event] = []
    now_s = 0.0
    busy_s = 0.0
    backward_end_s = 0.0

    while compute or running:
        # Only the first task of the chain runs; the others wait for it.
        tasks = [*running, compute[0]] if compute else running

        # Go to the moment at which the first task ends its latency, transfer or compute.
        rates = _rates(tasks, running, step.one_link, cores)
        needs = [task.work_s / rate for task, rate in zip(tasks, rates, strict=True)]
        wait_s = min(needs)
        now_s += wait_s
        if running:
            busy_s += wait_s
        for task, rate, need in zip(tasks, rates, needs, strict=True):
            # Tasks that end together differ by a rounding error, which must not become an event.
            task.advance(wait_s * rate, is_over=need <= wait_s * (1 + 1e-12))

        # Take away what is done. The next task of the chain begins at once.
        done = [task for task in tasks if not any(task.left)]
        events += [Event(task.track, task.name, task.start_s, now_s) for task in done]
        running = [task for task in running if task not in done]
        if compute and compute[0] in done:
            stretches_left -= compute.popleft().closes
            if compute:
                compute[0].start_s = now_s
            else:
                backward_end_s = now_s

        # Start collectives of ready buckets on free lanes.
        ready = len(step.buckets) + 1 - stretches_left
        taken = {task.track for task in running}
        free = [f"lane {lane}" for lane in range(lanes) if f"lane {lane}" not in taken]
        for lane in free:
            if queue and queue[0][0] < ready:
                index, bucket = queue.popleft()
                price = collective(bucket.nbytes)
                left = [price.latency_s, price.transfer_s]
                running.append(_Task(lane, f"bucket {index}", left, price.cpu, now_s))

    # The optimizer runs alone, so only its own threads can need too many cores.
    end_s = now_s + step.optimizer_s * max(1.0, threads / cores)
    events.append(Event("compute", "optimizer", now_s, end_s))
    return SimulatedStep(tuple(events), end_s, busy_s, exposed_s=now_s - backward_end_s)


def _rates(tasks: list[_Task], running: list[_Task], one_link: bool, cores: float) -> list[float]:
    """Return the speed of each task: 1 where neither cores nor the link are short."""
    # All tasks slow down equally when together they need more cores than there are.
    wanted_cores = sum(task.cpu for task in tasks)
    pace = min(1.0, cores / max(wanted_cores, 1e-12))

    def is_on_link(task: _Task) -> bool:
        shares_link = task in running or (task.track == "waits" and one_link)
        return shares_link and not task.in_latency

    # A latency does not use the bandwidth, so only transfers share it.
    transfers = sum(is_on_link(task) for task in tasks)
    return [pace / transfers if is_on_link(task) else pace for task in tasks]


def _chain(step: Step, threads: float) -> deque[_Task]:
    """Return the tasks of the rank's own order: forward, a stretch of backward per bucket, the rest.

    The waits of backward are spread over its stretches in proportion.
    """
    stretches = [("forward", step.forward_s, step.waits[0], 1.0)]
    marks = [0.0, *(bucket.ready_s for bucket in step.buckets), step.backward_s]
    for start_s, end_s in pairwise(marks):
        # A step without backward has stretches of length 0; dividing by 1 avoids 0 / 0.
        share = (end_s - start_s) / (step.backward_s or 1.0)
        stretches.append(("backward", end_s - start_s, step.waits[1], share))

    chain = deque[_Task]()
    for name, seconds, wait, share in stretches:
        chain.append(_Task("compute", name, [seconds, 0.0], threads))
        if wait.seconds * share:
            left = [wait.latency_s * share, wait.transfer_s * share]
            chain.append(_Task("waits", name, left, wait.cpu))
        # The last task of a stretch closes it, because the wait belongs to the stretch.
        chain[-1].closes = name == "backward"
    return chain

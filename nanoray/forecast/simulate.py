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

from nanoray.forecast.links import Cost

NOTHING = Cost(0.0, 0.0)


class Bucket(NamedTuple):
    """Gradients that travel together: ready after that much of backward's own work."""

    ready_s: float
    nbytes: int


@dataclass(frozen=True)
class Step:
    """The compute of a DDP step on one rank, in seconds of work when nothing disturbs it."""

    forward_s: float
    backward_s: float
    optimizer_s: float
    buckets: tuple[Bucket, ...]  # in the order in which they get ready
    # In forward, in backward: for sums in the midst of the layers
    waits: tuple[Cost, Cost] = (NOTHING, NOTHING)
    one_link: bool = True  # buckets travel on the link of those sums, too

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
class Schedule:
    """What happened when in a simulated step."""

    events: tuple[Event, ...]
    step_s: float
    busy_s: float  # some collective was running
    exposed_s: float  # of it: backward was over, and the optimizer waited

    @property
    def hidden_s(self) -> float:
        return self.busy_s - self.exposed_s


@dataclass(eq=False)
class _Task:
    """Work in progress: seconds left of its latency (or of compute), then of its transfer."""

    track: str
    name: str
    left: list[float]
    cpu: float
    start_s: float = 0.0
    closes: bool = False  # a stretch of backward, after which a bucket is ready


def simulate(
    step: Step,
    collective: Callable[[int], Cost],
    lanes: int = 1,
    cores: float = math.inf,
    threads: float = 1.0,
) -> Schedule:
    """Simulate one step of a rank; all ranks are equal.

    What the rank waits for in the midst of its layers (step.waits) comes in turn with its own
    compute. Backward hands over buckets; collectives start in that order, each on the first free
    one of `lanes`; the optimizer waits for the last. Transfers in flight at the same time share the
    link equally. Compute keeps `threads` cores busy and a collective `Cost.cpu` of them; when
    together they want more than `cores`, this rank's share of the machine, all slow down equally
    (processor sharing): so no step is shorter than its CPU work over its cores.
    """
    compute = _chain(step, threads)
    queue, running, events = deque(enumerate(step.buckets)), list[_Task](), list[Event]()
    now = busy_s = backward_end = 0.0
    while compute or running:
        tasks = [*running, compute[0]] if compute else running
        pace = min(1.0, cores / max(sum(t.cpu for t in tasks), 1e-12))
        moving = [
            t
            for t in tasks
            if not t.left[0] and (t in running or (t.track == "waits" and step.one_link))
        ]
        rates = [pace / len(moving) if t in moving else pace for t in tasks]
        needs = [(t.left[0] or t.left[1]) / rate for t, rate in zip(tasks, rates, strict=True)]
        wait = min(needs)
        now, busy_s = now + wait, busy_s + (wait if running else 0.0)
        for task, rate, need in zip(tasks, rates, needs, strict=True):
            part = 0 if task.left[0] else 1
            task.left[part] = 0.0 if need <= wait * (1 + 1e-12) else task.left[part] - wait * rate
        done = [t for t in tasks if not any(t.left)]
        events += [Event(t.track, t.name, t.start_s, now) for t in done]
        running = [t for t in running if t not in done]
        if compute and compute[0] in done:
            compute.popleft()
            if compute:
                compute[0].start_s = now
            else:
                backward_end = now
        ready = len(step.buckets) + 1 - sum(t.closes for t in compute)
        taken = {t.track for t in running}
        for lane in (f"lane {i}" for i in range(lanes) if f"lane {i}" not in taken):
            if queue and queue[0][0] < ready:
                index, bucket = queue.popleft()
                price = collective(bucket.nbytes)
                running.append(
                    _Task(
                        lane, f"bucket {index}", [price.latency_s, price.transfer_s], price.cpu, now
                    )
                )
    end = now + step.optimizer_s * max(1.0, threads / cores)
    return Schedule(
        (*events, Event("compute", "optimizer", now, end)), end, busy_s, now - backward_end
    )


def _chain(step: Step, threads: float) -> deque[_Task]:
    """Return what the rank does one after the other: forward, then a stretch of backward per
    bucket, and the rest.

    What it waits for is spread over backward in proportion.
    """
    marks = [0.0, *(bucket.ready_s for bucket in step.buckets), step.backward_s]
    parts = [("forward", step.forward_s, step.waits[0], 1.0)]
    parts += [
        ("backward", b - a, step.waits[1], (b - a) / (step.backward_s or 1.0))
        for a, b in pairwise(marks)
    ]
    chain = deque[_Task]()
    for name, seconds, wait, share in parts:
        chain.append(_Task("compute", name, [seconds, 0.0], threads))
        if wait.seconds * share:
            chain.append(
                _Task("waits", name, [wait.latency_s * share, wait.transfer_s * share], wait.cpu)
            )
        chain[-1].closes = name == "backward"
    return chain

"""What a collective is, and what those of a step cost: bytes, latency, and what is not hidden.

    backward      ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒
    bucket 0            ├──────┤               hidden: compute runs meanwhile
    bucket 1                   ├─────────┤
    bucket 2 (last)                  ·   ├──────┤
                                     └─exposed──┘ after the last bucket is ready, the step only waits

Plain functions of noted moments: nothing here imports torch, because the driver of `nanoray run`
computes these figures, too. recorder.py notes the moments. The definitions of algbw and busbw are
those of NVIDIA's nccl-tests (PERFORMANCE.md), so the results can be compared.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

GLOO_LANES = 2  # threads of a gloo process group; each runs one collective at a time

Moment = Any  # float: time.perf_counter seconds; or a torch.cuda.Event that marks such a moment


@dataclass(frozen=True)
class Collective:
    """One collective as one rank saw it. Moments become seconds when the notes are read."""

    op: str
    what: str  # gradients | loss | eval | vote | ...
    # default | control | patient | gradients (hand-written algorithms) | an axis: dp, tp, ...
    group: str
    phase: str
    dtype: str
    size_bytes: int
    enqueue: Moment  # the data were ready on this rank
    start: Moment  # it began to run, after earlier ones of its queue
    end: Moment
    # How `start` and `end` were obtained: events | queue (start follows from the order of the queue)
    # | host (without the copy) | call
    timing: str
    bucket: int | None = None
    last: bool = False  # the last bucket of a backward pass
    # From when on this rank waited for a message that travels beside compute; None: a bucket, or a
    # call, in which it waits from the start
    wait: Moment | None = None

    @property
    def waits_from(self) -> Moment:
        """The moment at which this rank begins to wait for a collective that is no bucket."""
        return self.start if self.wait is None else self.wait


@dataclass(frozen=True)
class StepCost:
    """How long one step communicated, in seconds; busy = exposed + hidden."""

    busy: float
    exposed: float
    hidden: float


def account(collectives: Sequence[Collective]) -> StepCost:
    """Return what communication cost one rank in one step.

    Exposed is communication without compute beside it: from when the last bucket is ready to the
    end of the last all-reduce, and calls that the rank waits in. Busy adds the time of buckets in
    flight during backward, and of messages that travel before the rank waits for them.
    """
    buckets = [c for c in collectives if c.bucket is not None]
    calls = [c for c in collectives if c.bucket is None]

    # The rank waits in every call, so a call is exposed from its start to its end.
    exposed = [(call.waits_from, call.end) for call in calls]
    in_flight = [(call.start, call.end) for call in calls]

    # Backward computes until its last bucket is ready. What follows only waits.
    ready = max((c.enqueue for c in buckets if c.last), default=None)
    if ready is not None:
        exposed.append((ready, max(c.end for c in buckets)))
        in_flight += [(c.start, c.end) for c in buckets]

    # Unions, because several collectives may be in flight at once and time counts once.
    exposed_s = union_length(exposed)
    busy_s = union_length([*exposed, *in_flight])
    return StepCost(busy_s, exposed_s, busy_s - exposed_s)


def union_length(intervals: Sequence[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total = 0.0
    reached = float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def queue_starts(arrivals: Sequence[float], ends: Sequence[float], lanes: int) -> list[float]:
    """Return when each job of a queue began, from arrivals and ends; `lanes` serve them in order.

    NCCL runs the collectives of a communicator one after the other (1 lane): start = max(own
    arrival, end of the one before).
    """
    free: list[float] = [float("-inf")] * lanes  # a heap: when each lane becomes free
    starts = []
    for arrival, end in zip(arrivals, ends, strict=True):
        lane_free = heapq.heappop(free)
        starts.append(min(end, max(arrival, lane_free)))
        heapq.heappush(free, end)
    return starts


@dataclass(frozen=True)
class ClockOffset:
    """How far a rank's clock is ahead of rank 0's, and the largest error of that. Seconds."""

    offset: float
    uncertainty: float

    @classmethod
    def of(cls, sent: float, reading: float, received: float) -> ClockOffset:
        """Assume that the reading was taken in the middle of the round trip.

        The error is at most half of the round trip.
        """
        half = (received - sent) / 2
        return cls(reading - sent - half, half)

"""What every collective of a step cost: its bytes, latency and bandwidth, and how much of it
compute did not hide.

    backward      ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒
    bucket 0            ├──────┤               hidden: compute runs meanwhile
    bucket 1                   ├─────────┤
    bucket 2 (last)                  ·   ├──────┤
                                     └─exposed──┘ after the last bucket is ready, the step only waits

`CommRecorder` notes moments on one rank in traced steps. It computes nothing until a logged step,
where the loop waits for the device anyway. On CUDA a moment is an event in the stream that is read
later; the recorder never synchronises. The definitions of algbw and busbw are those of NVIDIA's
nccl-tests (PERFORMANCE.md), so the results can be compared.
"""

from __future__ import annotations

import heapq
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nanoray.mesh.axis import Axis, data_axis
from nanoray.mesh.mesh import Mesh
from nanoray.metrics import algbw_gbps
from nanoray.parallel.ddp import first_of

# Of one window of `every=K`, in the middle of K, where steps are seldom logged, evaluated or saved
WINDOW_STEPS = 2
PROFILE_EVERY = 500  # steps at least between two profiled windows: reading one takes 20 ms
NO_SYNC_EVERY = 100  # steps at least between two extra backward passes: under 1 % of the steps
GLOO_LANES = 2  # threads of a gloo process group; each runs one collective at a time
CLOCK_ROUNDS = 12

Moment = Any  # float: time.perf_counter seconds; or a torch.cuda.Event that marks such a moment


@dataclass(frozen=True)
class Collective:
    """One collective as one rank saw it. Moments become seconds when the notes are read."""

    op: str
    what: str  # gradients | loss | eval | vote | ...
    # Default | control | patient | gradients (of its own, for hand-written algorithms) | an axis:
    # dp, tp
    group: str
    phase: str
    dtype: str
    size_bytes: int
    enqueue: Moment  # the data were ready on this rank
    start: Moment  # it began to run, after earlier ones of its queue
    end: Moment
    # Events | profiler | queue (start follows from the queue's order) | host (without the copy) |
    # call
    timing: str
    bucket: int | None = None
    last: bool = False  # the last bucket of a backward pass


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
    flight during backward.
    """
    exposed, hidden = [], []
    buckets = [c for c in collectives if c.bucket is not None]
    for call in (c for c in collectives if c.bucket is None):
        exposed.append((call.start, call.end))
    ready = max((c.enqueue for c in buckets if c.last), default=None)
    if ready is not None:
        exposed.append((ready, max(c.end for c in buckets)))
        hidden = [(c.start, c.end) for c in buckets]
    bare = union_length(exposed)
    busy = union_length([*exposed, *hidden])
    return StepCost(busy, bare, busy - bare)


def union_length(intervals: Sequence[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def queue_starts(arrivals: Sequence[float], ends: Sequence[float], lanes: int) -> list[float]:
    """Return when each of a queue's jobs began, from their arrivals and ends; `lanes` serve them in
    order.

    NCCL runs the collectives of a communicator one after the other (1 lane): start = max(own
    arrival, end before).
    """
    free: list[float] = [float("-inf")] * lanes
    starts = []
    for arrival, end in zip(arrivals, ends, strict=True):
        starts.append(min(end, max(arrival, heapq.heappop(free))))
        heapq.heappush(free, end)
    return starts


class Clock:
    """This rank's moments, in seconds of time.perf_counter. On CUDA: when the device reaches them."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._device = device
        self._anchor: Any = None
        self._anchor_s = 0.0

    def now(self) -> Moment:
        """Mark this moment; about a microsecond, and no wait."""
        return self._event() if self._cuda else time.perf_counter()

    def anchor(self) -> None:
        """Tie the device's clock to the host's. Call it while the device is idle, such as after
        fetching a value.
        """
        if self._cuda:
            self._anchor = self._event()
            # Microseconds on an idle device; an unfinished event has no time
            self._anchor.synchronize()
            self._anchor_s = time.perf_counter()

    def seconds(self, moment: Moment) -> float:
        """Return a moment in seconds; on CUDA it must lie before the last anchor."""
        if isinstance(moment, float):
            return moment
        return self._anchor_s - moment.elapsed_time(self._anchor) / 1e3

    def _event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


@dataclass
class _Step:
    """The notes of one traced step."""

    step: int
    phases: list[tuple[str, Moment]] = field(default_factory=list)  # each lasts until the next
    collectives: list[Collective] = field(default_factory=list)
    no_sync: tuple[Moment, Moment] | None = None  # a forward and backward without all-reduce
    profiled: bool = False  # profiled steps are slower and stay out of the means


class CommRecorder:
    """Notes one rank's collectives. Between traced steps every method returns at once."""

    def __init__(
        self,
        mesh: Mesh,
        every: int,
        reduce: Callable[[Tensor], Any] | None = None,
        profile: bool = True,
        axis: Axis | None = None,
    ) -> None:
        """Trace windows of steps, `every` apart. `reduce` starts the all-reduce of a gradient
        bucket; None: torch's.

        torch's DDP sums over `axis`; None: over all ranks. With `profile`, torch's profiler
        sometimes measures when gloo's threads begin; else it follows from the queue.
        """
        self.mesh, self.every = mesh, every
        self.clock = Clock(mesh.device)
        self._bucket_params: dict[int, list[Any]] = {}
        self._data = axis or data_axis(mesh)
        group, part = self._data.group, self._data.size < mesh.world_size
        self._reduce = reduce or (
            lambda buffer: dist.all_reduce(buffer, group=group, async_op=True).get_future()
        )
        self._group = "gradients" if reduce else self._data.name if part else "default"
        self._lanes = GLOO_LANES if mesh.backend == "gloo" and not reduce else 1
        # Gloo completes on the host, also for CUDA tensors
        self._host_ends = mesh.backend == "gloo"
        self._now: _Step | None = None
        self._done: list[_Step] = []
        self._profiler: Any = None  # from the start of a profiled window until its notes are read
        self._profiling = False
        profile = profile and not reduce and mesh.backend == "gloo" and mesh.device.type == "cpu"
        self._next_profile = 0 if profile else None
        self._next_no_sync = 0

    @property
    def sampling(self) -> bool:
        """Whether this step is being traced."""
        return self._now is not None

    def is_traced(self, step: int) -> bool:
        """Whether a step belongs to a window. It depends on the step alone, so all ranks agree."""
        place = (step - 1) % self.every - self.every // 2
        return 0 <= place < WINDOW_STEPS

    def prepare(self) -> None:
        """Run the profiler once before the first step: its first use takes over a second. (all
        ranks)
        """
        if self._next_profile is not None:
            quieten_profiler()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
                pass
        if self.mesh.device.type == "cuda":
            torch.cuda.synchronize(self.mesh.device)
        self.clock.anchor()

    def begin(self, step: int) -> bool:
        """Open the notes of a step, if it is to be traced; return whether it is."""
        if not self.is_traced(step):
            return False
        self._now = _Step(step, profiled=self._profiling)
        if self._next_profile is not None and self._profiler is None and step >= self._next_profile:
            self._next_profile = step + PROFILE_EVERY
            activities = [torch.profiler.ProfilerActivity.CPU]
            self._profiler = torch.profiler.profile(activities=activities, record_shapes=True)
            self._profiling = self._now.profiled = True
            self._profiler.start()
            self._anchors = [_anchor() for _ in range(5)]
        return True

    def phase(self, name: str) -> None:
        """Note that the rank enters a phase of the step, or is still in it."""
        if self._now is not None and (not self._now.phases or self._now.phases[-1][0] != name):
            self._now.phases.append((name, self.clock.now()))

    def end(self) -> None:
        """Close the notes of the step."""
        if self._now is None:
            return
        self.phase("end")
        self._done.append(self._now)
        step, self._now = self._now.step, None
        if self._profiling and (self.every == 1 or not self.is_traced(step + 1)):
            self.stop_profile()

    def stop_profile(self) -> None:
        """End a profile that is under way: at the end of its window, or of the run."""
        if self._profiling:
            self._profiling = False
            self._profiler.stop()

    @contextmanager
    def call(self, op: str, what: str, group: str, tensor: Tensor | None = None) -> Iterator[None]:
        """Note a collective that this rank waits in. `tensor` is what it sends, where that is
        known.
        """
        if self._now is None:
            yield
            return
        # On CUDA the device's time: a host's wait beside device work costs nothing
        start = self.clock.now()
        yield
        end = self.clock.now()
        size = tensor.numel() * tensor.element_size() if tensor is not None else 0
        dtype = str(tensor.dtype).removeprefix("torch.") if tensor is not None else "object"
        phase = self._now.phases[-1][0] if self._now.phases else ""
        self._now.collectives.append(
            Collective(op, what, group, phase, dtype, size, start, start, end, "call")
        )

    def hook(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Average a bucket of gradients as DDP does, and note the times. (all ranks; DDP calls it
        in backward)

        Multiplying by 1/n first is what DDP's C++ path does: the sums have the same bits with and
        without the hook.
        """
        buffer = bucket.buffer()
        buffer.mul_(1.0 / self._data.size)
        if self._now is not None:  # not in the warm-up: DDP regroups its buckets after it
            self._bucket_params[bucket.index()] = bucket.parameters()
        ended = self.started(
            "all_reduce", "gradients", self._group, buffer, bucket.index(), bucket.is_last()
        )

        def finish(future: torch.futures.Future[Any]) -> Tensor:
            value = future.value()
            ended()
            return first_of(value)

        return self._reduce(buffer).then(finish)

    def started(
        self, op: str, what: str, group: str, tensor: Tensor, bucket: int | None, last: bool
    ) -> Callable[[], None]:
        """Note a collective that begins now and runs beside compute; call the returned function
        when it has ended.
        """
        ready, notes = self.clock.now(), self._now
        phase = notes.phases[-1][0] if notes and notes.phases else "backward"
        size, dtype = (
            tensor.numel() * tensor.element_size(),
            str(tensor.dtype).removeprefix("torch."),
        )

        def ended() -> None:
            if notes is not None:
                end = time.perf_counter() if self._host_ends else self.clock.now()
                seen = Collective(op, what, group, phase, dtype, size, ready, ready, end, "")
                notes.collectives.append(replace(seen, bucket=bucket, last=last))

        return ended

    def buckets(self, model: nn.Module) -> dict[int, list[str]]:
        """Return the names of the parameters in each bucket seen so far. `model` is their DDP
        wrapper.
        """
        names = {id(p): name.removeprefix("module.") for name, p in model.named_parameters()}
        return {
            i: [names[id(p)] for p in params] for i, params in sorted(self._bucket_params.items())
        }

    def no_sync_due(self) -> bool:
        """Whether the step just traced should be compared with a backward that does not
        communicate.
        """
        if not self._done or self._profiler is not None:
            return False
        step = self._done[-1].step
        between = self.is_traced(step + 1) and self.every > 1  # the two steps of a window
        if between or step < self._next_no_sync:
            return False
        self._next_no_sync = step + NO_SYNC_EVERY
        return True

    @contextmanager
    def no_sync_pass(self) -> Iterator[None]:
        """Time a forward and backward without communication."""
        start = self.clock.now()
        yield
        self._done[-1].no_sync = (start, self.clock.now())

    def read(self) -> list[dict[str, Any]]:
        """Return the notes since the last call as plain data, in seconds of this rank's clock, and
        forget them.

        On CUDA the device must have finished the steps: call it after fetching a value.
        """
        if self._profiling:
            return []  # a window's steps are read together
        if self._profiler is not None:
            runs = _gloo_runs(self._profiler, self._anchors)
            for step in self._done:
                step.collectives = (
                    _with_profile(step.collectives, runs) if step.profiled else step.collectives
                )
            self._profiler = None
        steps, self._done = [self._resolve(step) for step in self._done], []
        return steps

    def _resolve(self, notes: _Step) -> dict[str, Any]:
        seconds = self.clock.seconds
        found = [
            replace(c, enqueue=seconds(c.enqueue), start=seconds(c.start), end=seconds(c.end))
            for c in notes.collectives
        ]
        buckets = sorted((c for c in found if c.bucket is not None), key=lambda c: c.enqueue)
        starts = queue_starts([c.enqueue for c in buckets], [c.end for c in buckets], self._lanes)
        label = (
            "events"
            if not self._host_ends
            else "host"
            if self.mesh.device.type == "cuda"
            else "queue"
        )
        buckets = [
            c if c.timing == "profiler" else replace(c, start=start, timing=label)
            for c, start in zip(buckets, starts, strict=True)
        ]
        calls = [c for c in found if c.bucket is None]
        marks = [(name, seconds(at)) for name, at in notes.phases]
        return {
            "step": notes.step,
            "phases": [[name, at, until] for (name, at), (_, until) in pairwise(marks)],
            "collectives": [asdict(c) for c in sorted([*buckets, *calls], key=lambda c: c.enqueue)],
            "profiled": notes.profiled,
            "no_sync_s": seconds(notes.no_sync[1]) - seconds(notes.no_sync[0])
            if notes.no_sync
            else None,
        }


def _anchor() -> tuple[float, float]:
    """Leave a mark in the running profile; return how many seconds it took, and when it was
    (perf_counter).
    """
    before = time.perf_counter()
    with torch.profiler.record_function("nanoray: anchor"):
        return (now := time.perf_counter()) - before, now


def _gloo_runs(profiler: Any, anchors: list[tuple[float, float]]) -> list[tuple[float, int]]:
    """Return (start in perf_counter seconds, elements) of each all-reduce that gloo's threads ran,
    in that order.

    Kineto's own list: torch's `events()` builds a tree of all operators first, which takes half a
    second. The quickest of the `anchors` ties the profile's clock to perf_counter's: in it this
    thread was held up least.
    """
    events = profiler.profiler.kineto_results.events()
    marks = sorted(e.start_ns() for e in events if e.name() == "nanoray: anchor")
    (_, anchor_s), anchor = min(zip(anchors, marks, strict=False), default=((0.0, 0.0), 0))
    runs = []
    for event in events if marks else ():
        if event.name() == "gloo:all_reduce" and event.shapes():
            elements = 1
            for dim in event.shapes()[0]:
                elements *= dim
            runs.append((anchor_s + (event.start_ns() - anchor) / 1e9, elements))
    return sorted(runs)


def _with_profile(collectives: list[Collective], runs: list[tuple[float, int]]) -> list[Collective]:
    """Set each bucket's start to the measured one: gloo's first run of its size after it was
    enqueued.
    """
    found = []
    for c in sorted(collectives, key=lambda c: c.enqueue):
        elements = c.size_bytes // getattr(torch, c.dtype).itemsize if c.bucket is not None else -1
        run = next((r for r in runs if r[1] == elements and c.enqueue <= r[0] <= c.end), None)
        if run is not None:
            runs.remove(run)
            c = replace(c, start=run[0], timing="profiler")
        found.append(c)
    return found


# Clock offsets between hosts, and memory bandwidth.


@dataclass(frozen=True)
class ClockOffset:
    """How far a rank's clock is ahead of rank 0's, and the largest error of that. Seconds."""

    offset: float
    uncertainty: float

    @classmethod
    def of(cls, asked: float, reading: float, answered: float) -> ClockOffset:
        """Assume the reading was taken in the middle of the round trip; the error is at most half
        of that.
        """
        half = (answered - asked) / 2
        return cls(reading - asked - half, half)


def quieten_profiler() -> None:
    """Keep torch's profiler from writing two lines to stderr for each profile. Call it before the
    first one.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "7")


def measure_offsets(
    mesh: Mesh, clock: Callable[[], float] = time.perf_counter, always: bool = False
) -> list[ClockOffset]:
    """Return every rank's clock offset from rank 0; the values are valid on rank 0 only. (all
    ranks)

    Processes of one host share a clock, so rank 0 queries one rank of each other host (`always`:
    every rank) CLOCK_ROUNDS times and takes the fastest answer; the error is at most half of that
    round trip (Cristian 1989). Takes about a millisecond per host on one switch.
    """
    hosts = mesh.broadcast(mesh.gather(clock_domain()))
    assert hosts is not None
    known = {} if always else {hosts[0]: ClockOffset(0.0, 0.0)}
    offsets = [ClockOffset(0.0, 0.0)]
    ping, reading = torch.zeros(1), torch.zeros(1, dtype=torch.float64)
    for rank in range(1, mesh.world_size):
        if hosts[rank] in known:
            offsets.append(known[hosts[rank]])
            continue
        best = ClockOffset(0.0, float("inf"))
        for _ in range(CLOCK_ROUNDS):
            if mesh.rank == 0:
                asked = clock()
                dist.send(ping, rank, group=mesh.control_group)
                dist.recv(reading, rank, group=mesh.control_group)
                best = min(
                    best,
                    ClockOffset.of(asked, reading.item(), clock()),
                    key=lambda o: o.uncertainty,
                )
            elif mesh.rank == rank:
                dist.recv(ping, 0, group=mesh.control_group)
                reading[0] = clock()
                dist.send(reading, 0, group=mesh.control_group)
        offsets.append(best)
        if not always:
            known[hosts[rank]] = best
    return offsets


def clock_domain() -> str:
    """Return an id shared by processes with the same monotonic clock: boot id and time namespace."""
    domain = [platform.node()]
    with suppress(OSError):
        domain = [Path("/proc/sys/kernel/random/boot_id").read_text().strip()]
        domain.append(os.readlink("/proc/self/ns/time"))
    return "/".join(domain)


def copy_gbps(device: torch.device, size_bytes: int = 64 << 20, rounds: int = 5) -> float:
    """Return this rank's memory copy bandwidth in 1e9 bytes/s; no collective on one host is faster.

    All ranks of a host should call it at the same time, because they share the memory. Best of
    `rounds`.
    """
    source = torch.ones(size_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(rounds):
        wait_for(device)
        start = time.perf_counter()
        target.copy_(source)
        wait_for(device)
        best = min(best, time.perf_counter() - start)
    return algbw_gbps(size_bytes, best)


def wait_for(device: torch.device) -> None:
    """Wait until the device is idle; for measurements outside the loop."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)

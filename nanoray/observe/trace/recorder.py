"""Note on one rank when each collective of a traced step begins and ends.

`CommRecorder` records moments on one rank in traced steps. It computes nothing until a logged step,
where the loop waits for the device anyway. On CUDA a moment is an event in the stream that is read
later; the recorder never synchronises. costs.py computes with what it has noted.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nanoray.observe.trace.costs import (
    GLOO_LANES,
    ClockOffset,
    Collective,
    Moment,
    queue_starts,
)
from nanoray.parallel.axis import Axis, data_axis
from nanoray.parallel.ddp import first_of
from nanoray.parallel.mesh import Mesh

# Of one window of `every=K`, in the middle of K, where steps are seldom logged, evaluated or saved
WINDOW_STEPS = 2
CLOCK_ROUNDS = 12


class Clock:
    """This rank's moments in seconds of time.perf_counter; on CUDA, when the device gets there."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._device = device
        self._anchor: Any = None
        self._anchor_s = 0.0

    def now(self) -> Moment:
        """Mark this moment; about a microsecond, and no wait."""
        return self._event() if self._cuda else time.perf_counter()

    def anchor(self) -> None:
        """Tie the device's clock to the host's; call it on an idle device, as after a fetch."""
        if not self._cuda:
            return
        self._anchor = self._event()
        # Microseconds on an idle device; an unfinished event has no time.
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

    @property
    def phase(self) -> str:
        """The phase that the rank is in; "" before the first one."""
        return self.phases[-1][0] if self.phases else ""


class CommRecorder:
    """Records one rank's collectives. Between traced steps every method returns at once."""

    def __init__(
        self,
        mesh: Mesh,
        every: int,
        reduce: Callable[[Tensor], Any] | None = None,
        axis: Axis | None = None,
    ) -> None:
        """Trace windows of steps, `every` apart.

        `reduce` starts the all-reduce of a gradient bucket; None: torch's. torch's DDP sums over
        `axis`; None: over all ranks.
        """
        self.mesh = mesh
        self.every = every
        self.clock = Clock(mesh.device)
        self._bucket_params: dict[int, list[Any]] = {}
        self._data = axis or data_axis(mesh)
        group = self._data.group

        def all_reduce(buffer: Tensor) -> Any:
            return dist.all_reduce(buffer, group=group, async_op=True).get_future()

        self._reduce = reduce or all_reduce
        self._group = "default"
        if reduce:
            self._group = "gradients"
        elif self._data.size < mesh.world_size:
            self._group = self._data.name

        gloo = mesh.backend == "gloo"
        # A hand-written algorithm has one thread of its own.
        self._lanes = GLOO_LANES if gloo and not reduce else 1
        # Gloo completes on the host, also for CUDA tensors.
        self._host_ends = gloo
        self._timing = "events"
        if gloo:
            self._timing = "host" if mesh.device.type == "cuda" else "queue"

        self._now: _Step | None = None
        self._done: list[_Step] = []

    def is_traced(self, step: int) -> bool:
        """Whether a step belongs to a window. It depends on the step alone, so all ranks agree."""
        place = (step - 1) % self.every - self.every // 2
        return 0 <= place < WINDOW_STEPS

    def prepare(self) -> None:
        """Tie the device's clock to the host's before the first step."""
        if self.mesh.device.type == "cuda":
            torch.cuda.synchronize(self.mesh.device)
        self.clock.anchor()

    def begin(self, step: int) -> bool:
        """Open the notes of a step, if it is to be traced; return whether it is."""
        if not self.is_traced(step):
            return False
        self._now = _Step(step)
        return True

    def phase(self, name: str) -> None:
        """Note that the rank enters a phase of the step, or is still in it."""
        if self._now is not None and self._now.phase != name:
            self._now.phases.append((name, self.clock.now()))

    def end(self) -> None:
        """Close the notes of the step."""
        if self._now is None:
            return
        self.phase("end")
        self._done.append(self._now)
        self._now = None

    def _note(
        self,
        notes: _Step,
        op: str,
        what: str,
        group: str,
        tensor: Tensor | None,
        ready: Moment,
        end: Moment,
        phase: str,
        bucket: int | None = None,
        last: bool = False,
        wait: Moment | None = None,
    ) -> None:
        """Add a collective to a step's notes."""
        size_bytes = 0
        dtype = "object"
        if tensor is not None:
            size_bytes = tensor.numel() * tensor.element_size()
            dtype = str(tensor.dtype).removeprefix("torch.")
        # A bucket begins after those before it: _resolve computes when, and how that is known.
        notes.collectives.append(
            Collective(
                op=op,
                what=what,
                group=group,
                phase=phase,
                dtype=dtype,
                size_bytes=size_bytes,
                enqueue=ready,
                start=ready,
                end=end,
                timing="call",
                bucket=bucket,
                last=last,
                wait=wait,
            )
        )

    def _end(self) -> Moment:
        """Return the moment at which a collective beside compute has ended."""
        return time.perf_counter() if self._host_ends else self.clock.now()

    @contextmanager
    def call(self, op: str, what: str, group: str, tensor: Tensor | None = None) -> Iterator[None]:
        """Note a collective that this rank waits in. `tensor`: what it sends, where it is known."""
        notes = self._now
        if notes is None:
            yield
            return
        # On CUDA the device's time: a host's wait beside device work costs nothing.
        start = self.clock.now()
        yield
        self._note(notes, op, what, group, tensor, start, self.clock.now(), notes.phase)

    def hook(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Average a bucket of gradients as DDP does, and note the times.

        (all ranks; DDP calls it in backward) Multiplying by 1/n first is what DDP's C++ path does:
        the sums have the same bits with and without the hook.
        """
        # DDP's hook replaces its all-reduce, so this must do the same arithmetic.
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
        """Note a collective that begins now and runs beside compute; return a function for its end.

        Call the returned function when the collective has ended.
        """
        ready = self.clock.now()
        notes = self._now
        phase = notes.phase if notes else ""

        def ended() -> None:
            if notes is not None:
                self._note(
                    notes,
                    op,
                    what,
                    group,
                    tensor,
                    ready,
                    self._end(),
                    phase or "backward",
                    bucket=bucket,
                    last=last,
                )

        return ended

    def beside(
        self, op: str, what: str, group: str, tensor: Tensor
    ) -> tuple[Callable[[], None], AbstractContextManager[None]]:
        """Note a collective that begins now and travels beside compute.

        Returns the function to call when it has ended, and a context in which this rank waits for
        it, once.
        """
        notes = self._now
        if notes is None:
            return _nothing, nullcontext()
        begun = self.clock.now()
        phase = notes.phase
        ends: list[Moment] = []

        @contextmanager
        def waiting() -> Iterator[None]:
            waits_from = self.clock.now()
            yield
            end = ends[0] if ends else self.clock.now()
            self._note(notes, op, what, group, tensor, begun, end, phase, wait=waits_from)

        return (lambda: ends.append(self._end())), waiting()

    def buckets(self, model: nn.Module) -> dict[int, list[str]]:
        """Return the parameters' names in each bucket seen so far. `model`: their DDP wrapper."""
        names = {id(p): name.removeprefix("module.") for name, p in model.named_parameters()}
        return {
            index: [names[id(p)] for p in params]
            for index, params in sorted(self._bucket_params.items())
        }

    def read(self) -> list[dict[str, Any]]:
        """Return the notes since the last call as plain data, in seconds of this rank's clock.

        The notes are dropped afterwards. On CUDA the device must have finished the steps: call it
        after fetching a value.
        """
        steps = [self._resolve(step) for step in self._done]
        self._done = []
        return steps

    def _resolve(self, notes: _Step) -> dict[str, Any]:
        """Return a step's notes as plain data, with all moments in seconds."""
        seconds = self.clock.seconds
        in_seconds = []
        for c in notes.collectives:
            wait = None if c.wait is None else seconds(c.wait)
            in_seconds.append(
                replace(
                    c,
                    enqueue=seconds(c.enqueue),
                    start=seconds(c.start),
                    end=seconds(c.end),
                    wait=wait,
                )
            )
        calls = [c for c in in_seconds if c.bucket is None]

        # A bucket was noted when it was ready. It began after earlier ones of its queue.
        buckets = sorted((c for c in in_seconds if c.bucket is not None), key=lambda c: c.enqueue)
        starts = queue_starts([c.enqueue for c in buckets], [c.end for c in buckets], self._lanes)
        for i, start in enumerate(starts):
            buckets[i] = replace(buckets[i], start=start, timing=self._timing)

        # A phase lasts until the next one begins; the last mark is the end of the step.
        marks = [(name, seconds(moment)) for name, moment in notes.phases]
        phases = [[name, start, end] for (name, start), (_, end) in pairwise(marks)]

        return {
            "step": notes.step,
            "phases": phases,
            "collectives": [asdict(c) for c in sorted([*buckets, *calls], key=lambda c: c.enqueue)],
        }


def _nothing() -> None:
    """Do nothing: the step is not traced."""


# Clock offsets between hosts.


def measure_offsets(mesh: Mesh) -> list[ClockOffset]:
    """Return every rank's clock offset from rank 0; valid on rank 0 only. (all ranks)

    The uncertainty is 0 for ranks on rank 0's host and above 0 for others, on every rank.

    Processes of one host share a clock, so rank 0 compares its clock with one rank of each other
    host CLOCK_ROUNDS times and takes the fastest answer; the error is at most half of that round
    trip (Cristian 1989). Takes about a millisecond per host on one switch.
    """
    # All ranks need the list, because all run the loop below.
    hosts = mesh.broadcast(mesh.gather(clock_domain()))
    assert hosts is not None
    offset_of_host = {hosts[0]: ClockOffset(0.0, 0.0)}
    offsets = [ClockOffset(0.0, 0.0)]
    ping = torch.zeros(1)
    reading = torch.zeros(1, dtype=torch.float64)
    for rank in range(1, mesh.world_size):
        if hosts[rank] in offset_of_host:
            offsets.append(offset_of_host[hosts[rank]])
            continue

        # Every rank runs this loop, and only rank 0 and `rank` exchange messages in it.
        best = ClockOffset(0.0, float("inf"))
        for _ in range(CLOCK_ROUNDS):
            if mesh.rank == 0:
                sent = time.perf_counter()
                dist.send(ping, rank, group=mesh.control_group)
                dist.recv(reading, rank, group=mesh.control_group)
                measured = ClockOffset.of(sent, reading.item(), time.perf_counter())
                if measured.uncertainty < best.uncertainty:
                    best = measured
            elif mesh.rank == rank:
                dist.recv(ping, 0, group=mesh.control_group)
                reading[0] = time.perf_counter()
                dist.send(reading, 0, group=mesh.control_group)
        offsets.append(best)
        offset_of_host[hosts[rank]] = best
    return offsets


def clock_domain() -> str:
    """Return an id of the monotonic clock of this process: boot id and time namespace."""
    # Where /proc is missing, the host's name must do. A container may have its own time namespace.
    domain = [platform.node()]
    with suppress(OSError):
        domain = [Path("/proc/sys/kernel/random/boot_id").read_text().strip()]
        domain.append(os.readlink("/proc/self/ns/time"))
    return "/".join(domain)


def wait_for(device: torch.device) -> None:
    """Wait until the device is idle; for measurements outside the loop."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)

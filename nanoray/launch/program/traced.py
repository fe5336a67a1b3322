"""Notes every collective of a program that does not use nanoray. It runs in the program's process.

    dist.all_reduce, DDP's reducer (C++), FSDP, DeviceMesh ─► c10d::allreduce_, an operator of torch
                                                                   │
                                       a kernel in front of the backend's: note, and pass it on

Each collective of torch.distributed is an operator of the library c10d. A kernel at the dispatch key
BackendSelect, which lies before the backends' own keys, sees all of them: for gloo and NCCL, from
Python and from C++, for any tensor. A hook that torch calls after each optimizer's step cuts the
notes into steps. It imports nothing of nanoray but counts.py: the program's process stays its own.
"""

from __future__ import annotations

import atexit
import json
import os
import queue
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from nanoray.launch.program.counts import CountsFile, GroupCounts

Moment = Any  # float: time.perf_counter seconds; or a torch.cuda.Event

# The operators, by the name that a collective has in nccl-tests. check_for_nan is none.
OPS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "gather_": "gather",
    "scatter_": "scatter",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
    "barrier": "barrier",
    "monitored_barrier_": "barrier",
}
REDUCES = ("all_reduce", "reduce_scatter")  # what sums gradients, where it is issued in backward

FIRST_ALL = 20  # steps that are noted from the start, whatever `every` is
WINDOW = 2  # steps that follow each other, of every `every`
PATIENCE_S = 30.0  # how long the notes of a step wait for its collectives to end
MOST_NOTES = 20_000  # of a step: a program may never call an optimizer of torch's
CLOSE_S = 5.0  # how long the end of the program waits for the last notes
POLL_S = 0.2  # between two looks at collectives whose end is not reported


class Note:
    """One collective of this rank."""

    __slots__ = (
        "dtype",
        "end",
        "group",
        "on_host",
        "op",
        "phase",
        "ready",
        "size",
        "wait",
        "work",
    )

    def __init__(
        self,
        op: str,
        group: TracedGroup,
        size: int,
        dtype: str,
        phase: str,
        ready: Moment,
        on_host: bool,
    ) -> None:
        self.op = op
        self.group = group
        self.size = size  # bytes
        self.dtype = dtype
        self.phase = phase
        self.ready = ready
        self.wait: Moment | None = None  # when the program began to wait for it, where it is seen
        self.end: Moment | None = None
        self.on_host = on_host  # whether the backend ends it on the host, as gloo does
        self.work: Any = None  # kept until the end, so that Work.wait finds this note


class TracedGroup:
    """A process group: its counts, and the collectives that have not ended."""

    def __init__(self, group: Any, place: int) -> None:
        self.size: int = group.size()
        # Groups of one kind and size, as the columns of a mesh, are one row of the merged notes.
        self.label = self.name = "default"
        if group.group_desc != "default_pg":
            self.label = f"{group.group_desc}/{self.size}"
            self.name = f"{group.group_desc} {group.group_name}"
        self.place = place  # in the file of counts
        self.begun = 0
        self.ended = 0
        self.running: deque[Note] = deque()
        self.nccl: bool | None = None  # whether CUDA tensors go through NCCL; None: not asked yet


class Tracer:
    """Notes this process' collectives, and writes them step by step."""

    def __init__(self, folder: Path, rank: int, every: int) -> None:
        """folder: of the logs. every: of this number of steps 2 are noted, after the first ones."""
        self._every = every
        self._notes_path = folder / f"rank{rank}.notes.jsonl"
        self._notes_path.write_text("")
        self._counts = CountsFile(folder / f"rank{rank}.counts")

        self._groups: dict[str, TracedGroup] = {}
        # Also of those that have ended, as long as the program may still wait for them
        self._by_work: weakref.WeakKeyDictionary[Any, Note] = weakref.WeakKeyDictionary()
        self._polled: dict[Note, None] = {}  # those whose end nothing reports: looked at
        self._lock = threading.Lock()
        self._leader: Any = None  # the first optimizer that makes a step: its steps are counted
        self._step = 1
        self._ended = 0
        self._on = True
        self._cuda = False
        self._device: torch.device | None = None
        self._said: set[str] = set()
        self._newest: Any = None  # Work
        self._notes: list[Note] = []
        self._marks: list[tuple[str, Moment]] = [("set-up", time.perf_counter())]
        self._steps: queue.SimpleQueue[tuple[int, list[Any], list[Note]] | None] = (
            queue.SimpleQueue()
        )
        self._writer = threading.Thread(target=self._write_steps, daemon=True)
        self._watcher = threading.Thread(target=self._poll_ends, daemon=True)
        self._library = torch.library.Library("c10d", "IMPL")

    def start(self) -> None:
        """Put the kernels in front of the backends', and the hooks into torch."""
        for name, op in OPS.items():
            operator = getattr(getattr(torch.ops.c10d, name, None), "default", None)
            if operator is not None:  # torch has other ones in other versions
                kernel = self._kernel(op, operator)
                self._library.impl(name, kernel, "BackendSelect", with_keyset=True)

        wait = dist.Work.wait

        def noted_wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            note = self._by_work.get(work)
            if note is not None and note.wait is None:
                note.wait = time.perf_counter() if note.on_host else self._now()
            answer = wait(work, *args, **kwargs)
            if note is not None and note.on_host:
                self._end(note, time.perf_counter())
            return answer

        backward = torch.autograd.backward

        def noted_backward(*args: Any, **kwargs: Any) -> None:
            self._mark("backward")
            try:
                backward(*args, **kwargs)
            finally:
                self._mark("forward")
                self._end_completed()

        dist.Work.wait = noted_wait  # type: ignore[method-assign,assignment]
        torch.autograd.backward = noted_backward
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        self._writer.start()
        self._watcher.start()
        atexit.register(self._close)

    def stop(self) -> None:
        """Note nothing any more: in a fork, as of a DataLoader, which has no threads of this file."""
        self._on = False
        atexit.unregister(self._close)

    # In the program's threads.

    def _kernel(self, op: str, operator: Any) -> Callable[..., Any]:
        own_key = torch._C.DispatchKey.BackendSelect

        def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._is_on():
                return operator.redispatch(keyset.remove(own_key), *args, **kwargs)
            note = None
            try:
                note = self._issue(op, args)
            except Exception as error:  # the program must not fail by what observes it
                self._missed(op, error)
            try:
                answer = operator.redispatch(keyset.remove(own_key), *args, **kwargs)
            except BaseException:
                if note is not None:
                    self._end(note, time.perf_counter())
                raise
            if note is not None:
                try:
                    self._issued(note, answer)
                except Exception as error:
                    self._end(note, time.perf_counter())
                    self._missed(op, error)
            return answer

        return kernel

    def _missed(self, what: str, error: object) -> None:
        """Say once of each kind that it is not noted, or without its end."""
        if what not in self._said:
            self._said.add(what)
            print(f"trace    {what} is not noted: {error}", file=sys.stderr)

    def _issue(self, op: str, args: tuple[Any, ...]) -> Note:
        """Note a collective before the backend has it."""
        sizes = [0]
        first: torch.Tensor | None = None
        own: Any = None
        for arg in args[:3]:  # one or two lists of tensors, then the group
            if isinstance(arg, torch.ScriptObject):
                own = dist.ProcessGroup.unbox(arg)
                break
            of_arg = 0
            for tensor in tensors_of(arg):
                first = tensor if first is None else first
                of_arg += tensor.numel() * tensor.element_size()
            sizes.append(of_arg)
        group = self._group(own)
        # The larger side is the total: what is gathered, or what is scattered.
        size = 0 if op == "barrier" else max(sizes)
        dtype = "" if first is None else str(first.dtype).removeprefix("torch.")
        ready: Moment = time.perf_counter()
        on_host = True
        if first is not None and first.is_cuda:
            self._cuda = True
            self._device = first.device
            ready = self._now()
            if group.nccl is None:
                backend = own._get_backend(torch.device("cuda"))
                group.nccl = "nccl" in backend.name().lower()
            on_host = not group.nccl
        note = Note(op, group, size, dtype, self._marks[-1][0], ready, on_host)
        with self._lock:
            group.begun += 1
            group.running.append(note)
            self._save(group, note)
            if is_noted(self._step, self._every):
                if len(self._notes) < MOST_NOTES:
                    self._notes.append(note)
                else:
                    self._missed(f"collective {MOST_NOTES + 1:,} of a step", "there are too many")
        return note

    def _issued(self, note: Note, answer: Any) -> None:
        """Ask for the end of a collective that the backend has."""
        boxed = answer[-1] if isinstance(answer, tuple) and answer else answer
        if not isinstance(boxed, torch.ScriptObject):  # monitored_barrier has ended
            self._end(note, time.perf_counter())
            return
        work = dist.Work.unbox(boxed)
        note.work = work
        self._by_work[work] = note
        # It may end before torch returns it to the program, which must get the same object.
        self._newest = work
        # A callback is worth its cost where the moment counts.
        if not is_noted(self._step, self._every):
            self._polled[note] = None
            return
        try:
            future = work.get_future()
        except RuntimeError:  # gloo's messages between two ranks have none
            self._polled[note] = None
            return
        if note.on_host:
            future.add_done_callback(lambda _: self._end(note, time.perf_counter()))
        else:
            # The callback runs now, on a stream that waits for the collective.
            future.add_done_callback(lambda _: self._mark_end(note))

    def _mark_end(self, note: Note) -> None:
        note.end = self._now()
        self._polled[note] = None

    def _end_completed(self) -> None:
        """Note the end of what DDP has waited for in backward: the callback may come later."""
        now = time.perf_counter()
        for group in list(self._groups.values()):
            for note in list(group.running):
                if note.on_host and note.work is not None and note.work.is_completed():
                    self._end(note, now)

    def _end(self, note: Note, end: Moment) -> None:
        """Note the end of a collective. (any thread)"""
        group = note.group
        with self._lock:
            if note.end is None:
                note.end = end
            if note not in group.running:
                return  # its end was seen twice
            group.running.remove(note)
            group.ended += 1
            self._ended += 1
            self._counts.write_head(self._step - 1, self._ended)
            self._save(group, note)
        note.work = None
        self._polled.pop(note, None)

    def _group(self, group: Any) -> TracedGroup:
        known = self._groups.get(group.group_name)
        if known is None:
            known = self._groups[group.group_name] = TracedGroup(group, len(self._groups))
        return known

    def _save(self, group: TracedGroup, note: Note) -> None:
        """Write a group's counts, and the collective that it waits for or has ended last."""
        shown = group.running[0] if group.running else note
        counts = GroupCounts(group.begun, group.ended, shown.op, shown.size)
        self._counts.write_group(group.place, group.name, counts)

    def _now(self) -> Moment:
        """Mark this moment: on CUDA an event in the current stream."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _mark(self, phase: str) -> None:
        if self._is_on() and len(self._marks) < MOST_NOTES:
            self._marks.append((phase, self._now()))

    def _is_on(self) -> bool:
        # No moment can be taken in a CUDA graph that is being captured.
        return self._on and not (self._cuda and torch.cuda.is_current_stream_capturing())

    # Steps.

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        self._leader = self._leader or optimizer
        self._mark("optimizer")

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if optimizer is self._leader and self._is_on():
            self._cut()
        else:
            self._mark("forward")

    def _cut(self) -> None:
        """End a step, and begin the next one."""
        now = self._now()
        with self._lock:
            notes, self._notes = self._notes, []
            marks, self._marks = [*self._marks, ("end", now)], [("forward", now)]
            step = self._step
            self._step += 1
            self._counts.write_head(step, self._ended)
        if is_noted(step, self._every):
            self._steps.put((step, marks, notes))

    def _close(self) -> None:
        """Write what is left: the collectives after the last step."""
        notes, self._notes = self._notes, []
        if notes:
            # What follows the last step is none. A program without an optimizer has made one.
            what = "closing" if self._leader else "forward"
            marks = [(what, self._marks[0][1]), ("end", self._now())]
            for note in notes:
                if note.phase != "backward":
                    note.phase = what
            self._steps.put((self._step, marks, notes))
        self._steps.put(None)
        self._writer.join(CLOSE_S)

    # In threads of this file.

    def _poll_ends(self) -> None:
        while True:
            time.sleep(POLL_S)
            for note in list(self._polled):
                if note.end is not None and not isinstance(note.end, float):
                    ended = note.end.query()
                else:
                    ended = note.work is None or note.work.is_completed()
                if ended:
                    self._end(note, time.perf_counter())

    def _write_steps(self) -> None:
        with self._notes_path.open("a", encoding="utf-8") as file:
            while (item := self._steps.get()) is not None:
                step, marks, notes = item
                deadline = time.monotonic() + PATIENCE_S
                while any(note.end is None for note in notes) and time.monotonic() < deadline:
                    time.sleep(0.01)
                seconds = self._to_seconds(marks[-1][1], notes)
                file.write(json.dumps(plain(step, marks, notes, seconds)) + "\n")
                file.flush()

    def _to_seconds(self, last: Moment, notes: list[Note]) -> Callable[[Moment], float]:
        """Return what converts moments of a step, after the device has reached the last of them."""
        if not self._cuda:
            return float
        for moment in [last, *(note.end for note in notes)]:
            if moment is not None and not isinstance(moment, float):
                moment.synchronize()
        # A stream of its own: the anchor must not wait for what the program has queued since.
        with torch.cuda.device(self._device):  # of this thread it would be the first one
            anchor = torch.cuda.Event(enable_timing=True)
            anchor.record(torch.cuda.Stream())
        anchor.synchronize()
        at = time.perf_counter()

        def seconds(moment: Moment) -> float:
            if isinstance(moment, float):
                return moment
            return float(at - moment.elapsed_time(anchor) / 1e3)

        return seconds


def tensors_of(arg: Any) -> Iterator[torch.Tensor]:
    """Return the tensors of an operator's argument: one, a list, or a list of lists."""
    if isinstance(arg, torch.Tensor):
        yield arg
    elif isinstance(arg, list):
        for part in arg:
            yield from tensors_of(part)


def timing_of(note: Note) -> str:
    """Return how the end of a bucket is known, as trace.costs says it."""
    if not note.on_host:
        return "events"
    return "queue" if isinstance(note.ready, float) else "host"


def is_noted(step: int, every: int) -> bool:
    """Whether a step is written: it depends on the step alone, so all ranks agree."""
    return step <= FIRST_ALL or (step - 1 - every // 2) % every < WINDOW


def plain(
    step: int, marks: list[Any], notes: list[Note], seconds: Callable[[Moment], float]
) -> dict[str, Any]:
    """Return the notes of a step as JSON, in the form of trace.recorder's, in this rank's seconds."""
    # A sum that is issued in backward, and not waited for at once, is a bucket of gradients.
    buckets: dict[Note, int] = {}
    for note in notes:
        if note.phase == "backward" and note.op in REDUCES and note.wait is None and note.end:
            buckets[note] = len(buckets)
    last = next(reversed(buckets), None)
    collectives = []
    for note in notes:
        if note.end is None:
            continue  # it has not ended: the program is about to end, or hangs
        ready = seconds(note.ready)
        is_bucket = note in buckets
        collectives.append(
            {
                "op": note.op,
                "what": "gradients" if is_bucket else note.op,
                "group": note.group.label,
                "phase": note.phase,
                "dtype": note.dtype,
                "size_bytes": note.size,
                "enqueue": ready,
                "start": ready,
                "end": seconds(note.end),
                "timing": timing_of(note) if is_bucket else "call",
                "bucket": buckets.get(note),
                "last": note is last,
                "wait": None if note.wait is None else min(seconds(note.wait), seconds(note.end)),
            }
        )
    moments = [seconds(moment) for _, moment in marks]
    phases = [
        [name, start, end]
        for (name, _), start, end in zip(marks, moments, moments[1:], strict=False)
        if end > start
    ]
    return {
        "step": step,
        "phases": phases,
        "collectives": collectives,
        "sizes": {note.group.label: note.group.size for note in notes},
    }


def trace(folder: str, rank: int, every: int) -> None:
    """Note the collectives of this process from now on."""
    tracer = Tracer(Path(folder), rank, every)
    tracer.start()
    os.register_at_fork(after_in_child=tracer.stop)

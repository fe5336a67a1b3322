"""Save checkpoints beside training: the loop waits for a copy in memory, a thread of rank 0 for the
disk.

    loop     step ─► step ─► copy ─► step ─► step ─► step ─► step ─► copy ─► ...
    thread                      └──► write, hash, fsync ──► rename      └──► ...

A sharded state is copied and written by every rank; rank 0's thread waits for the others' parts and
commits. At most one checkpoint is being written; the next one waits for it, so a slow disk slows
training down but needs no more memory. os.write and hashlib release the GIL, so steps keep their
speed. All ranks learn of a failed write at the next checkpoint, where they communicate anyway.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanoray.checkpoint import files as checkpoint
from nanoray.checkpoint import parts
from nanoray.errors import CheckpointError
from nanoray.mesh.mesh import Mesh
from nanoray.run import RunSpec, read_attempt
from nanoray.state import StateDict

log = logging.getLogger("nanoray")
TRIES = 3  # failed checkpoints in a row (a full disk, say) that end the run
CLOSE_S = 10.0  # at the end of a run, for the other ranks' parts of a checkpoint
_ALIGN = 64  # bytes, for vectorised copies
Tensors = dict[tuple[str, str], Tensor]  # by part of the state and name
# The copy's first byte; the tensor's shape, dtype, device
Place = tuple[int, torch.Size, torch.dtype, torch.device]


class AttemptOver(CheckpointError):
    """This process belongs to an older attempt of the run."""


class CheckpointWriter:
    """Writes a run's checkpoints, beside training or while it waits. (rank 0 commits; the others
    learn the result)
    """

    def __init__(
        self,
        spec: RunSpec,
        note: Callable[[str], None],
        saved: Callable[[int], None] = lambda step: None,
    ) -> None:
        """`note` shows a line to the user, `saved` hears of a step on disk; only the training
        thread calls them.
        """
        self.committed = -1  # the newest step that this process has written to disk
        self._spec, self._note, self._saved = spec, note, saved
        self._beside = spec.config.checkpoint_mode == "async"
        self._snapshot: Snapshot | None = None
        self._thread: threading.Thread | None = None
        self._step = -1  # the one that the thread writes
        self._outcome: float | Exception = 0.0  # of the last write: its seconds, or why it failed
        self._failures = 0  # in a row
        self._fatal = ""  # why the run cannot continue; broadcast at the next checkpoint
        self._is_part = False  # whether this rank writes a part for rank 0
        self._no_part = ""  # why a part that rank 0 waits for will not come
        self._may_commit = threading.Event()  # cleared while a survivor waits for its next attempt
        self._may_commit.set()
        self._news: dict[str, float] = {}

    def prepare(self, state: StateDict) -> None:
        """Start to allocate memory for copies of `state` in a thread: first access to memory is
        slow.
        """
        if self._beside and self._spec.config.checkpoint_every:
            self._snapshot = Snapshot(named_tensors(state))

    def save(self, mesh: Mesh, state: StateDict | None, final: bool = False) -> None:
        """Save rank 0's `state`, or every rank's part of it; with `final` return only when it is on
        disk. (all ranks)

        Ranks other than 0 give a state if it is sharded, else None. Raises CheckpointError on all
        ranks when a final checkpoint failed, or the third one in a row.
        """
        if state and state.pieces is not None:
            problem = self._save_parts(mesh, state, final)
        else:
            problem = self._save(state, final) if state else ""
        # (all ranks) wait in the group with the long timeout
        if problem := mesh.broadcast(problem):
            raise CheckpointError(problem)

    def _save_parts(self, mesh: Mesh, state: StateDict, final: bool) -> str:
        """Save a sharded state, or start to; return on rank 0 why the run cannot continue. (all
        ranks)
        """
        step, first = state.meta["step"], mesh.rank == 0
        self._is_part = not first
        self._settle_parts(mesh)
        sizes = mesh.gather(sum(tensor.nbytes for tensor in named_tensors(state).values()))
        draft = self._begin(step, sum(sizes or ()), final) if first else None
        # (all ranks) they need it to write their parts
        temp = mesh.broadcast(str(draft.temp) if draft else "")
        if not temp:
            return self._fatal
        job = partial(self._write_parts, draft, Path(temp), mesh.rank, mesh.world_size)
        if final or not self._beside:
            if not first:
                job(state)
            self._hear_of_parts(mesh)
            if first:
                job(state)
                self._take_note(step, final)
            return self._fatal
        try:
            copy = self._copy(state)
        except CheckpointError as error:
            # This rank's part does not come; the next checkpoint tells rank 0
            self._outcome = error
            if first:
                assert draft
                draft.discard()
                self._take_note(step, final)
            return self._fatal
        self._step, self._thread = step, threading.Thread(target=job, args=(copy,), daemon=True)
        self._thread.start()
        return ""

    def _settle_parts(self, mesh: Mesh) -> None:
        """Wait for the write in progress on every rank. (all ranks) Rank 0 learns first which part
        will not come.
        """
        if mesh.rank:
            self._settle()
        self._hear_of_parts(mesh)
        if mesh.rank == 0:
            self._settle()

    def _hear_of_parts(self, mesh: Mesh) -> None:
        """Tell rank 0 which parts were not written. (all ranks)"""
        failed = self._outcome if mesh.rank and isinstance(self._outcome, Exception) else None
        told = mesh.gather(f"rank {mesh.rank}: {failed}" if failed else "")
        if mesh.rank:
            self._outcome = 0.0
        # That the group broke stays true of its parts
        self._no_part = next(filter(None, told or ()), self._no_part)

    def _begin(self, step: int, need: int, final: bool) -> checkpoint.Draft | None:
        """Make the folder for the parts, of `need` bytes; None where nothing is to be saved. (rank
        0 only)
        """
        if step == self.committed or (self._fatal and not final):
            return None
        self._no_part = ""
        try:
            draft = checkpoint.Draft(
                self._spec.checkpoints, step, str(self._spec.attempt), self._fence
            )
            with draft.errors():
                draft.begin(need)
            return draft
        except CheckpointError as error:
            self._outcome = error
            self._take_note(step, final)
            return None

    def _write_parts(
        self, draft: checkpoint.Draft | None, temp: Path, rank: int, writers: int, state: StateDict
    ) -> None:
        """Write this rank's part, on rank 0 also commit, and store the outcome. Also runs in the
        thread.
        """
        start, keep = time.perf_counter(), self._spec.config.keep_checkpoints
        try:
            if draft:
                checkpoint.save_shared(draft, state, writers, keep, self._require_parts)
            else:
                parts.write(temp, rank, state)
            self._outcome = time.perf_counter() - start
        except Exception as error:  # raised again, or counted, in the training thread
            self._outcome = error

    def _require_parts(self) -> None:
        """Raise CheckpointError when a part that rank 0 waits for will not come."""
        if self._no_part:
            raise CheckpointError(f"not all parts of the checkpoint were written ({self._no_part})")

    def _save(self, state: StateDict, final: bool) -> str:
        """Save, or start to; return why the run cannot continue, empty if it can. (rank 0 only)"""
        step = state.meta["step"]
        self._settle()
        self._is_part = False  # after the group has shrunk to one rank
        if step == self.committed:
            return ""
        if self._fatal and not final:
            return self._fatal
        if final or not self._beside:  # training waits, so no copy is needed
            self._write(state)
            self._take_note(step, final)
            return self._fatal
        try:
            copy = self._copy(state)
        except CheckpointError as error:
            self._outcome = error
            self._take_note(step, final)
            return self._fatal
        self._step, self._thread = (
            step,
            threading.Thread(target=self._write, args=(copy,), daemon=True),
        )
        self._thread.start()
        return ""

    def _copy(self, state: StateDict) -> StateDict:
        """Return a copy that training does not change. Raises CheckpointError when memory is short."""
        tensors = named_tensors(state)
        if self._snapshot is None or not self._snapshot.fits(tensors):
            self._snapshot = None  # free the old one first
            self._snapshot = Snapshot(tensors)
        copies = self._snapshot.take(tensors)
        model, optimizer = ({name: copies[part, name] for name in of} for part, of in _parts(state))
        return replace(state, model=model, optimizer=optimizer)

    def _settle(self) -> None:
        """Wait for the write in progress, if any, and note its outcome."""
        if not self._thread:
            return
        start, late = time.perf_counter(), self.busy
        self._thread.join()
        if late:
            seconds = time.perf_counter() - start
            log.warning(
                "waited %.3f s for the checkpoint of step %d, still being written",
                seconds,
                self._step,
            )
        self._thread = None
        if not self._is_part:
            self._take_note(self._step)

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written at this moment."""
        return self._thread is not None and self._thread.is_alive()

    def _write(self, state: StateDict) -> None:
        """Write a checkpoint and store the outcome. Also runs in the thread."""
        start, spec = time.perf_counter(), self._spec
        try:
            checkpoint.save(
                spec.checkpoints,
                state,
                spec.config.keep_checkpoints,
                str(spec.attempt),
                self._fence,
            )
            self._outcome = time.perf_counter() - start
        except Exception as error:  # raised again, or counted, in the training thread
            self._outcome = error

    def _fence(self) -> None:
        """Raise AttemptOver when another attempt of this run has begun without this process."""
        self._may_commit.wait()  # a survivor waits for the number of its next attempt
        allowed, spec = read_attempt(self._spec.folder), self._spec
        if allowed and allowed[1] != spec.started:
            raise AttemptOver(
                "this command is over: another one continues the run; nothing written"
            )
        if allowed and spec.attempt < allowed[0]:
            raise AttemptOver(
                f"attempt {spec.attempt} is over: attempt {allowed[0]} runs now; nothing written"
            )

    def _take_note(self, step: int, last: bool = False) -> None:
        """Note the outcome of a write, and whether the run can continue. (rank 0 only)"""
        outcome = self._outcome
        if isinstance(outcome, float):
            self.committed, self._failures, self._fatal = step, 0, ""
            self._news["time/checkpoint_write_s"] = outcome
            log.info("checkpoint of step %d is on disk, written in %.3f s", step, outcome)
            self._saved(step)
            return
        if not isinstance(outcome, CheckpointError):
            raise outcome
        self._failures += 1
        if last or self._failures >= TRIES or isinstance(outcome, AttemptOver):
            self._fatal = str(outcome)
        if not last:
            so = "which ends the run" if self._fatal else "training goes on"
            self._note(f"warning  checkpoint of step {step} skipped, {so}: {outcome}")

    def paused(self, step: int, seconds: float) -> float:
        """Note the seconds that training waited for a checkpoint, and return them."""
        self._news["time/checkpoint_s"] = seconds
        log.info("training waited %.3f s for the checkpoint of step %d", seconds, step)
        return seconds

    def news(self) -> dict[str, float]:
        """Return the metrics of checkpoints written since the last call; warn of a failed one."""
        if self._thread and not self.busy:
            self._settle()
        news, self._news = self._news, {}
        return news

    def forget(self, mesh: Mesh, in_parts: bool) -> None:
        """Finish the write in progress. (all ranks) Steps will be repeated with other data, and
        saved again.

        `in_parts`: the state is sharded. A rank that has joined the run since its newest checkpoint
        cannot know.
        """
        if in_parts:
            self._settle_parts(mesh)
        else:
            self._settle()
        self.committed = -1

    def hold(self) -> None:
        """Hold commits back: the group broke, and the run's next attempt may have begun."""
        self._may_commit.clear()
        self._no_part = "the group of ranks broke"

    def go_on(self, spec: RunSpec, rank: int) -> None:
        """Allow commits again, as `rank` of the new attempt."""
        self._spec = spec
        self._may_commit.set()
        if rank or self._is_part:
            # Another rank saves from now on, and only one process may write; a part is no
            # checkpoint
            self._settle()

    def close(self) -> None:
        """Wait for the write in progress. Its outcome is only logged."""
        self._may_commit.set()
        if self._thread:
            self._thread.join(CLOSE_S)
            self._no_part = "the run ended"
            self._thread.join()
            log.info("checkpoint of step %d, when the run ended: %s", self._step, self._outcome)
            self._thread = None
        if self._snapshot:
            self._snapshot.ready()


class Snapshot:
    """Host memory for a copy of weights and optimizer state, reused by every checkpoint.

    A copy takes 0.1 s for the 1.5 GB of GPT-2 124M with Adam. The first access to as much memory
    takes seconds on a virtual machine, so a thread does it in advance.
    """

    def __init__(self, tensors: Tensors) -> None:
        """Start to allocate memory for copies of `tensors`."""
        self._devices = sorted({t.device.index for t in tensors.values() if t.is_cuda})
        self._places, size = _layout(tensors)
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._problem: Exception | None = None
        self._thread = threading.Thread(target=self._allocate, args=(size,), daemon=True)
        self._thread.start()

    def _allocate(self, size: int) -> None:
        try:
            if self._devices:
                # A new thread uses device 0, perhaps another rank's
                torch.cuda.set_device(self._devices[0])
                self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
                return
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError, AttributeError):  # pages of 2 MiB make the copy a quarter faster
                memory.madvise(mmap.MADV_HUGEPAGE)
            self._memory = torch.frombuffer(memory, dtype=torch.uint8)
            ctypes.memset(self._memory.data_ptr(), 0, size)  # touches every page, without the GIL
        except Exception as error:  # raised again in `take`
            self._problem = error

    def ready(self) -> None:
        """Wait until the memory is there."""
        self._thread.join()

    def fits(self, tensors: Tensors) -> bool:
        """Whether the memory was allocated for tensors of this layout."""
        return _layout(tensors)[0] == self._places

    @torch.no_grad()
    def take(self, tensors: Tensors) -> Tensors:
        """Copy tensors that fit; the copies are valid until the next call.

        Raises CheckpointError when there was too little memory.
        """
        self.ready()
        if self._problem:
            raise CheckpointError(
                f"no host memory for a copy of weights and optimizer state ({self._problem}); use "
                "--checkpoint_mode "
                "sync, which writes while training waits"
            )
        copies: Tensors = {}
        copied: set[int] = set()
        for name, tensor in tensors.items():
            at, shape, dtype, _ = self._places[name]
            copies[name] = self._memory[at : at + tensor.nbytes].view(dtype).view(shape)
            if at not in copied:
                copies[name].copy_(tensor, non_blocking=True)
            copied.add(at)
        for device in self._devices:
            torch.cuda.synchronize(device)
        return copies


def _layout(tensors: Tensors) -> tuple[dict[tuple[str, str], Place], int]:
    """Return the place of each tensor's copy, and the total size; tied weights share a place."""
    places: dict[tuple[str, str], Place] = {}
    known: dict[Any, int] = {}
    size = 0
    for name, tensor in tensors.items():
        same = (
            (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
            if tensor.nbytes
            else name
        )
        at = known.setdefault(same, size)
        places[name] = at, tensor.shape, tensor.dtype, tensor.device
        if at == size:
            size += -(-tensor.nbytes // _ALIGN) * _ALIGN or _ALIGN
    return places, max(size, 1)


def _parts(state: StateDict) -> tuple[tuple[str, dict[str, Tensor]], ...]:
    return ("model", state.model), ("optimizer", state.optimizer)


def named_tensors(state: StateDict) -> Tensors:
    """Return weights and optimizer state by part and name."""
    return {(part, name): tensor for part, of in _parts(state) for name, tensor in of.items()}

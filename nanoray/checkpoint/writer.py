"""Save checkpoints beside training: an update waits for a copy in memory, a thread for the disk.

    loop     step ─► step ─► save ─► forward ─► backward ─► update ─► step ─► step ─► save ─► ...
    threads                    └───► copy ───────────────►┘
                                        └──► write, hash, fsync ──► rename

A sharded state is copied and written by every rank; rank 0's thread waits for the others' parts and
commits. At most one checkpoint is being written; the next one waits for it, so a slow disk slows
training down but needs no more memory. os.write and hashlib release the GIL, so steps keep their
speed. A failed write is broadcast at the next checkpoint, where the ranks communicate anyway.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanoray.checkpoint import files as checkpoint
from nanoray.checkpoint import sharded_files
from nanoray.checkpoint.run_folder import RunSpec, read_attempt
from nanoray.checkpoint.state.state_dict import StateDict
from nanoray.errors import CheckpointError
from nanoray.machine.host import available_cpus
from nanoray.parallel.mesh import Mesh

log = logging.getLogger("nanoray.rank")
TRIES = 3  # failed checkpoints in a row (a full disk, say) that end the run
CLOSE_S = 10.0  # at the end of a run, for the other ranks' parts of a checkpoint
_ALIGN = 64  # bytes, for vectorised copies
COPIERS = 4  # threads that copy at once, at most: they share the memory's speed
PIECE = 4 << 20  # elements that a thread copies at a time
Tensors = dict[tuple[str, str], Tensor]  # by part of the state and name
# The offset of a tensor's copy; the tensor's shape, dtype, device
Place = tuple[int, torch.Size, torch.dtype, torch.device]
ALONE = Mesh(0, 1, 0, torch.device("cpu"), "none", "")  # the writers of a whole state


class AttemptOver(CheckpointError):
    """This process belongs to an older attempt of the run."""


class CheckpointWriter:
    """Writes a run's checkpoints, beside training or while it waits. Rank 0 commits."""

    def __init__(
        self,
        spec: RunSpec,
        note: Callable[[str], None],
        saved: Callable[[int], None] = lambda step: None,
    ) -> None:
        """`note` prints a line for the user; `saved` is called for each step on disk.

        Only the training thread calls them.
        """
        self.committed = -1  # the newest step that this process has written to disk
        self._spec = spec
        self._note = note
        self._saved = saved
        self._beside = spec.config.checkpoint_mode == "async"
        self._snapshot: Snapshot | None = None
        self.copying = False  # weights and optimizer state must stay as they are: see finish_copy
        self._news: dict[str, float] = {}  # metrics for the next record

        # The write in progress, if any
        self._thread: threading.Thread | None = None
        self._step = -1
        self._is_part = False  # whether this rank writes a part for rank 0
        self._missing_part = ""  # why a part that rank 0 waits for will not be written

        # The last write: its seconds, or its error
        self._outcome: float | Exception = 0.0
        self._failures = 0  # in a row
        # Why the run cannot continue; broadcast at the next checkpoint
        self._fatal: str | None = None

        # Cleared while a survivor waits for its next attempt
        self._may_commit = threading.Event()
        self._may_commit.set()

    def prepare(self, state: StateDict) -> None:
        """Start to allocate memory for copies of `state`, in a thread: first access is slow."""
        if self._beside and self._spec.config.checkpoint_every:
            self._snapshot = Snapshot(named_tensors(state))

    def save(
        self, mesh: Mesh, state: StateDict | None, final: bool = False, rests: bool = False
    ) -> None:
        """Save rank 0's `state`, or every rank's part of it. (all ranks)

        With `final` it returns only when the checkpoint is on disk. rests: the caller leaves the
        state as it is until `finish_copy`. Ranks other than 0 pass a state
        if it is sharded, else None. Raises CheckpointError on all ranks when a final checkpoint
        failed, or the third one in a row.
        """
        problem = None
        if state is not None:
            writers = ALONE if state.pieces is None else mesh
            problem = self._save(writers, state, final)
        # A broadcast uses the group with the long timeout, so the other ranks may wait for rank 0's
        # disk here.
        problem = mesh.broadcast(problem)
        if problem:
            raise CheckpointError(problem)
        if self.copying and not rests:
            self.finish_copy()

    def _save(self, mesh: Mesh, state: StateDict, final: bool) -> str | None:
        """Save a state, or start to. (all ranks that write)

        Returns on rank 0 why the run cannot continue; None if it can.
        """
        # At most one write at a time: the next checkpoint waits for the previous one.
        step = state.meta["step"]
        first = mesh.rank == 0
        self._is_part = not first
        self._settle_all(mesh)

        # Rank 0 makes the folder, and the others write into it.
        sizes = mesh.gather(sum(tensor.nbytes for tensor in named_tensors(state).values()))
        draft = None
        if first:
            draft = self._begin(step, sum(sizes or ()), final)
        temp = mesh.broadcast(str(draft.temp) if draft else "")
        if not temp:
            return self._fatal  # nothing to save, or no folder
        write = partial(self._write_parts, draft, Path(temp), mesh.rank, mesh.world_size)

        # While training waits: first the others, then rank 0, which commits.
        if final or not self._beside:
            if not first:
                write(state)
            self._gather_failures(mesh)
            if first:
                write(state)
                self._handle_outcome(step, final)
            return self._fatal

        # Beside training: every rank writes a copy of its part in a thread.
        try:
            copy = self._copy(state)
        except CheckpointError as error:  # no memory for it
            self._outcome = error
            # The next checkpoint reports to rank 0 that this rank's part is missing.
            if draft:
                draft.discard()
                self._handle_outcome(step, final)
            return self._fatal
        self._step = step
        self._thread = threading.Thread(target=write, args=(copy,), name="checkpoint", daemon=True)
        self._thread.start()
        return None

    def _settle_all(self, mesh: Mesh) -> None:
        """Wait for the write in progress on every rank. (all ranks that write)

        The others first: a failure of theirs ends the wait of rank 0's thread.
        """
        if mesh.rank:
            self._settle()
        self._gather_failures(mesh)
        if mesh.rank == 0:
            self._settle()

    def _gather_failures(self, mesh: Mesh) -> None:
        """Report to rank 0 which parts were not written. (all ranks that write)"""
        own = ""
        if mesh.rank and isinstance(self._outcome, Exception):
            own = f"rank {mesh.rank}: {self._outcome}"
        failures = mesh.gather(own) or []
        if mesh.rank:
            self._outcome = 0.0
        # Without a new failure the old reason stays: the parts of a broken group are still missing.
        for failure in failures:
            if failure:
                self._missing_part = failure
                break

    def _begin(self, step: int, need: int, final: bool) -> checkpoint.Draft | None:
        """Make the folder for `need` bytes of parts; None if nothing is to be saved. (rank 0)"""
        if self._is_on_disk(step) or (self._fatal and not final):
            return None
        self._missing_part = ""
        try:
            draft = checkpoint.Draft(
                self._spec.checkpoints, step, str(self._spec.attempt), self._fence
            )
            with draft.errors():
                draft.begin(need)
            return draft
        except CheckpointError as error:
            self._outcome = error
            self._handle_outcome(step, final)
            return None

    def _write_parts(
        self, draft: checkpoint.Draft | None, temp: Path, rank: int, writers: int, state: StateDict
    ) -> None:
        """Write this rank's part, on rank 0 commit; store the outcome. Also runs in the thread."""
        with self._outcome_kept():
            if draft:
                keep = self._spec.config.keep_checkpoints
                checkpoint.save(draft, state, writers, keep, self._require_parts)
            else:
                sharded_files.write(temp, rank, state)

    def _require_parts(self) -> None:
        """Raise CheckpointError when a part that rank 0 waits for will not be written."""
        if self._missing_part:
            raise CheckpointError(
                f"not all parts of the checkpoint were written ({self._missing_part})"
            )

    def _copy(self, state: StateDict) -> StateDict:
        """Start a copy, and return it. Raises CheckpointError without memory."""
        tensors = named_tensors(state)
        # The memory is reused until the state has another layout, as after a change of world size.
        if self._snapshot is None or not self._snapshot.fits(tensors):
            self._snapshot = None  # free the old one first
            self._snapshot = Snapshot(tensors)
        copies = self._snapshot.take(tensors)
        self.copying = True
        model = {name: copies["model", name] for name in state.model}
        optimizer = {name: copies["optimizer", name] for name in state.optimizer}
        return replace(state, model=model, optimizer=optimizer)

    def finish_copy(self) -> float:
        """Wait until the newest state is copied, and return the seconds.

        Whatever changes weights or optimizer state calls this first. Forward and backward do not.
        """
        start = time.perf_counter()
        self._wait_for_copy()
        self.copying = False
        seconds = time.perf_counter() - start
        if "time/checkpoint_s" in self._news:
            self._news["time/checkpoint_s"] += seconds
        return seconds

    def _wait_for_copy(self) -> None:
        if self._snapshot:
            self._snapshot.finish()

    def _settle(self) -> None:
        """Wait for the write in progress, if any, and handle its outcome."""
        if not self._thread:
            return
        start = time.perf_counter()
        late = self.busy
        self._thread.join()
        if late:
            log.warning(
                "waited %.3f s for the checkpoint of step %d, still being written",
                time.perf_counter() - start,
                self._step,
            )
        self._thread = None
        if not self._is_part:
            self._handle_outcome(self._step)

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written at this moment."""
        return self._thread is not None and self._thread.is_alive()

    def _is_on_disk(self, step: int) -> bool:
        """Return whether this process has saved a step, and the files are still there."""
        return step == self.committed and checkpoint.path_of(self._spec.checkpoints, step).is_dir()

    @contextmanager
    def _outcome_kept(self) -> Iterator[None]:
        """Write inside, once the copy is done; keep the seconds or the error, which a thread cannot raise."""
        start = time.perf_counter()
        try:
            self._wait_for_copy()
            yield
            self._outcome = time.perf_counter() - start
        except Exception as error:  # raised again, or counted, in the training thread
            self._outcome = error

    def _fence(self) -> None:
        """Raise AttemptOver when another attempt of this run has begun without this process."""
        self._may_commit.wait()  # a survivor waits for the number of its next attempt
        attempt, started = read_attempt(self._spec.folder)
        if started != self._spec.started:
            raise AttemptOver(
                "this command is over: another one continues the run; nothing written"
            )
        if self._spec.attempt < attempt:
            raise AttemptOver(
                f"attempt {self._spec.attempt} is over: attempt {attempt} runs now; nothing written"
            )

    def _handle_outcome(self, step: int, last: bool = False) -> None:
        """Record the outcome of a write, and decide whether the run can continue. (rank 0 only)"""
        outcome = self._outcome
        if isinstance(outcome, float):
            self.committed = step
            self._failures = 0
            self._fatal = None
            self._news["time/checkpoint_write_s"] = outcome
            log.info("checkpoint of step %d is on disk, written in %.3f s", step, outcome)
            self._saved(step)
            return
        if not isinstance(outcome, CheckpointError):
            raise outcome

        # A failed checkpoint costs nothing yet: the next one may succeed.
        self._failures += 1
        if last or self._failures >= TRIES or isinstance(outcome, AttemptOver):
            self._fatal = str(outcome)
        if not last:
            effect = "which ends the run" if self._fatal else "training goes on"
            self._note(f"warning  checkpoint of step {step} skipped, {effect}: {outcome}")

    def paused(self, step: int, seconds: float) -> float:
        """Note the seconds that training waited for a checkpoint, and return them."""
        self._news["time/checkpoint_s"] = seconds
        log.info("training waited %.3f s for the checkpoint of step %d", seconds, step)
        return seconds

    def news(self) -> dict[str, float]:
        """Return the metrics of checkpoints written since the last call; warn of a failed one."""
        # Handle a finished write as soon as possible, so that `committed` is up to date.
        if self._thread and not self.busy:
            self._settle()
        news = self._news
        self._news = {}
        return news

    def forget(self, mesh: Mesh, in_parts: bool) -> None:
        """Finish the write in progress, and allow steps to be saved again. (all ranks)

        They will be repeated with other data. `in_parts`: the state is sharded; a rank that has
        joined since the newest checkpoint has no other way to know.
        """
        self._settle_all(mesh if in_parts else ALONE)
        self.committed = -1

    def hold(self) -> None:
        """Suspend commits: the group broke, and the run's next attempt may have begun."""
        self._may_commit.clear()
        self._missing_part = "the group of ranks broke"

    def go_on(self, spec: RunSpec, rank: int) -> None:
        """Allow commits again, as `rank` of the new attempt."""
        self._spec = spec
        self._may_commit.set()
        # Only one process may write. Either another rank saves from now on, or this rank's part is
        # of no use without rank 0's.
        if rank or self._is_part:
            self._settle()

    def close(self) -> None:
        """Wait for the write in progress. Its outcome is only logged."""
        # A write that waits for the next attempt must end with the run.
        self._may_commit.set()
        if self._thread:
            self._thread.join(CLOSE_S)
            self._missing_part = "the run ended"  # ends the wait for other ranks' parts
            self._thread.join()
            log.info("checkpoint of step %d, when the run ended: %s", self._step, self._outcome)
            self._thread = None
        if self._snapshot:
            self._snapshot.ready()


class Snapshot:
    """Host memory for a copy of weights and optimizer state, reused by every checkpoint.

    The first access to that memory takes longer than a copy, on a virtual machine seconds, so a
    thread does it in advance. `bench checkpoint` measures the copy, as the stall.
    """

    def __init__(self, tensors: Tensors) -> None:
        """Start to allocate memory for copies of `tensors`."""
        self._devices = sorted({t.device.index for t in tensors.values() if t.is_cuda})
        self._places, size = _layout(tensors)
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._problem: Exception | None = None
        self._copiers: ThreadPoolExecutor | None = None  # the threads of the newest copy
        self._pending: list[Future[Tensor]] = []  # its pieces
        self._thread = threading.Thread(target=self._allocate, args=(size,), daemon=True)
        self._thread.start()

    def _allocate(self, size: int) -> None:
        try:
            # Pinned memory, for copies from a GPU at full speed.
            if self._devices:
                # A new thread uses device 0, which may be another rank's.
                torch.cuda.set_device(self._devices[0])
                self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
                return
            # Anonymous memory of its own, so that madvise applies before the first access.
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            # Large pages make the copy faster.
            with suppress(OSError, AttributeError):
                memory.madvise(mmap.MADV_HUGEPAGE)
            self._memory = torch.frombuffer(memory, dtype=torch.uint8)
            # Touch every page now. ctypes releases the GIL, so training goes on.
            ctypes.memset(self._memory.data_ptr(), 0, size)
        except Exception as error:  # raised again in `take`
            self._problem = error

    def ready(self) -> None:
        """Wait until the memory is allocated."""
        self._thread.join()

    def fits(self, tensors: Tensors) -> bool:
        """Whether the memory was allocated for tensors of this layout."""
        places, _ = _layout(tensors)
        return places == self._places

    @torch.no_grad()
    def take(self, tensors: Tensors) -> Tensors:
        """Start to copy tensors that fit; the copies are valid from `finish` until the next call.

        Until then the tensors must not change. Raises CheckpointError when there was too little
        memory.
        """
        self.ready()
        if self._problem:
            raise CheckpointError(
                f"no host memory for a copy of weights and optimizer state ({self._problem}); use "
                "--checkpoint_mode sync, which writes while training waits"
            )
        copies: Tensors = {}
        copied: set[int] = set()  # offsets; tied weights share one
        pieces: list[tuple[Tensor, Tensor]] = []
        for name, tensor in tensors.items():
            offset, shape, dtype, _ = self._places[name]
            memory = self._memory[offset : offset + tensor.nbytes]
            copy = memory.view(dtype).view(shape)
            copies[name] = copy
            if offset in copied:
                continue
            copied.add(offset)
            source = tensor.detach()
            if source.is_cuda or not source.is_contiguous():
                copy.copy_(source, non_blocking=True)
                continue
            parts = zip(copy.view(-1).split(PIECE), source.view(-1).split(PIECE), strict=True)
            pieces += parts

        # Copies from a GPU are asynchronous, and training changes the weights in the next step.
        for device in self._devices:
            torch.cuda.synchronize(device)

        # In the host's memory threads copy, until `finish`: one core reads and writes at less than
        # the memory's speed. torch divides each copy among the threads of this rank.
        count = min(COPIERS, int(available_cpus()) // torch.get_num_threads())
        self._copiers = ThreadPoolExecutor(max(count, 1))
        self._pending = [self._copiers.submit(copy.copy_, source) for copy, source in pieces]
        return copies

    def finish(self) -> None:
        """Wait until everything is copied. (any thread)"""
        for piece in self._pending:
            piece.result()
        self._pending = []
        if self._copiers:
            self._copiers.shutdown()


def _layout(tensors: Tensors) -> tuple[dict[tuple[str, str], Place], int]:
    """Return the place of each tensor's copy, and the total size; tied weights share a place."""
    places: dict[tuple[str, str], Place] = {}
    offsets: dict[Any, int] = {}
    size = 0
    for name, tensor in tensors.items():
        # Tensors over the same memory are tied. Empty ones may share an address by chance.
        identity: Any = name
        if tensor.nbytes:
            # A conjugated view of a tensor lies over its memory, and has other values.
            marks = (tensor.is_conj(), tensor.is_neg())
            identity = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, marks)
        if identity not in offsets:
            offsets[identity] = size
            blocks = -(-tensor.nbytes // _ALIGN)  # rounded up
            size += max(blocks, 1) * _ALIGN
        places[name] = (offsets[identity], tensor.shape, tensor.dtype, tensor.device)
    return places, max(size, 1)


def named_tensors(state: StateDict) -> Tensors:
    """Return weights and optimizer state by part and name."""
    tensors = {("model", name): tensor for name, tensor in state.model.items()}
    for name, tensor in state.optimizer.items():
        tensors["optimizer", name] = tensor
    return tensors

"""When and how a run is saved: the training loop pays for a copy in memory, a thread of rank 0 for the disk.

    loop     step ─► step ─► copy ─► step ─► step ─► step ─► step ─► copy ─► ...
    thread                      └──► write, hash, fsync ──► rename      └──► ...

At most one checkpoint is being written; the next one waits for it, so a slow disk slows training down and piles nothing
up. Writing needs no help of the interpreter (os.write and hashlib let other threads run), so steps keep their speed.
What follows from a failure is agreed on by all ranks at the next checkpoint, which is where all of them talk anyway.
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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from nanoray import checkpoint
from nanoray.checkpoint import TrainState
from nanoray.errors import CheckpointError, TrainingDiverged
from nanoray.mesh import Mesh
from nanoray.optim import load_optimizer_tensors, optimizer_tensors
from nanoray.run import RunSpec, read_attempt

if TYPE_CHECKING:
    from nanoray.engine import RuntimeEngine

log = logging.getLogger("nanoray")
TRIES = 3  # checkpoints in a row that may fail (a full disk, say) before the run does
_ALIGN = 64  # bytes: what vectorised copies like
Tensors = dict[tuple[str, str], Tensor]  # by part of the state and name
Place = tuple[int, torch.Size, torch.dtype, torch.device]  # first byte of the copy; what is copied there


class AttemptOver(CheckpointError):
    """This process belongs to an attempt that the run has left behind."""


class Saver:
    """Writes one rank's checkpoints, beside training or while it waits. (rank 0 writes; the others hear how it went)"""

    def __init__(self, spec: RunSpec, note: Callable[[str], None]) -> None:
        """`note` says a line to the user; only the training thread calls it."""
        self.committed = -1  # the newest step that this process has on disk
        self._spec, self._note = spec, note
        self._beside = spec.config.checkpoint_mode == "async"
        self._snapshot: Snapshot | None = None
        self._thread: threading.Thread | None = None
        self._step = -1  # what the thread writes
        self._outcome: float | Exception = 0.0  # of the last write: its seconds, or why it failed
        self._failures = 0  # in a row
        self._fatal = ""  # why the run cannot go on: told at the next checkpoint, where all ranks meet
        self._seated = threading.Event()  # cleared while a survivor waits for its next attempt
        self._seated.set()
        self._news: dict[str, float] = {}

    def prepare(self, engine: RuntimeEngine) -> None:
        """Make room for copies of what `engine` holds, beside the next steps: fresh memory is slow to touch."""
        if self._beside and engine.mesh.rank == 0 and self._spec.config.checkpoint_every:
            self._snapshot = Snapshot(named_tensors(state_of(engine, [])))

    def save(self, mesh: Mesh, state: TrainState | None, final: bool = False) -> None:
        """Save `state`, which is rank 0's; `final` returns only when it is on disk. (all ranks)

        Raises CheckpointError, on all ranks, when the last checkpoint failed, or the third one in a row.
        """
        problem = self._save(state, final) if state else ""
        if problem := mesh.broadcast(problem):  # (all ranks) wait here, where patience is long
            raise CheckpointError(problem)

    def _save(self, state: TrainState, final: bool) -> str:
        """Save, or begin to; return why the run cannot go on, if so. (rank 0 only)"""
        step = state.meta["step"]
        self._settle()
        if step == self.committed:
            return ""
        if self._fatal and not final:
            return self._fatal
        if final or not self._beside:  # nothing goes on meanwhile: the tensors themselves can be written
            self._write(state)
            self._judge(step, final)
            return self._fatal
        try:
            copy = self._copy(state)
        except CheckpointError as error:
            self._outcome = error
            self._judge(step, final)
            return self._fatal
        self._step, self._thread = step, threading.Thread(target=self._write, args=(copy,), daemon=True)
        self._thread.start()
        return ""

    def _copy(self, state: TrainState) -> TrainState:
        """Return a copy that training does not change. Raises CheckpointError when memory is short."""
        tensors = named_tensors(state)
        if self._snapshot is None or not self._snapshot.fits(tensors):
            self._snapshot = None  # the old one first
            self._snapshot = Snapshot(tensors)
        copies = self._snapshot.take(tensors)
        model, optimizer = ({name: copies[part, name] for name in of} for part, of in _parts(state))
        return replace(state, model=model, optimizer=optimizer)

    def _settle(self) -> None:
        """Wait until no checkpoint is under way, and take note of how it went."""
        if not self._thread:
            return
        start, late = time.perf_counter(), self.busy
        self._thread.join()
        if late:
            seconds = time.perf_counter() - start
            log.warning("waited %.3f s for the checkpoint of step %d, still being written", seconds, self._step)
        self._thread = None
        self._judge(self._step)

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written at this moment."""
        return self._thread is not None and self._thread.is_alive()

    def _write(self, state: TrainState) -> None:
        """Write a checkpoint and keep how that went. Called in a thread, too."""
        start, spec = time.perf_counter(), self._spec
        try:
            checkpoint.save(spec.checkpoints, state, spec.config.keep_checkpoints, str(spec.attempt), self._fence)
            self._outcome = time.perf_counter() - start
        except Exception as error:  # raised again, or counted, in the training thread
            self._outcome = error

    def _fence(self) -> None:
        """Refuse to write when another attempt of this run has begun without this process."""
        self._seated.wait()  # a survivor belongs to the next attempt, and learns its number in a moment
        allowed, spec = read_attempt(self._spec.folder), self._spec
        if allowed and allowed[1] != spec.started:
            raise AttemptOver("this command is over: another one goes on with the run; nothing written")
        if allowed and spec.attempt < allowed[0]:
            raise AttemptOver(f"attempt {spec.attempt} is over: attempt {allowed[0]} runs now; nothing written")

    def _judge(self, step: int, last: bool = False) -> None:
        """Take note of how a write went, and of whether the run can go on. (rank 0 only)"""
        outcome = self._outcome
        if isinstance(outcome, float):
            self.committed, self._failures, self._fatal = step, 0, ""
            self._news["time/checkpoint_write_s"] = outcome
            log.info("checkpoint of step %d is on disk, written in %.3f s", step, outcome)
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
        """Take note of how long training waited for a checkpoint; return that."""
        self._news["time/checkpoint_s"] = seconds
        log.info("training waited %.3f s for the checkpoint of step %d", seconds, step)
        return seconds

    def news(self) -> dict[str, float]:
        """Return the metrics of what was saved since the last call, and say what failed."""
        if self._thread and not self.busy:
            self._settle()
        news, self._news = self._news, {}
        return news

    def forget(self) -> None:
        """Finish what is under way: steps will come again with other data, and must be saved again."""
        self._settle()
        self.committed = -1

    def detach(self) -> None:
        """Hold back commits: the group broke, and the run's next attempt may already have begun."""
        self._seated.clear()

    def attach(self, spec: RunSpec, rank: int) -> None:
        """Go on as a member of the new attempt."""
        self._spec = spec
        self._seated.set()
        if rank:
            self._settle()  # another rank saves from now on, and one process at a time may

    def close(self) -> None:
        """Wait for what is being written; nothing of it outlives the run. What it came to is only logged."""
        self._seated.set()
        if self._thread:
            self._thread.join()
            log.info("checkpoint of step %d, when the run ended: %s", self._step, self._outcome)
            self._thread = None
        if self._snapshot:
            self._snapshot.ready()


class Snapshot:
    """Host memory for a copy of everything that a checkpoint holds, used again and again.

    A copy takes 0.1 s for the 1.5 GB of GPT-2 124M with Adam; touching as much memory for the first time takes seconds
    on a virtual machine, so a thread does that ahead.
    """

    def __init__(self, tensors: Tensors) -> None:
        """Begin to allocate memory for such tensors."""
        self._devices = sorted({t.device.index for t in tensors.values() if t.is_cuda})
        self._places, size = _layout(tensors)
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._problem: Exception | None = None
        self._thread = threading.Thread(target=self._allocate, args=(size,), daemon=True)
        self._thread.start()

    def _allocate(self, size: int) -> None:
        try:
            if self._devices:
                torch.cuda.set_device(self._devices[0])  # a new thread's is device 0, perhaps another rank's
                self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
                return
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError, AttributeError):  # pages of 2 MiB make the copy a quarter faster
                memory.madvise(mmap.MADV_HUGEPAGE)
            self._memory = torch.frombuffer(memory, dtype=torch.uint8)
            ctypes.memset(self._memory.data_ptr(), 0, size)  # touches every page, and lets other threads run
        except Exception as error:  # raised again by who takes the copy
            self._problem = error

    def ready(self) -> None:
        """Wait until the memory is there."""
        self._thread.join()

    def fits(self, tensors: Tensors) -> bool:
        """Whether it was made for tensors like these."""
        return _layout(tensors)[0] == self._places

    @torch.no_grad()
    def take(self, tensors: Tensors) -> Tensors:
        """Copy tensors for which this `fits`; the copies are good until the next call.

        Raises CheckpointError when there was too little memory.
        """
        self.ready()
        if self._problem:
            raise CheckpointError(
                f"no host memory for a copy of weights and optimizer state ({self._problem}); use --checkpoint_mode "
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
    """Return where each tensor's copy goes, and the size of all; tied weights share a place."""
    places: dict[tuple[str, str], Place] = {}
    known: dict[Any, int] = {}
    size = 0
    for name, tensor in tensors.items():
        same = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if tensor.nbytes else name
        at = known.setdefault(same, size)
        places[name] = at, tensor.shape, tensor.dtype, tensor.device
        if at == size:
            size += -(-tensor.nbytes // _ALIGN) * _ALIGN or _ALIGN
    return places, max(size, 1)


def _parts(state: TrainState) -> tuple[tuple[str, dict[str, Tensor]], ...]:
    return ("model", state.model), ("optimizer", state.optimizer)


def named_tensors(state: TrainState) -> Tensors:
    """Return weights and optimizer state by part and name."""
    return {(part, name): tensor for part, of in _parts(state) for name, tensor in of.items()}


def capture(engine: RuntimeEngine) -> TrainState | None:
    """Return what a checkpoint of this step holds, on rank 0; the tensors are those that training goes on to change.

    (all ranks) Weights that are not finite are never saved: all ranks raise TrainingDiverged.
    """
    rng = engine.mesh.gather(engine._rng_state())
    if not torch.isfinite(get_total_norm(engine.params)):
        raise TrainingDiverged(
            f"after step {engine.step} the weights are not finite; lower lr, or set grad_clip. The last checkpoint "
            "before it is good"
        )
    return None if rng is None else state_of(engine, rng)


def state_of(engine: RuntimeEngine, rng: list[dict[str, Tensor]]) -> TrainState:
    """Return the state of a run: one rank's memory, and the random state of all."""
    return TrainState(
        model=engine.gpt.state_dict(),
        optimizer=optimizer_tensors(engine.optimizer, engine.gpt),
        rng=rng,
        scaler=engine.scaler.state_dict(),
        meta={
            "step": engine.step,
            "samples_seen": engine.samples,
            "world_size": engine.mesh.world_size,
            "attempt": engine.spec.attempt,
            "val_loss": engine.val_loss if engine._evaluated_step == engine.step else None,
            "best_val_loss": engine.best_val_loss,
            "model_shape": engine.gpt.shape.to_dict(),
            "config": engine.cfg.model_dump(),
            "dataset": engine.spec.dataset.to_dict(),
        },
    )


def restore(engine: RuntimeEngine) -> None:
    """Load the checkpoint that spec.resume names, if any. (all ranks)"""
    path = engine.spec.resume
    if not path:
        return
    state = checkpoint.load(Path(path))
    checkpoint.check_shape(state, engine.gpt.shape.to_dict(), path)
    engine.gpt.load_state_dict(state.model)
    load_optimizer_tensors(engine.optimizer, engine.gpt, state.optimizer)
    engine.scaler.load_state_dict(state.scaler)
    meta = state.meta
    engine.step, engine.samples = meta["step"], meta["samples_seen"]
    engine.val_loss, engine.best_val_loss = meta["val_loss"], meta["best_val_loss"]
    engine._saved_step, engine._first_step = engine.step, engine.step + 1
    engine.note(f"resume  from step {engine.step} of {path}")
    if meta["world_size"] == engine.mesh.world_size:
        engine._set_rng_state(state.rng[engine.mesh.rank])
    else:
        engine.note(
            f"resume  written by {meta['world_size']} ranks, now {engine.mesh.world_size}: same batches, but sums in "
            "another order and new dropout masks, so losses agree closely and not bit for bit"
        )
    if meta["dataset"]["tokens_sha256"] != engine.spec.dataset.tokens_sha256:
        engine.note(f"resume  the dataset is another one now ({meta['dataset']['name']} then)")

"""THE LOOP, top to bottom, without Ray: it runs the same in one process, under torchrun, and in a Ray actor.

Whatever changes weights, gradients, schedule or what a resume would see stands inline in `fit`. Callbacks only observe.
Blocks that talk to the other ranks say "(all ranks)".
"""

from __future__ import annotations

import logging
import math
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from nanoray.callbacks import Callback, now
from nanoray.config import Batch, batch_for
from nanoray.data import TokenData
from nanoray.errors import TrainingDiverged
from nanoray.faults import Fault, ProgressStamp, faults_of
from nanoray.guards import Guards
from nanoray.mesh import REGROUP, STOP, Mesh
from nanoray.metrics import mfu_percent
from nanoray.model import GPT, flops_per_token
from nanoray.optim import lr_at
from nanoray.precision import LossScaler, autocast
from nanoray.run import RunSpec
from nanoray.saving import Saver, capture, restore
from nanoray.trace import CommTrace

log = logging.getLogger("nanoray")


class Regroup(Exception):
    """All ranks leave their groups after the same step: another number of ranks goes on."""


class RuntimeEngine:
    """One rank's share of a training run."""

    def __init__(
        self,
        spec: RunSpec,
        batch: Batch,
        mesh: Mesh,
        gpt: GPT,
        optimizer: torch.optim.Optimizer,
        data: TokenData,
        wish: Callable[[], int],
    ) -> None:
        """Take the parts that `train` built. It then sets `model` to the GPT's wrapper, and on rank 0 `callbacks`."""
        self.spec, self.cfg, self.batch, self.mesh = spec, spec.config, batch, mesh
        self.gpt, self.optimizer, self.data = gpt, optimizer, data
        self.model: nn.Module = gpt  # or its DDP wrapper
        self.callbacks: list[Callback] = []
        self.params = [p for p in self.gpt.parameters() if p.requires_grad]
        self.scaler = LossScaler(mesh.device, enabled=self.cfg.precision == "fp16")
        self.wish = wish  # GO_ON, REGROUP or STOP: what this rank wants to do after the step
        self.peak_flops: float | None = None  # of all ranks together; unknown device: no MFU
        self.step = 0  # completed optimizer steps
        self._current = 0  # the step being computed, or just completed: where faults and stamps are
        self.samples = 0  # sequences consumed by them: the one integer that resumes the data
        self.val_loss: float | None = None
        self.best_val_loss: float | None = None
        self._faults = self._planned_faults()
        self._stamp = ProgressStamp(spec.stamp(mesh.seat))
        self._saved_step = self._evaluated_step = self._emitted_step = -1
        self._first_step = 1
        self._pending: dict[str, Any] | None = None  # the record of a completed step that is not reported yet
        self.live = False  # whether this rank's memory holds the run's state
        self.last_record: dict[str, Any] = {}  # every rank has it: rank 0 may be lost before it writes it down
        self._train_loss: float | None = None
        self._first_step_s: float | None = None
        self._total_s, self._total_steps = 0.0, 0
        self.saver = Saver(spec, self.note)
        self.trace: CommTrace | None = None  # --comm_trace: measures the collectives of some steps
        self.guards = Guards(self)

    def fit(self) -> dict[str, Any]:
        """Train until max_steps, stop_at, or until any rank is asked to stop. (all ranks)

        Returns the outcome as plain data. Raises TrainingDiverged when the loss stops being finite, StateDiverged when
        the ranks' weights do not agree, and whatever a process group raises when a peer dies.
        """
        cfg, batch, mesh, trace, device = self.cfg, self.batch, self.mesh, self.trace, self.mesh.device
        self._enter("init")
        self._warm_up()
        if not self.live:
            restore(self)
        self.live = True
        if self._pending:  # a step was done when the group broke, and what follows a step was not
            self._finish_step()
        last = min(cfg.max_steps, cfg.stop_at or cfg.max_steps)
        self._stamp.base = self.step
        batches = self._batches()
        x, y = next(batches)
        stopping = False
        window_start, window_steps, data_s = time.perf_counter(), 0, 0.0

        while self.step < last and not stopping:
            # (all ranks) Does anybody want to stop? Asked now, answered when the step is done: compute hides it.
            self._current = self.step + 1
            model = trace.begin(self._current, self.model) if trace else self.model
            vote = mesh.vote(self.wish())
            lr = lr_at(self.step, cfg)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.seed_dropout(self.step)

            # Forward and backward over the micro batches; only the last backward talks.
            loss_sum = torch.zeros((), device=device)
            for micro in range(batch.accum):
                sync = micro == batch.accum - 1
                with nullcontext() if sync or mesh.world_size == 1 else model.no_sync():  # type: ignore[operator]
                    self._enter("forward")
                    with autocast(device.type, cfg.precision):
                        loss = model(x, y)  # mean over (B, T)
                    self._enter("data")
                    data_start = time.perf_counter()
                    x, y = next(batches)  # the next micro batch, while a GPU still works on this one
                    data_s += time.perf_counter() - data_start
                    self._enter("backward")
                    self.scaler.scale(loss / batch.accum).backward()  # (all ranks) all-reduce of gradients, if sync
                loss_sum += loss.detach()

            # Clip, update, forget the gradients. With fp16 all ranks skip the same steps. (all ranks) On logged steps
            # the loss is averaged first: until the update nothing has changed, and a step that breaks is done again.
            # A norm that is not finite never reaches the weights: the device leaves that update out.
            self._enter("optimizer")
            grads = [p.grad for p in self.params if p.grad is not None]
            self.scaler.unscale(grads)
            logged = self._is_logged(self.step + 1, last)
            own_loss = loss_sum / batch.accum
            if logged:
                loss_sum = mesh.all_reduce_mean(own_loss.clone(), "loss")
            grad_norm = get_total_norm(grads)
            leave_out = self.guards.judge(grad_norm, own_loss, loss_sum if logged else None)
            if self.guards.react(look=logged):  # (all ranks) stops, or skips; or rolls back: on with the next data
                stopping = vote.result() == STOP
                window_start, window_steps, data_s = time.perf_counter(), 0, 0.0
                if trace:
                    trace.end(partial(self._unsynced, x, y))
                continue
            if cfg.grad_clip:
                clip_grads_with_norm_(self.params, cfg.grad_clip, grad_norm)
            if self.scaler.enabled:
                mesh.all_reduce(self.scaler.judge(grad_norm), "overflow", op="max")  # (all ranks) one float
            self.scaler.step(self.optimizer, leave_out)
            self.optimizer.zero_grad(set_to_none=True)
            self.step += 1
            self.samples += batch.global_size
            window_steps += 1

            # (all ranks) On logged steps: wait for the device, evaluate, record, checkpoint.
            if logged:
                self._enter("log")
                record = self._pending = self._record(loss_sum.item(), lr, grad_norm.item())
                if trace:
                    record |= trace.read(self.note)  # (all ranks) the steps traced before this one
                window_end = time.perf_counter()
                elapsed, window_start = window_end - window_start, window_end
                if self._first_step_s is None:
                    self._first_step_s = time.time() - self.spec.started
                    self.saver.prepare(self)
                else:
                    record |= self._speed(elapsed, window_steps, data_s)
                window_steps, data_s = 0, 0.0
                window_start += self._finish_step()  # a pause is no part of a step; callbacks are
            self.guards.compare(self._hash_due())  # (all ranks) do all hold the same weights? Heals a minority
            order = vote.result()
            stopping = order == STOP
            if trace:
                window_start += trace.end(partial(self._unsynced, x, y))
            if order == REGROUP:
                raise Regroup

        self.guards.react(look=True)  # a stop between two logged steps
        if self.step >= self._first_step:  # else nothing was done, and what was resumed from is there
            self.guards.compare(due=True)
            self._save(final=True)
        self._enter("done")
        return {
            "exit_reason": self._exit_reason(stopping),
            "step": self.step,
            "train_loss": self._train_loss,
            "val_loss": self.val_loss,
            "tok_per_sec": self._tok_per_step * self._total_steps / self._total_s if self._total_s else None,
            "step_ms": 1e3 * self._total_s / self._total_steps if self._total_steps else None,
            "first_step_s": self._first_step_s,
            "world_size": mesh.world_size,
            "backend": mesh.backend,
            "backend_reason": mesh.backend_reason,
            "device": str(device),
            "precision": cfg.precision,
            "resumed_from": self.spec.resume or None,
            "comm": trace.finish(self.note) if trace else None,
            "torch": str(torch.__version__),  # its own class would make the driver import torch to read it
        }

    # What the loop calls, in the order in which it does.

    def _enter(self, phase: str) -> None:
        """Stamp where this rank is, and let a planned fault fire. Under a microsecond without faults."""
        self._stamp.set(self._current, phase)
        if self.trace:
            self.trace.phase(phase)
        for fault in self._faults[:]:
            if fault.step == self._current and fault.phase == phase:
                self._faults.remove(fault)
                log.warning("fault plan fires: %s", fault)
                fault.fire(self.spec.folder / "faults.jsonl", self.gpt)

    def _planned_faults(self) -> list[Fault]:
        record, spec = self.spec.folder / "faults.jsonl", self.spec
        return faults_of(self.cfg.faults, self.mesh.seat, spec.attempt, record, spec.started)

    def _warm_up(self) -> None:
        """Run one forward and backward whose result is thrown away. (all ranks)

        DDP regroups its buckets after the first backward, which changes the order of sums. With the regrouping behind
        it, every step of a fresh and of a resumed run sums in the same order: that is what makes resume bit-exact at 3
        and more ranks. It also finds a lack of memory, and compiles, before the first step.
        """
        rng = self._rng_state()
        x, y = self.data.train_batch(0, self.batch.micro)
        self._backward(self.model, x, y)
        self.optimizer.zero_grad(set_to_none=True)
        if self.trace:  # the same for what traced steps use
            for _ in range(2):  # DDP regroups at the start of the second
                self._backward(self.trace.twin, x, y)
                self.optimizer.zero_grad(set_to_none=True)
            self._unsynced(x, y, nullcontext())
            self.trace.prepare()
        self._set_rng_state(rng)

    def _backward(self, model: nn.Module, x: Tensor, y: Tensor) -> None:
        """Run a forward and backward whose result is thrown away."""
        with autocast(self.mesh.device.type, self.cfg.precision):
            loss = model(x, y)
        self.scaler.scale(loss).backward()

    def _unsynced(self, x: Tensor, y: Tensor, timed: AbstractContextManager[None]) -> None:
        """Run a forward and backward that do not communicate, to compare a traced step with; it leaves no trace."""
        rng = self._rng_state()
        with self.model.no_sync():  # type: ignore[operator]
            if self.batch.accum > 1:
                self._backward(self.model, x, y)  # a step's last backward adds to gradients that are there
            with timed:
                self._backward(self.model, x, y)
        self.optimizer.zero_grad(set_to_none=True)
        self._set_rng_state(rng)

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's micro batches (B, T) from the cursor on; the sample order knows nothing of ranks."""
        samples = self.samples
        while True:
            for micro in range(self.batch.accum):
                yield self.micro_batch(samples, micro)
            samples += self.batch.global_size

    def micro_batch(self, samples: int, micro: int) -> tuple[Tensor, Tensor]:
        """Return this rank's micro batch (B, T), targets too, of the step whose first sample is `samples`."""
        size, _, dp = self.batch
        return self.data.train_batch(samples + (micro * dp + self.mesh.rank) * size, size)

    def seed_dropout(self, step: int) -> None:
        """Let the masks of the step after `step` follow from (seed, step, rank): whoever computes it draws the same."""
        if self.cfg.dropout:
            torch.manual_seed(step_seed(self.cfg.seed, step, self.mesh.rank))

    def _is_logged(self, step: int, last: int) -> bool:
        """Whether step ends in a record: every log_every, the first, the last, and where something else is due."""
        due = (self.cfg.log_every, self.cfg.eval_every, self.cfg.checkpoint_every)
        return step == last or self._is_first(step) or any(every and step % every == 0 for every in due)

    def _is_first(self, step: int) -> bool:
        return step == self._first_step

    def _evaluation_due(self) -> bool:
        every = self.cfg.eval_every
        return bool(every) and (self.step % every == 0 or self.step == self.cfg.max_steps)

    def _hash_due(self) -> bool:
        return bool(self.cfg.hash_every) and self.step % self.cfg.hash_every == 0

    def _checkpoint_due(self) -> bool:
        return bool(self.cfg.checkpoint_every) and self.step % self.cfg.checkpoint_every == 0

    @property
    def _tok_per_step(self) -> int:
        return self.batch.global_size * self.cfg.block_size

    def _record(self, loss: float, lr: float, grad_norm: float) -> dict[str, Any]:
        """Build the record of this step; a skipped one has no loss. Raises TrainingDiverged for an exhausted scale."""
        measured: dict[str, Any] = {}
        if self.scaler.enabled:
            measured["train/loss_scale"], measured["train/skipped_steps"] = self.scaler.check(self.step)
        if math.isfinite(loss):
            self._train_loss = measured["train/loss"] = loss
        if math.isfinite(grad_norm) or self.scaler.enabled:
            measured["train/grad_norm"] = grad_norm if math.isfinite(grad_norm) else 0.0
        peak = torch.cuda.max_memory_allocated() if self.mesh.device.type == "cuda" else _peak_resident_bytes()
        return {
            "step": self.step,
            "attempt": self.spec.attempt,
            "fault/restarts": self.spec.attempt,
            "time": now(),
            "train/lr": lr,
            "train/tokens": self.samples * self.cfg.block_size,
            "mem/peak_gib": peak / 2**30,
            **self.guards.metrics(),
            **measured,
        }

    def _finish_step(self) -> float:
        """Evaluate, report and save as the completed step asks; return the seconds of it that are a pause. (all ranks)

        It can be cut off anywhere and called again: nothing is reported twice, and nothing is left out.
        """
        record, pause_s = self._pending or {}, 0.0
        if self._evaluation_due() and self._evaluated_step != self.step:
            record |= self._evaluate()
            pause_s += record["time/eval_s"]
        if self._emitted_step != self.step:
            self._emit(record)
            self._emitted_step = self.step
        if self._checkpoint_due() and self._saved_step != self.step:
            self.guards.compare(due=True)  # (all ranks) no checkpoint holds a state on which ranks disagree
            pause_s += self._save()
        self._pending = None
        return pause_s

    def _speed(self, elapsed_s: float, steps: int, data_s: float) -> dict[str, float]:
        self._total_s, self._total_steps = self._total_s + elapsed_s, self._total_steps + steps
        tok_per_sec = self._tok_per_step * steps / elapsed_s
        speed = {
            "time/step_ms": 1e3 * elapsed_s / steps,
            "time/data_ms": 1e3 * data_s / steps,
            "perf/tok_per_sec": tok_per_sec,
        }
        if self.peak_flops:
            speed["perf/mfu"] = mfu_percent(tok_per_sec, flops_per_token(self.gpt.shape), self.peak_flops)
        return speed | self.saver.news()

    @torch.no_grad()
    def _evaluate(self) -> dict[str, float]:
        """Return the mean loss over the same validation windows at every world size. (all ranks)"""
        self._enter("eval")
        start = time.perf_counter()
        windows = self.data.val_windows(self.cfg.eval_samples)[self.mesh.rank :: self.mesh.world_size]
        total = torch.zeros(2, dtype=torch.float64 if self.mesh.device.type == "cpu" else torch.float32)
        total = total.to(self.mesh.device)  # sum of losses, number of windows
        self.gpt.eval()
        for first in range(0, len(windows), self.batch.micro):
            self._stamp.set(self._current, "eval")  # a long evaluation is progress
            starts = windows[first : first + self.batch.micro]
            x, y = self.data.val_batch(starts)
            with autocast(self.mesh.device.type, self.cfg.precision):
                loss = self.gpt(x, y)
            total += torch.stack([loss * len(starts), torch.full_like(loss, len(starts))])
        self.gpt.train()
        loss_sum, count = self.mesh.all_reduce(total, "eval").tolist()
        self.val_loss, self._evaluated_step = loss_sum / count, self.step
        if not math.isfinite(self.val_loss):
            raise TrainingDiverged(f"at step {self.step} the validation loss is {self.val_loss}; lower lr")
        self.best_val_loss = min(self.val_loss, self.best_val_loss or math.inf)
        return {"val/loss": self.val_loss, "time/eval_s": time.perf_counter() - start}

    def catch_up(self, written: int) -> None:
        """Give observers the newest record, when whoever had to was lost before it did. (rank 0 only)

        `written` is the step of the newest record that they have.
        """
        step = self.last_record.get("step", -1)
        if written < step <= self.reported_step:
            self._emit(self.last_record)
            self._emitted_step = step

    def _emit(self, record: dict[str, Any]) -> None:
        self.last_record = record
        for callback in self.callbacks:
            try:
                callback.on_record(record)
            except OSError as error:  # a full disk costs what an observer would have written, and not the run
                log.warning("%s did not take the record of step %d: %s", type(callback).__name__, self.step, error)

    def note(self, text: str) -> None:
        """Say one line to whoever watches. (rank 0 only; elsewhere it only goes to the rank's log)"""
        log.info(text)
        for callback in self.callbacks:
            callback.on_note(text)

    def _exit_reason(self, stopping: bool) -> str:
        if self.step >= self.cfg.max_steps:
            return "finished"
        return "stopped" if stopping else "stop_at"

    def _save(self, final: bool = False) -> float:
        """Save a checkpoint of this step; return the seconds that training waited. (all ranks)

        With checkpoint_mode async it may be on disk later; with `final` it is when this returns. A checkpoint that
        cannot be written (a full disk) costs a warning; the third failure in a row, or a failed last one, ends the run.
        """
        self._enter("checkpoint")
        start = time.perf_counter()
        self.saver.save(self.mesh, capture(self), final)
        self._saved_step = self.step  # taken, and perhaps not on disk yet: the last one makes sure
        return self.saver.paused(self.step, time.perf_counter() - start)

    # A rank was lost: the others keep what they have, and a new one takes it from their memory.

    def detach(self) -> None:
        """Let go of the wrapper and the groups that broke; weights, optimizer and cursor stay as they are."""
        self.optimizer.zero_grad(set_to_none=True)
        self.trace = None
        self.model = self.gpt
        self.saver.detach()

    def attach(self, spec: RunSpec, mesh: Mesh) -> None:
        """Take the new groups and the new attempt; the global batch stays, however many ranks share it."""
        if self.peak_flops:
            self.peak_flops *= mesh.world_size / self.mesh.world_size
        self.spec, self.mesh = spec, mesh
        self.saver.attach(spec, mesh.rank)
        self.batch = batch_for(self.cfg, mesh.seats, mesh.world_size) or self.batch
        self._faults = self._planned_faults()

    @property
    def reported_step(self) -> int:
        """The newest step whose record is out: what stands after it in metrics.jsonl will be written again."""
        return self.step - 1 if self._pending and self._emitted_step != self.step else self.step

    def _rng_state(self) -> dict[str, Tensor]:
        state = {"cpu": torch.get_rng_state()}
        if self.mesh.device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self.mesh.device)
        return state

    def _set_rng_state(self, state: dict[str, Tensor]) -> None:
        torch.set_rng_state(state["cpu"].clone())  # a view into a checkpoint's buffer is not aligned as it must be
        if "cuda" in state and self.mesh.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda"].clone(), self.mesh.device)


def step_seed(seed: int, step: int, rank: int) -> int:
    """Return the seed of dropout in one step on one rank; a resume or another process on that rank draws alike."""
    return (seed * 1_000_003 + step * 8_191 + rank * 131_071 + 1) % 2**63


def _peak_resident_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024

"""THE LOOP, top to bottom, without Ray: it runs the same in one process, under torchrun, and in a Ray actor.

All that changes weights, gradients, the schedule or the resumed state is inline in `fit`. Callbacks only observe.
Blocks that communicate are marked "(all ranks)". An engine belongs to one group of ranks: when a rank is lost, the
next group gets a new engine around the same TrainState (elastic.py).
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from nanoray.checkpoint import files
from nanoray.checkpoint.find import check_shape, newest_valid
from nanoray.checkpoint.writer import CheckpointWriter
from nanoray.data.tokens import MicroBatches
from nanoray.errors import TrainingDiverged
from nanoray.mesh.mesh import Mesh
from nanoray.mesh.rendezvous import Order
from nanoray.parallel.plan import Plan
from nanoray.run import RunSpec
from nanoray.state import StateDict, TrainState, rng_state, set_rng_state
from nanoray.trace.log import CommTrace
from nanoray.train import replicas
from nanoray.train.guards import BadStep, Guards
from nanoray.train.observers import Observers, now
from nanoray.train.optim import lr_at, set_lr
from nanoray.train.precision import LossScaler
from nanoray.train.replay import Finding, describe, replay
from nanoray.train.throughput import Throughput


class Regroup(Exception):
    """All ranks left the loop after the same step, to continue with another number of ranks."""


@dataclass(frozen=True)
class Workload:
    """What the loop needs to know about a model and its data. The recipe fills it in."""

    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]  # (model, inputs, targets) -> mean loss, in the run's precision
    tokens_per_sample: int
    flops_per_token: float | None
    peak_flops: float | None  # of all ranks together; None for an unknown device
    meta: dict[str, Any]  # for checkpoints: model_shape, dataset


@dataclass
class RuntimeEngine:
    """One rank's share of a training run, in one group of ranks."""

    spec: RunSpec
    mesh: Mesh
    state: TrainState
    par: Plan
    batches: MicroBatches
    guards: Guards
    scaler: LossScaler
    observers: Observers
    writer: CheckpointWriter
    workload: Workload
    wanted: Callable[[], Order]  # the order that this rank votes for
    listeners: Sequence[Callable[[int, str], None]] = ()  # called with (step, phase) when a phase begins
    trace: CommTrace | None = None  # measures the collectives of some steps
    regrouped: bool = False  # the group continues from the memory of one of its ranks

    def __post_init__(self) -> None:
        self.cfg, self.batch, self.note = self.spec.config, self.batches.batch, self.observers.note
        w = self.workload
        self.speed = Throughput(self.batch.global_size * w.tokens_per_sample, w.flops_per_token, w.peak_flops)

    def fit(self) -> dict[str, Any]:
        """Train until max_steps, stop_at, or a stop request on any rank. (all ranks)

        Returns the outcome as plain data. Raises TrainingDiverged when the loss stops being finite, StateDiverged when
        the ranks' weights differ, Regroup when the driver orders another group, and the process group's error when a
        peer dies.
        """
        cfg, mesh, par, s, trace = self.cfg, self.mesh, self.par, self.state, self.trace
        self.phase("init")
        self._warm_up()
        self.finish_step()  # the last group may have broken between a step's update and this call
        last = min(cfg.max_steps, cfg.stop_at or cfg.max_steps)
        self.speed.restart(self.batches.seconds)
        order = Order.GO_ON
        if self.regrouped:  # (all ranks) a group that has met only to save does no step
            order = mesh.start_vote(self.wanted()).result()

        while s.step < last and order is Order.GO_ON:
            # (all ranks) Start a vote on stopping. It runs beside the step, and is read when the step is done.
            s.session.current = s.step + 1
            par.traced = trace.begin(s.step + 1) if trace else False
            vote = mesh.start_vote(self.wanted())
            set_lr(s.optimizer, lr := lr_at(s.step, cfg))
            self.seed_dropout(s.step)

            # Forward and backward over the micro batches. (all ranks) The last backward averages the gradients.
            own_loss = par.forward_backward(self.batches.step(s.samples), self.phase)

            # (all ranks) On logged steps the loss is averaged. Nothing changes before the update, so an interrupted
            # step can be repeated. An update is left out when the norm is not finite.
            self.phase("optimizer")
            self.scaler.unscale(par.gradients)
            logged = self.is_logged(s.step + 1, last)
            mean_loss = mesh.all_reduce_mean(own_loss.clone(), "loss") if logged else None
            norm = par.grad_norm()
            if self.scaler.enabled:  # (all ranks) two flags: gradients that overflow, losses that are not finite
                mesh.all_reduce(self.scaler.look(norm, own_loss), "overflow", op="max")
            verdict = self.guards.check(s.step + 1, norm, own_loss, mean_loss, logged, self.explain, s.samples)
            self._warn(verdict.warning)
            if verdict.roll_back:  # (all ranks) load a checkpoint and continue with the data after this step
                self._roll_back(verdict.roll_back)
                order = vote.result()
                self.speed.restart(self.batches.seconds)
                self._end_trace()
                continue

            # Clip, update, advance. With fp16 all ranks skip the same steps.
            if cfg.grad_clip:
                par.clip(cfg.grad_clip, norm)
            self.scaler.step(s.optimizer, verdict.leave_out)
            s.optimizer.zero_grad(set_to_none=True)
            s.advance(self.batch.global_size)
            self.speed.step()

            # (all ranks) On logged steps: wait for the device, record, evaluate, save. Then compare the replicas.
            if mean_loss is not None:
                self.phase("log")
                self._record(mean_loss.item(), lr, norm.item())
            self.finish_step()
            order = vote.result()
            self._end_trace()

        if order is Order.REGROUP:
            raise Regroup
        verdict = self.guards.decide(True, self.explain, s.samples - self.batch.global_size)
        self._warn(verdict.warning)
        if verdict.roll_back:
            self._roll_back(verdict.roll_back)
        if s.step > s.session.begun:  # else no step was done, and the resumed checkpoint is still there
            self._compare()
            self._save(final=True)
        self.phase("done")
        return self._outcome("stopped" if order is Order.STOP else "stop_at")

    # The methods that the loop calls, in that order.

    def phase(self, name: str) -> None:
        """Announce a phase to the listeners: progress file, tracer, planned faults."""
        for listener in self.listeners:
            listener(self.state.session.current, name)

    def _warm_up(self) -> None:
        rng = rng_state(self.mesh.device)
        self.par.warm_up(*self.batches.get(0, 0))
        if self.trace:
            self.trace.prepare()
        set_rng_state(rng, self.mesh.device)

    def seed_dropout(self, step: int) -> None:
        """Seed the dropout of the step after `step` from (seed, step, rank): every process draws the same masks."""
        if self.cfg.dropout:
            torch.manual_seed(step_seed(self.cfg.seed, step, self.mesh.rank))

    def is_logged(self, step: int, last: int) -> bool:
        """Whether a step is recorded: the regular ones, and the first and last of this command."""
        return step == last or step == self.state.session.begun + 1 or self._is_regular(step)

    def _is_regular(self, step: int) -> bool:
        due = (self.cfg.log_every, self.cfg.eval_every, self.cfg.checkpoint_every)
        return any(every and step % every == 0 for every in due)

    def explain(self, bad: BadStep) -> str:
        """Repeat a bad step with hooks, and describe what all ranks found. (all ranks)"""
        s, size = self.state, self.batch.global_size
        self._compare(again=True)  # a flipped exponent bit makes infinities, too; this finds and heals it
        start = s.samples - (s.step - bad.step + 1) * size  # the step's first sample
        rng = rng_state(self.mesh.device)
        self.seed_dropout(bad.step - 1)
        layer, micro = replay(s.model, self.batches, start, self.workload.loss)
        set_rng_state(rng, self.mesh.device)
        exact = self.cfg.on_nan != "skip" or bad.step > s.step
        step = (
            f"at step {bad.step} the loss is {{loss:.4g}} and the gradient norm {bad.norm:.4g} "
            f"(lr {lr_at(bad.step - 1, self.cfg):.3g}, samples {start} to {start + size - 1}); repeated"
            + ("" if exact else f" with the weights of step {s.step}")
        )
        return describe(self.mesh, step, Finding(bad.loss, layer, self.batches.describe(start, micro)))

    def _warn(self, text: str) -> None:
        if text:
            self.note(f"warning  {text}")

    def _roll_back(self, why: str) -> None:
        """Load the newest valid checkpoint and continue with the data after the bad step. (all ranks)"""
        s, path = self.state, ""
        self.writer.forget()
        if self.mesh.rank == 0:
            newest, _ = newest_valid(self.spec.checkpoints)
            path = str(newest.path) if newest else self.spec.resume  # or the checkpoint that the run started from
        path = self.mesh.broadcast(path)
        self.guards.rolled_back(path, why)
        self.note(f"warning  {why}. Rolling back to {path} and continuing with the data after it")
        saved = read_checkpoint(path, self.spec, self.mesh, self.workload.meta["model_shape"], self.note)
        s.rewind(saved, s.samples + self.batch.global_size)
        s.optimizer.zero_grad(set_to_none=True)
        self.observers.rewind(s.step)

    def _record(self, loss: float, lr: float, grad_norm: float) -> None:
        """Begin the record of this step. Raises TrainingDiverged when the fp16 loss scale is exhausted."""
        s, device = self.state, self.mesh.device
        measured: dict[str, Any] = {}
        if self.scaler.enabled:
            measured["train/loss_scale"], measured["train/skipped_steps"] = self.scaler.read(s.step)
            self._warn(self.guards.watch_overflows(s.step, measured["train/skipped_steps"]))
        if math.isfinite(loss):
            s.see_loss(loss, smooth=self._is_regular(s.step))
            measured["train/loss"] = loss
        if s.scalars.loss_ema is not None:
            measured["train/loss_ema"] = s.scalars.loss_ema
        if math.isfinite(grad_norm) or self.scaler.enabled:
            measured["train/grad_norm"] = grad_norm if math.isfinite(grad_norm) else 0.0
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else _peak_resident_bytes()
        record = s.session.record = {
            "step": s.step,
            "attempt": self.spec.attempt,
            "fault/restarts": self.spec.attempt,
            "time": now(),
            "train/lr": lr,
            "train/tokens": s.samples * self.workload.tokens_per_sample,
            "mem/peak_gib": peak / 2**30,
            **self.guards.metrics(),
            **measured,
        }
        if self.trace:
            record |= self.trace.read(self.note)  # (all ranks) the steps traced before this one
        first = s.session.first_step_s is None
        record |= self.speed.window(s.scalars, self.batches.seconds, counted=not first)
        if first:
            s.session.first_step_s = time.time() - self.spec.started
            if self.mesh.rank == 0:
                self.writer.prepare(s.pack())
        else:
            record |= self.writer.news()

    def finish_step(self) -> None:
        """Evaluate, report, save and compare where the newest step is due for it. (all ranks)

        It can be interrupted anywhere and called again: nothing is done twice and nothing is skipped.
        """
        s = self.state  # its session may be another object after a comparison that healed this rank
        if (record := s.session.record) is not None:
            if self._evaluation_due() and s.session.evaluated != s.step:
                record |= self._evaluate()
                self.speed.pause(record["time/eval_s"])
            if s.session.reported != s.step:
                self.report(record)
            if self._due(self.cfg.checkpoint_every) and s.session.saved != s.step:
                self._compare()  # (all ranks) no checkpoint holds a state on which ranks disagree
                self.speed.pause(self._save())
            s.session.record = None
        if self._due(self.cfg.hash_every) and s.step > s.session.begun:
            self._compare()

    def report(self, record: dict[str, Any]) -> None:
        """Hand the record of the newest step to the observers; every rank keeps it in case rank 0 is lost."""
        self.state.session.newest, self.state.session.reported = record, self.state.step
        self.observers.record(record)

    def _due(self, every: int) -> bool:
        return bool(every) and self.state.step % every == 0

    def _evaluation_due(self) -> bool:
        return self._due(self.cfg.eval_every) or (bool(self.cfg.eval_every) and self.state.step == self.cfg.max_steps)

    @torch.no_grad()
    def _evaluate(self) -> dict[str, float]:
        """Return the mean loss over the same validation windows at every world size. (all ranks)"""
        self.phase("eval")
        s, mesh, data, start = self.state, self.mesh, self.batches.data, time.perf_counter()
        windows = data.val_windows(self.cfg.eval_samples)[mesh.rank :: mesh.world_size]
        total = torch.zeros(2, dtype=torch.float64 if mesh.device.type == "cpu" else torch.float32)
        total = total.to(mesh.device)  # sum of losses, number of windows
        s.model.eval()
        for first in range(0, len(windows), self.batch.micro):
            self.phase("eval")  # a long evaluation must show progress
            starts = windows[first : first + self.batch.micro]
            loss = self.workload.loss(s.model, *data.val_batch(starts))
            total += torch.stack([loss * len(starts), torch.full_like(loss, len(starts))])
        s.model.train()
        loss_sum, count = mesh.all_reduce(total, "eval").tolist()
        value = loss_sum / count
        s.scalars.val_loss, s.session.evaluated = value, s.step
        if not math.isfinite(value):
            raise TrainingDiverged(f"at step {s.step} the validation loss is {value}; lower lr")
        s.scalars.best_val_loss = min(value, s.scalars.best_val_loss or math.inf)
        return {"val/loss": value, "time/eval_s": time.perf_counter() - start}

    def _save(self, final: bool = False) -> float:
        """Save a checkpoint of this step; return the seconds that training waited. (all ranks)

        With checkpoint_mode async the write may end later; with `final` it has ended when this returns. A failed write
        (a full disk) gives a warning; the third failure in a row, or a failed final write, ends the run.
        """
        self.phase("checkpoint")
        s, start = self.state, time.perf_counter()
        rng = self.mesh.gather(rng_state(self.mesh.device))
        params = [p for p in s.model.parameters() if p.requires_grad]
        if not torch.isfinite(get_total_norm(params)):
            raise TrainingDiverged(
                f"after step {s.step} the weights are not finite; lower lr, or set grad_clip. The checkpoint before "
                "this step is good"
            )
        saved = None
        if rng is not None:
            saved = s.pack(rng)
            saved.meta |= {"world_size": self.mesh.world_size, "attempt": self.spec.attempt}
            saved.meta |= {"config": self.cfg.model_dump(), **self.workload.meta}
        self.writer.save(self.mesh, saved, final)
        s.session.saved = s.step  # copied, perhaps not yet on disk; the final save waits for the disk
        return self.writer.paused(s.step, time.perf_counter() - start)

    def _compare(self, again: bool = False) -> None:
        """Compare the replicas' state once per step, and heal a minority; `again` repeats it. (all ranks)"""
        s = self.state
        if self.mesh.world_size == 1 or not self.cfg.hash_every or (s.session.compared == s.step and not again):
            return
        healed, warning = replicas.compare(s, self.mesh)
        s.session.compared = s.step
        self.guards.count_healed(healed)
        self._warn(warning)

    def _end_trace(self) -> None:
        """End a traced step; now and then time a backward without communication for comparison. (all ranks)"""
        if self.trace:
            self.speed.pause(self.trace.end(self._no_sync_backward))

    def _no_sync_backward(self, timed: Any) -> None:
        rng = rng_state(self.mesh.device)
        self.par.no_sync_backward(*self.batches.get(self.state.samples, 0), timed)
        set_rng_state(rng, self.mesh.device)

    def _outcome(self, otherwise: str) -> dict[str, Any]:
        """Return the run's results as plain data."""
        s, mesh = self.state, self.mesh
        return {
            "exit_reason": "finished" if s.step >= self.cfg.max_steps else otherwise,
            "step": s.step,
            "train_loss": s.scalars.loss,
            "loss_ema": s.scalars.loss_ema,
            "val_loss": s.scalars.val_loss,
            "train_s": s.scalars.train_s,
            **self.speed.of_run(s.scalars),
            "first_step_s": s.session.first_step_s,
            "world_size": mesh.world_size,
            "backend": mesh.backend,
            "backend_reason": mesh.backend_reason,
            "device": str(mesh.device),
            "precision": self.cfg.precision,
            "resumed_from": self.spec.resume or None,
            "comm": self.trace.finish(self.note) if self.trace else None,
            "torch": str(torch.__version__),  # its own class would make the driver import torch to read it
        }


def read_checkpoint(
    path: str, spec: RunSpec, mesh: Mesh, model_shape: dict[str, Any], note: Callable[[str], None]
) -> StateDict:
    """Read a checkpoint, restore this rank's random generators, and note what differs from this run. (all ranks)

    Raises CheckpointError when it is damaged, or of a model of another shape.
    """
    saved = files.load(Path(path))
    check_shape(saved, model_shape, path)
    meta = saved.meta
    note(f"resume  from step {meta['step']} of {path}")
    if meta["world_size"] == mesh.world_size:
        set_rng_state(saved.rng[mesh.rank], mesh.device)
    else:
        note(
            f"resume  written by {meta['world_size']} ranks, now {mesh.world_size}: same batches, but sums in "
            "another order and new dropout masks, so losses agree closely and not bit for bit"
        )
    if meta["dataset"]["tokens_sha256"] != spec.dataset.tokens_sha256:
        note(f"resume  the dataset differs from the checkpoint's ({meta['dataset']['name']})")
    return saved


def step_seed(seed: int, step: int, rank: int) -> int:
    """Return the dropout seed of one step on one rank; it depends on no process, so a resume draws the same masks."""
    return (seed * 1_000_003 + step * 8_191 + rank * 131_071 + 1) % 2**63


def _peak_resident_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024

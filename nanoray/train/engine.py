"""THE LOOP, top to bottom, without Ray: it runs the same in one process, under torchrun, and in a
Ray actor.

All that changes weights, gradients, the schedule or the resumed state is inline in `fit`. Callbacks
only observe. Blocks that communicate are marked "(all ranks)". An engine belongs to one group of
ranks: when a rank is lost, the next group gets a new engine around the same TrainState
(elastic.py).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.utils import get_total_norm

from nanoray.checkpoint.find import newest_valid
from nanoray.checkpoint.writer import CheckpointWriter
from nanoray.data.tokens import MicroBatches
from nanoray.errors import TrainingDiverged
from nanoray.mesh.mesh import Mesh, Vote
from nanoray.mesh.rendezvous import Order
from nanoray.models.dropout import derive_seed, seed_generators
from nanoray.models.precision import LossScaler
from nanoray.parallel.plan import Plan
from nanoray.points import reached
from nanoray.run import RunSpec, disk_used
from nanoray.state import MEMORY, StateDict, TrainState, Update, rng_state, set_rng_state
from nanoray.trace.log import CommTrace
from nanoray.train.guard import replicas
from nanoray.train.guard.audit import Audit
from nanoray.train.guard.bad_step import Finding, describe, replay
from nanoray.train.guard.certificate import append
from nanoray.train.guard.guards import BadStep, Guards
from nanoray.train.mirror import copy_to_mirror
from nanoray.train.optim.groups import lr_at, set_lr
from nanoray.train.record import _peak_resident_bytes
from nanoray.train.saving import read_checkpoint
from nanoray.train.watch import routing
from nanoray.train.watch.observers import Observers, now
from nanoray.train.watch.precision_stats import PrecisionStats
from nanoray.train.watch.throughput import Throughput
from nanoray.train.workload import Workload

log = logging.getLogger("nanoray")


class Regroup(Exception):
    """All ranks left the loop after the same step, to continue with another number of ranks."""


@dataclass
class Engine:
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
    # Called with (step, phase) when a phase begins
    listeners: Sequence[Callable[[int, str], None]] = ()
    trace: CommTrace | None = None  # measures the collectives of some steps
    regrouped: bool = False  # the group continues from the memory of one of its ranks

    def __post_init__(self) -> None:
        self.cfg, self.batch, self.note = self.spec.config, self.batches.batch, self.observers.note
        self.stats, w = PrecisionStats(self.cfg.stats_every, self.cfg.precision), self.workload
        self.speed = Throughput(
            self.batch.global_size * w.tokens_per_sample, w.flops_per_token, w.peak_flops, w.unit
        )
        self.audit = Audit(
            self.cfg.audit_every, self.mesh, self.par, self.batches, self.seed_dropout
        )
        if self.cfg.audit_every and self.mesh.world_size == 1:
            self.note(
                f"note    audit_every = {self.cfg.audit_every} does nothing: there is no other rank"
            )

    def fit(self) -> dict[str, Any]:
        """Train until max_steps, stop_at, target_loss, or a stop request on any rank. (all ranks)

        Returns the outcome as plain data. Raises TrainingDiverged when the loss stops being finite,
        StateDiverged when the ranks' weights differ, Regroup when the driver orders another group,
        and the process group's error when a peer dies.
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

        while s.step < last and order is Order.GO_ON and not self.on_target:
            # (all ranks) Start a vote on stopping. It runs beside the step, and is read when the
            # step is done.
            s.session.current = s.step + 1
            par.trace(trace.begin(s.step + 1) if trace else False)
            vote = mesh.start_vote(self.wanted())
            set_lr(s.optimizers, lr := lr_at(s.step, cfg))

            # Forward and backward over the micro batches. (all ranks) The last backward averages
            # the gradients. In an audited step another rank computes one of them, too: if they
            # differ, the step is done again.
            seed = self.audit.begin(s.step, s.samples, self.phase)
            routing.begin(s.model)
            own_loss = par.forward_backward(self.batches.step(s.samples), self.phase, seed)
            if wrong := self.audit.differences():
                self._warn(wrong)
                order = self._leave_out(vote)
                continue

            # (all ranks) On logged steps the loss is averaged. A rank's mirror, if any, gets its
            # gradients: once a rank knows the norm, all others can finish the step without it.
            # Nothing changes before the update, so until then an interrupted step can be repeated.
            # An update is left out when the norm is not finite.
            self.phase("optimizer")
            self.stats.look(s, s.step + 1)
            self.scaler.unscale(par.gradients)
            logged = self.is_logged(s.step + 1, last)
            mean_loss = mesh.all_reduce_mean(own_loss.clone(), "loss") if logged else None
            routed = routing.means(s.model, mesh) if logged else None
            s.can_finish = par.mirror_gradients()
            norm = self.scaler.norm(par.grad_norm())
            reached("committed")
            mesh.require_unbroken()
            # (all ranks) two flags: gradients that overflow, losses that are not finite
            if self.scaler.enabled:
                mesh.all_reduce(self.scaler.look(norm, own_loss), "overflow", op="max")
            verdict = self.guards.check(
                s.step + 1, norm, own_loss, mean_loss, logged, self.explain, s.samples
            )
            self._warn(verdict.warning)
            # (all ranks) load a checkpoint and continue with the data after this step
            if verdict.roll_back:
                self._roll_back(verdict.roll_back)
                order = self._leave_out(vote)
                continue

            # Clip, update, advance; nothing communicates meanwhile. With fp16 all ranks skip the
            # same steps. (all ranks) With sharded optimizer state the owners of the weights send
            # them to the others, beside what follows.
            if cfg.grad_clip:
                par.clip(cfg.grad_clip, norm)
            left_out = self.scaler.step(s.optimizer, verdict.leave_out, s.optimizers[1:])
            s.advance(self.batch.global_size, Update(norm, left_out))
            par.spread(left_out)
            par.zero_grad()
            self.speed.step()

            # (all ranks) On logged steps: wait for the device, record, evaluate, save. Then compare
            # the replicas.
            if mean_loss is not None:
                self.phase("log")
                self._record(mean_loss.item(), lr, norm.item(), routing.measured(routed))
            self.finish_step()
            order = vote.result()
            self._end_trace()

        if order is Order.REGROUP:
            raise Regroup
        verdict = self.guards.decide(True, self.explain, s.samples - self.batch.global_size)
        self._warn(verdict.warning)
        if verdict.roll_back:
            self._roll_back(verdict.roll_back)
        # Else no step was done, and the resumed checkpoint is still there
        if s.step > s.session.begun:
            self._compare()
            self._save(final=True)
        self.phase("done")
        return self._outcome(
            "stopped" if order is Order.STOP else "target_loss" if self.on_target else "stop_at"
        )

    # The methods that the loop calls, in that order.

    def phase(self, name: str) -> None:
        """Announce a phase to the listeners: progress file, tracer, planned faults."""
        for listener in self.listeners:
            listener(self.state.session.current, name)

    def _warm_up(self) -> None:
        rng = rng_state(self.mesh.device)
        # A script's loader may not go back
        self.par.warm_up(*self.batches.get(self.state.samples, 0))
        if self.trace:
            self.trace.prepare()
        set_rng_state(rng, self.mesh.device)
        log.info("warmed up")

    def seed_dropout(self, step: int, micro: int, rank: int | None = None) -> None:
        """Seed the dropout of a micro batch of the step after `step`: every process draws the same
        masks.

        The seed is that of (seed, step, micro batch, data rank), and a model may derive one for
        each layer from it. So the masks do not depend on the order in which micro batches and
        layers are computed. `rank` is another data rank than this one.
        """
        if self.cfg.dropout or self.workload.draws:
            of = self.batches.rank if rank is None else rank
            seed_generators(derive_seed(self.cfg.seed, step, micro, of), self.mesh.device)

    def is_logged(self, step: int, last: int) -> bool:
        """Whether a step is recorded: the regular ones, and the first and last of this command."""
        return step == last or step == self.state.session.begun + 1 or self._is_regular(step)

    def _is_regular(self, step: int) -> bool:
        due = (
            self.cfg.log_every,
            self.cfg.eval_every,
            self.cfg.checkpoint_every,
            self.cfg.stats_every,
        )
        return any(every and step % every == 0 for every in due)

    def explain(self, bad: BadStep) -> str:
        """Repeat a bad step with hooks, and describe what all ranks found. (all ranks)"""
        s, size = self.state, self.batch.global_size
        # A flipped exponent bit makes infinities, too; this finds and heals it
        self._compare(again=True)
        start = s.samples - (s.step - bad.step + 1) * size  # the step's first sample
        rng = rng_state(self.mesh.device)
        seed = partial(self.seed_dropout, bad.step - 1)
        layer, micro = replay(s.model, partial(self.batches.get, start), self.par.repeat, seed)
        set_rng_state(rng, self.mesh.device)
        exact = self.cfg.on_nan != "skip" or bad.step > s.step
        step = (
            f"at step {bad.step} the loss is {{loss:.4g}} and the gradient norm {bad.norm:.4g} "
            f"(lr {lr_at(bad.step - 1, self.cfg):.3g}, samples {start} to {start + size - 1}); "
            "repeated" + ("" if exact else f" with the weights of step {s.step}")
        )
        return describe(
            self.mesh, step, Finding(bad.loss, layer, self.batches.describe(start, micro))
        )

    def _warn(self, text: str) -> None:
        if text:
            self.note(f"warning  {text}")

    def _roll_back(self, why: str) -> None:
        """Load the newest valid checkpoint and continue with the data after the bad step. (all
        ranks)
        """
        s, path = self.state, ""
        self.writer.forget(self.mesh, s.sharded)
        if self.mesh.rank == 0:
            newest, damaged = newest_valid(self.spec.checkpoints)
            # Or the checkpoint that the run started from
            path = str(newest.path) if newest else self.spec.resume
            for each in damaged:
                self._warn(each)
        path = self.mesh.broadcast(path)
        self.guards.rolled_back(path, why)
        self.note(f"warning  {why}. Rolling back to {path} and continuing with the data after it")
        saved = read_checkpoint(
            path, self.spec, self.mesh, s, self.workload.meta["model_shape"], self.par, self.note
        )
        self.par.settle()
        # Until mirrors have gone back, too, no lost rank's share may be taken from one
        s.whole = s.mirror is None
        s.rewind(saved, s.samples + self.batch.global_size)
        copy_to_mirror(s, self.mesh)
        s.whole = True
        self.par.zero_grad()
        self.observers.rewind(s.step)

    def _leave_out(self, vote: Vote) -> Order:
        """End a step without an update; return the order for the next one. (all ranks)"""
        self.par.zero_grad()
        order = vote.result()
        self.speed.restart(self.batches.seconds)
        self._end_trace()
        return order

    def _record(self, loss: float, lr: float, grad_norm: float, measured: dict[str, Any]) -> None:
        """Begin the record of this step. Raises TrainingDiverged when the fp16 loss scale is
        exhausted.
        """
        s, device = self.state, self.mesh.device
        if self.scaler.enabled:
            life = self.scaler.read(s.step)
            measured |= {"train/loss_scale": life.scale, "train/skipped_steps": life.skipped}
            measured["train/good_steps"] = life.good
            self._warn(self.guards.watch_overflows(s.step, life.skipped))
        if math.isfinite(loss):
            s.see_loss(loss, smooth=self._is_regular(s.step))
            measured["train/loss"] = loss
        if s.scalars.loss_ema is not None:
            measured["train/loss_ema"] = s.scalars.loss_ema
        if math.isfinite(grad_norm) or self.scaler.enabled:
            measured["train/grad_norm"] = grad_norm if math.isfinite(grad_norm) else 0.0
        peak = (
            torch.cuda.max_memory_allocated() if device.type == "cuda" else _peak_resident_bytes()
        )
        record = s.session.record = {
            "step": s.step,
            "attempt": self.spec.attempt,
            "fault/restarts": self.spec.attempt,
            "time": now(),
            "train/lr": lr,
            self.speed.total_name: s.samples * self.workload.tokens_per_sample,
            "mem/peak_gib": peak / 2**30,
            **disk_used(self.spec.folder),
            **self.guards.metrics(),
            **measured,
        }
        record |= self.stats.measured(s, self.mesh)  # (all ranks)
        if self.trace:
            record |= self.trace.read(self.note)  # (all ranks) the steps traced before this one
        first = s.session.first_step_s is None
        record |= self.speed.window(s.scalars, self.batches.seconds, counted=not first)
        if first:
            s.session.first_step_s = time.time() - self.spec.started
            if self.mesh.rank == 0 or s.sharded:
                self.writer.prepare(self._packed())
        else:
            record |= self.writer.news()

    def finish_step(self) -> None:
        """Evaluate, report, save and compare where the newest step is due for it. (all ranks)

        It can be interrupted anywhere and called again: nothing is done twice and nothing is
        skipped.
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
        """Hand the record of the newest step to the observers; every rank keeps it in case rank 0
        is lost.
        """
        self.state.session.newest, self.state.session.reported = record, self.state.step
        self.observers.record(record)

    @property
    def on_target(self) -> bool:
        """Whether the newest evaluation, of this command or of the checkpoint before it, has
        reached target_loss.
        """
        target, loss = self.cfg.target_loss, self.state.scalars.val_loss
        return bool(target) and loss is not None and loss <= target

    def _due(self, every: int) -> bool:
        return bool(every) and self.state.step % every == 0

    def _evaluation_due(self) -> bool:
        return self._due(self.cfg.eval_every) or (
            bool(self.cfg.eval_every) and self.state.step == self.cfg.max_steps
        )

    @torch.no_grad()
    def _evaluate(self) -> dict[str, float]:
        """Return the mean loss, and other scores, over the same validation samples at every world
        size. (all ranks)
        """
        self.phase("eval")
        s, mesh, data, start = self.state, self.mesh, self.batches.data, time.perf_counter()
        windows, names = data.val_windows(self.cfg.eval_samples), self.workload.score_names
        own, most = windows[self.batches.rank :: self.batch.dp], -(-len(windows) // self.batch.dp)
        total = torch.zeros(
            len(names) + 1, dtype=torch.float64 if mesh.device.type == "cpu" else torch.float32
        )
        total = total.to(mesh.device)  # sums of the scores, number of windows
        # A script may have frozen some
        training = [module for module in s.model.modules() if module.training]
        s.model.eval()
        try:
            # Equally often on all ranks: sharded weights are gathered
            for first in range(0, most, self.batch.micro):
                self.phase("eval")  # a long evaluation must show progress
                starts = own[first : first + self.batch.micro]
                scores = self.workload.score(
                    self.par.whole, *data.val_batch(starts if len(starts) else windows[:1])
                )
                if len(starts) and self.par.knows_loss:
                    total += torch.stack(
                        [score * len(starts) for score in (*scores, torch.ones_like(scores[0]))]
                    )
        finally:
            for module in training:
                module.training = True
        *sums, count = mesh.all_reduce(total, "eval").tolist()
        value, *others = (total / count for total in sums)
        s.scalars.val_loss, s.session.evaluated = value, s.step
        if not math.isfinite(value):
            raise TrainingDiverged(f"at step {s.step} the validation loss is {value}; lower lr")
        s.scalars.best_val_loss = min(value, s.scalars.best_val_loss or math.inf)
        scores_of_step = dict(zip(names, (value, *others), strict=True))
        return {**scores_of_step, "time/eval_s": time.perf_counter() - start}

    def _save(self, final: bool = False) -> float:
        """Save a checkpoint of this step; return the seconds that training waited. (all ranks)

        With checkpoint_mode async the write may end later; with `final` it has ended when this
        returns. A failed write (a full disk) gives a warning; the third failure in a row, or a
        failed final write, ends the run.
        """
        self.phase("checkpoint")
        s, start = self.state, time.perf_counter()
        rng = self.mesh.gather(rng_state(self.mesh.device) | self.workload.loader(s.samples))
        left = self.mesh.gather_tensor(s.memory) if s.memory is not None else None
        rng = (
            [of | {MEMORY: kept} for of, kept in zip(rng, left, strict=True)]
            if rng and left
            else rng
        )
        norm = get_total_norm([shard.param for shard in s.shards])
        if not torch.isfinite(self.mesh.all_reduce(norm, "finite") if s.sharded else norm):
            raise TrainingDiverged(
                f"after step {s.step} the weights are not finite; lower lr, or set grad_clip. The "
                "checkpoint before "
                "this step is good"
            )
        saved = None
        if rng is not None or s.sharded:
            saved = self._packed()
            saved.rng = rng or []
            saved.meta |= {"world_size": self.mesh.world_size, "attempt": self.spec.attempt}
            saved.meta |= {"config": self.cfg.model_dump(), **self.workload.meta}
        self.writer.save(self.mesh, saved, final)
        # Copied, perhaps not yet on disk; the final save waits for the disk
        s.session.saved = s.step
        return self.writer.paused(s.step, time.perf_counter() - start)

    def _packed(self) -> StateDict:
        """Return what this rank writes of a checkpoint: all of the state, or its shards of it."""
        return (
            self.state.pack_own(first=self.mesh.rank == 0)
            if self.state.sharded
            else self.state.pack()
        )

    def _compare(self, again: bool = False) -> None:
        """Compare the replicas' state once per step, and heal a minority; `again` repeats it. (all
        ranks)
        """
        s = self.state
        if not self.cfg.hash_every or (s.session.compared == s.step and not again):
            return
        self.par.settle()
        losses = [loss.item() for loss in self.par.own_losses]
        healed, warning = replicas.compare(s, self.mesh, losses, self._certify)
        s.session.compared = s.step
        self.guards.count_healed(healed)
        self._warn(warning)

    def _certify(self, found: dict[str, Any]) -> None:
        if self.mesh.rank == 0:
            append(
                self.spec.folder, {"step": self.state.step, "attempt": self.spec.attempt, **found}
            )

    def _end_trace(self) -> None:
        """End a traced step; now and then time a backward without communication for comparison.
        (all ranks)
        """
        if self.trace:
            self.speed.pause(
                self.trace.end(None if self.state.shards_weights else self._no_sync_backward)
            )

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
            # Its own class would make the driver import torch to read it
            "torch": str(torch.__version__),
        }

"""THE LOOP, top to bottom, without Ray: the same in one process, under torchrun, and in an actor.

Everything that changes weights, gradients, the schedule, or the state that a resume restores is
inline in `fit`. Instruments (watch/instruments.py) and callbacks only observe. Blocks that
communicate are marked "(all ranks)". An engine belongs to one group of ranks: when a rank is lost,
the next group gets a new engine around the same TrainState (elastic.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from nanoray.checkpoint.resume import newest_valid
from nanoray.checkpoint.run_folder import RunSpec
from nanoray.checkpoint.state.rank_state import Rate, Update
from nanoray.checkpoint.state.train_state import TrainState
from nanoray.checkpoint.writer import CheckpointWriter
from nanoray.data.fallible import FallibleSamples
from nanoray.data.seeding import generators_kept
from nanoray.data.tokens import MicroBatches
from nanoray.machine.fault_points import reached
from nanoray.models.precision import LossScaler
from nanoray.models.workload import Workload
from nanoray.observe.watch.instruments import Instruments
from nanoray.observe.watch.observers import Observers
from nanoray.parallel.mesh import Mesh, Vote
from nanoray.parallel.plan import Plan
from nanoray.parallel.rendezvous import Order
from nanoray.train.evaluate import evaluate
from nanoray.train.guard import replicas
from nanoray.train.guard.audit import Audit
from nanoray.train.guard.bad_step import Finding, describe, replay
from nanoray.train.guard.guards import BadStep, Guards, StepCheck, Verdict
from nanoray.train.guard.state_hashes import append
from nanoray.train.mirror import copy_to_mirror
from nanoray.train.optim.groups import lr_at, set_lr
from nanoray.train.optim.modes import evaluated_weights, set_mode
from nanoray.train.read_vote import ReadVote
from nanoray.train.record import StepRecorder, outcome
from nanoray.train.saving import pack_for_checkpoint, read_checkpoint, save_checkpoint
from nanoray.train.seeds import DropoutSeeds

log = logging.getLogger("nanoray.rank")


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
    instruments: Instruments
    wanted: Callable[[], Order]  # the order that this rank votes for
    regrouped: bool = False  # the group continues from the memory of one of its ranks

    def __post_init__(self) -> None:
        self.cfg = self.spec.config
        self.batch = self.batches.batch
        self.note = self.observers.note
        self.recorder = StepRecorder(
            self.spec, self.mesh, self.state, self.guards, self.scaler, self.workload
        )

        # Every run records the steps that one of these divides.
        intervals = (
            self.cfg.log_every,
            self.cfg.eval_every,
            self.cfg.checkpoint_every,
        )
        self.regular_intervals = [every for every in intervals if every]
        # Whether target_loss is reached, or a script's data have failed
        self.is_over = False
        # Whether every run records the present step, wherever it was started and stopped
        self.is_regular = False
        # Whether the model draws random numbers, such as the masks of dropout
        self.draws = bool(self.cfg.dropout) or self.workload.draws
        self.seed_dropout = DropoutSeeds(
            self.cfg.seed, self.batches, self.mesh.device, self.draws, self.workload.draws
        )

        # What can refuse a step. A script's data can fail in the middle of a run.
        self.checks: list[StepCheck] = []
        self.reading: ReadVote | None = None
        if isinstance(self.batches.data, FallibleSamples):
            self.batches.data.divide(self.batch, self.batches.rank)
            self.reading = ReadVote(self.mesh, self.batches.data, self.batch)
            self.checks.append(self.reading)
        every = self.cfg.audit_every
        if every:
            self.checks.append(
                Audit(every, self.mesh, self.par, self.batches, self.seed_dropout, self.note)
            )
        if every and self.mesh.world_size == 1:
            self.note(f"note    audit_every = {every} does nothing: there is no other rank")

    def fit(self) -> dict[str, Any]:
        """Train until max_steps, stop_at, target_loss, or a stop request on any rank. (all ranks)

        Returns the outcome as plain data. Raises TrainingDiverged when the loss stops being finite,
        StateDiverged when the ranks' weights differ, Regroup when the driver orders another group,
        and the process group's error when a peer dies.
        """
        cfg = self.cfg
        mesh = self.mesh
        par = self.par
        state = self.state
        instruments = self.instruments
        samples_per_step = self.batch.global_size
        last = min(cfg.max_steps, cfg.stop_at or cfg.max_steps)

        # (all ranks) Warm up. Then finish the newest step: the last group may have broken between
        # its update and its record.
        self.phase("init")
        set_mode(state.optimizers, "train")
        self.warm_up()
        instruments.begin_run()
        self.finish_step()

        # (all ranks) A group that has formed only to save a checkpoint does no step.
        order = Order.GO_ON
        if self.regrouped:
            order = mesh.start_vote(self.wanted()).result()

        while state.step < last and order <= Order.SAVE and not self.is_over:
            # (all ranks) A script may have asked for a checkpoint of the newest step.
            if order is Order.SAVE and state.session.saved != state.step:
                self.compare_and_save()

            step = state.step + 1  # counted from 1; state.step is the number of completed steps
            state.session.current = step
            phase = partial(instruments.phase, step)  # announces a phase of this step
            instruments.begin_step(step)
            logged = self.is_logged(step, last)

            # (all ranks) Vote on whether to stop. The vote travels beside the step, and its result
            # is read when the step is done.
            vote = mesh.start_vote(self.wanted())

            # The learning rate is a function of the step alone, so a resume needs no schedule. Or a
            # script's own schedulers have set the rates after the step before.
            if state.schedule is not None:
                lr = state.schedule.lr
            else:
                lr = lr_at(state.step, cfg)
                set_lr(state.optimizers, lr)

            # (all ranks) Forward and backward over the micro batches. The last backward averages
            # the gradients over the data ranks.
            micro_batches = self.batches.step(state.samples)
            for check in self.checks:
                micro_batches = check.watch(micro_batches, state.step, state.samples, phase)
            seed = partial(self.seed_dropout, state.step) if self.draws else None
            own_loss = par.forward_backward(micro_batches, phase, seed)

            # (all ranks) No rank updates where one could not read its data, or where two of them
            # disagree on a gradient.
            if any(check.refuses() for check in self.checks):
                order = self.leave_out(vote)
                continue

            # Instruments see the gradients as backward has left them, with the loss scale of fp16.
            phase("optimizer")
            instruments.gradients_ready(step, logged)

            # (all ranks) The loss of a step is averaged only where it is logged: an all-reduce.
            mean_loss = None
            if logged:
                mean_loss = mesh.all_reduce_mean(own_loss.clone(), "loss")

            # (all ranks) fp16: take the loss scale out. Once the norm is known, the others can finish
            # the step without a lost rank if another rank has its gradients, such as its mirror.
            state.can_finish = par.complete_gradients()

            # (all ranks) The norm is the commit point. Until then nothing has changed, so an
            # interrupted step can be repeated.
            norm = par.grad_norm()
            reached("committed")
            mesh.require_unbroken()

            # (all ranks) Leave an update out whose norm or loss is not finite, or roll back: load a
            # checkpoint and continue with the data after this step.
            verdict = self.judge(step, norm, own_loss, mean_loss)
            if verdict.roll_back:
                order = self.leave_out(vote)
                continue

            # Clip, update, advance: nothing communicates, so a step is finished as a whole or not
            # at all. With fp16 all ranks skip the same updates.
            if cfg.grad_clip:
                par.clip(cfg.grad_clip, norm)
            if self.writer.copying:  # a checkpoint of the step before
                instruments.pause(self.writer.finish_copy())
            state.is_updating = True
            left_out = self.scaler.step(state.optimizers, verdict.leave_out)
            state.advance(samples_per_step, Update(norm, left_out))

            # (all ranks) With sharded optimizer state the owners of the weights send them to the
            # others, beside the work that follows.
            par.spread(left_out)
            par.zero_grad()

            # (all ranks) On logged steps wait for the device, and begin the record.
            if mean_loss is not None:
                phase("log")
                self.begin_record(mean_loss.item(), lr, norm.item())

            # (all ranks) Evaluate, report, save and compare the replicas where that is due. Then
            # read the vote.
            self.finish_step()
            order = vote.result()
            instruments.end_step()

        if order is Order.REGROUP:
            raise Regroup
        return self.end_run(order)

    # The methods that the loop calls, in that order.

    def phase(self, name: str) -> None:
        """Announce a phase to the instruments: progress file, ledger, tracing, planned faults."""
        self.instruments.phase(self.state.session.current, name)

    def warm_up(self) -> None:
        """Run a forward and backward whose results are thrown away. (all ranks)"""
        # (all ranks) One rank's data that cannot be read end all ranks before the first step.
        if self.reading:
            self.reading.read_first(self.state.samples, self.batches.rank)
        # The next step's own batch: a script's loader may not be able to go back.
        x, y = self.batches.get(self.state.samples, 0)
        # The warm-up draws dropout masks, and the first step must not notice.
        with self.workload.first_batch(), generators_kept(self.mesh.device):
            self.par.warm_up(x, y)
        log.info("warmed up")

    def is_logged(self, step: int, last: int) -> bool:
        """Return whether a step is recorded: regular ones, and the first and last of a command."""
        self.is_regular = any(step % every == 0 for every in self.regular_intervals)
        return self.is_regular or step == last or step == self.state.session.begun + 1

    def warn(self, text: str) -> None:
        """Show a warning to the user."""
        self.note(f"warning  {text}")

    def judge(self, step: int, norm: Tensor, own_loss: Tensor, mean_loss: Tensor | None) -> Verdict:
        """Decide whether the update of a step may reach the weights, and roll back. (all ranks)"""
        # (all ranks) fp16: did a gradient overflow on any rank, and is any loss not finite?
        if self.scaler.enabled:
            flags = self.scaler.flag_nonfinite(norm, own_loss)
            self.mesh.all_reduce(flags, "overflow", op="max")

        # The host waits for a device only where it waits anyway.
        look = mean_loss is not None
        samples = self.state.samples
        verdict = self.guards.check(step, norm, own_loss, mean_loss, look, self.explain, samples)
        if verdict.warning or verdict.roll_back:
            self.follow(verdict)
        return verdict

    def follow(self, verdict: Verdict) -> None:
        """Warn, or roll back, as the guards have decided. (all ranks)"""
        if verdict.warning:
            self.warn(verdict.warning)
        if verdict.roll_back:
            self.roll_back(verdict.roll_back)

    def explain(self, bad: BadStep) -> str:
        """Repeat a bad step with hooks, and describe what all ranks found. (all ranks)"""
        state = self.state
        size = self.batch.global_size
        # What the step's forwards have changed in buffers differs between ranks, and may be not
        # finite: the bad step leaves no trace in them.
        self.par.undo()
        # A flipped exponent bit makes infinities, too; the comparison finds and heals it.
        self.compare(again=True)

        # The first sample of that step, which may lie some steps back on a GPU.
        start = state.samples - (state.step - bad.step + 1) * size
        batch = partial(self.batches.get, start)
        seed = partial(self.seed_dropout, bad.step - 1)
        with generators_kept(self.mesh.device), self.par.undisturbed():
            layer, micro = replay(state.model, batch, self.par.flow.repeat, seed)

        repeated = "repeated"
        weights_have_changed = self.cfg.on_nan == "skip" and bad.step <= state.step
        if weights_have_changed:
            repeated = f"repeated with the weights of step {state.step}"
        # describe() fills in the mean loss of all ranks.
        step = (
            f"at step {bad.step} the loss is {{loss:.4g}} and the gradient norm {bad.norm:.4g} "
            f"({self.rate_of(bad.step)}samples {start} to {start + size - 1}); {repeated}"
        )
        finding = Finding(bad.loss, layer, self.batches.describe(start, micro))
        return describe(self.mesh, step, finding)

    def rate_of(self, step: int) -> str:
        """Return the learning rate of a step for a message; of a script's own, nothing is known."""
        if self.state.schedule is not None:
            return ""
        return f"lr {lr_at(step - 1, self.cfg):.3g}, "

    def roll_back(self, why: str) -> None:
        """Load the newest valid checkpoint; continue with the data after this step. (all ranks)"""
        state = self.state
        self.writer.forget(self.mesh, state.sharded)

        # Rank 0 chooses: the newest checkpoint, or else the one that the run started from.
        path = ""
        if self.mesh.rank == 0:
            newest, damaged = newest_valid(self.spec.checkpoints)
            path = str(newest.path) if newest else self.spec.resume
            for damage in damaged:
                self.warn(damage)
        path = self.mesh.broadcast(path)

        self.guards.rolled_back(path, why)
        self.note(f"warning  {why}. Rolling back to {path} and continuing with the data after it")
        # First what the forwards of this step have changed, then the checkpoint.
        self.par.zero_grad()
        saved = read_checkpoint(path, self.cfg, self.spec.dataset, self.mesh, state, self.note)
        self.par.settle()

        # Until mirrors have gone back, too, no lost rank's share may be taken from one.
        state.whole = state.mirror is None
        state.rewind(saved, state.samples + self.batch.global_size)
        set_mode(state.optimizers, "train")
        copy_to_mirror(state, self.mesh)
        state.whole = True
        self.observers.rewind(state.step)

    def leave_out(self, vote: Vote) -> Order:
        """End a step without an update; return the order for the next one. (all ranks)"""
        self.par.zero_grad()
        order = vote.result()
        self.is_over = self.reading is not None and self.reading.has_failed
        self.instruments.left_out()
        self.instruments.end_step()
        return order

    def begin_record(self, loss: float, lr: Rate, grad_norm: float) -> None:
        """Begin the record of the newest step. (all ranks)

        Raises TrainingDiverged when the fp16 loss scale is exhausted.
        """
        state = self.state
        session = state.session
        if lr is not None:
            lr = float(lr)  # a script may have given a tensor
        record = self.recorder.values(loss, lr, grad_norm, self.is_regular)
        session.record = record
        if self.scaler.enabled:
            warning = self.guards.watch_overflows(state.step, record["train/skipped_steps"])
            if warning:
                self.warn(warning)
        record |= self.instruments.measured()

        if session.first_step_s is None:
            session.first_step_s = time.time() - self.spec.started
            # Take the memory for the first copy of a checkpoint now, and not in a timed step.
            if self.mesh.rank == 0 or state.sharded:
                self.writer.prepare(pack_for_checkpoint(state, self.mesh))
        else:
            record |= self.writer.news()

    def finish_step(self) -> None:
        """Evaluate, report, save and compare where the newest step is due for it. (all ranks)

        It can be interrupted anywhere and called again: nothing is done twice and nothing is
        skipped. The session is read anew each time, because a comparison that heals this rank
        replaces it.
        """
        cfg = self.cfg
        state = self.state
        record = state.session.record
        if record is not None:
            if self.evaluation_is_due() and state.session.evaluated != state.step:
                record |= self.evaluate()
                self.instruments.pause(record["time/eval_s"])
            if state.session.reported != state.step:
                self.report(record)
            if is_due(cfg.checkpoint_every, state.step) and state.session.saved != state.step:
                self.compare_and_save()
            state.session.record = None
        if is_due(cfg.hash_every, state.step) and state.step > state.session.begun:
            self.compare()
        if cfg.target_loss and self.on_target:
            self.is_over = True

    def evaluation_is_due(self) -> bool:
        """Return whether the newest step is followed by an evaluation."""
        every = self.cfg.eval_every
        at_the_end = self.state.step == self.cfg.max_steps
        return bool(every) and (at_the_end or is_due(every, self.state.step))

    def evaluate(self) -> dict[str, float]:
        """Return the validation loss of the newest step, and its other scores. (all ranks)"""
        state = self.state
        # Weights on their way must not change under the message.
        self.par.settle()
        with evaluated_weights(state.optimizers):
            scores = evaluate(
                self.mesh,
                self.par,
                state,
                self.batches,
                self.workload,
                self.cfg.eval_samples,
                self.phase,
                self.reading,
            )
        # Nothing communicates from the loss to here, so an evaluation is done as a whole.
        loss = scores.get(self.workload.score_names[0])
        if state.schedule is not None and loss is not None:
            state.schedule.see_loss(loss, state.optimizers)
        return scores

    def report(self, record: dict[str, Any]) -> None:
        """Pass the newest record to the observers; all ranks keep it, in case rank 0 is lost."""
        self.state.session.newest = record
        self.state.session.reported = self.state.step
        self.observers.record(record)

    def compare_and_save(self) -> None:
        """Save a checkpoint of the newest step. (all ranks)"""
        # (all ranks) No checkpoint may contain a state on which ranks disagree.
        self.compare()
        self.instruments.pause(self.save())

    def save(self, final: bool = False) -> float:
        """Save a checkpoint of the newest step; return the seconds that it took. (all ranks)"""
        self.phase("checkpoint")
        with evaluated_weights(self.state.optimizers, back=not final):
            return save_checkpoint(
                self.spec, self.mesh, self.state, self.workload, self.writer, final
            )

    def compare(self, again: bool = False) -> None:
        """Compare the replicas, and heal a minority; once a step, or `again`. (all ranks)"""
        state = self.state
        compared = state.session.compared == state.step
        if not self.cfg.hash_every or (compared and not again):
            return
        # Weights that are still on their way would differ. One that is healed changes.
        self.par.settle()
        self.writer.finish_copy()
        losses = [loss.item() for loss in self.par.own_losses]
        healed, warning = replicas.compare(state, self.mesh, losses, self.certify)
        state.session.compared = state.step
        self.guards.count_healed(healed)
        if warning:
            self.warn(warning)

    def certify(self, hashes: dict[str, Any]) -> None:
        """Append the hashes of the newest state to hashes.jsonl. (written by rank 0 only)"""
        if self.mesh.rank == 0:
            line = {"step": self.state.step, "attempt": self.spec.attempt, **hashes}
            append(self.spec.folder, line)

    def end_run(self, order: Order) -> dict[str, Any]:
        """Save the newest state, and return the outcome of the run as plain data. (all ranks)"""
        state = self.state
        # No step is under way any more, also where this group formed only to save the state of one
        # that lost a rank in the middle of a step. What follows belongs to the last completed step.
        state.session.current = state.step

        # (all ranks) On a GPU the newest steps have not been judged yet.
        samples_before = state.samples - self.batch.global_size
        self.follow(self.guards.decide(True, self.explain, samples_before))

        # (all ranks) Without a step of this command the checkpoint that it resumed is still there.
        if state.step > state.session.begun:
            self.compare()
            self.save(final=True)
        set_mode(state.optimizers, "eval")
        if self.reading and self.reading.has_failed:
            self.reading.raise_failure(state.step, saved=state.step > state.session.begun)
        self.phase("done")
        summary = self.instruments.summary()
        precision, resumed_from = self.cfg.precision, self.spec.resume
        reason = self.exit_reason(order)
        return outcome(self.mesh, state, precision, resumed_from, reason, summary)

    @property
    def on_target(self) -> bool:
        """Whether the newest evaluation, of this command or before it, has reached target_loss."""
        target = self.cfg.target_loss
        loss = self.state.scalars.val_loss
        return bool(target) and loss is not None and loss <= target

    def exit_reason(self, order: Order) -> str:
        """Return why the loop ended."""
        if self.state.step >= self.cfg.max_steps:
            return "finished"
        if order is Order.STOP:
            return "stopped"
        if order is Order.FINISH:
            return "stopped_by_script"
        if self.on_target:
            return "target_loss"
        return "stop_at"


def is_due(every: int, step: int) -> bool:
    """Return whether `every` divides the step; 0 is never."""
    return bool(every) and step % every == 0

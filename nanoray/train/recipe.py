"""The recipe: a configuration becomes data, model, optimizer, and the engine of each group."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nanoray.checkpoint.init_from import begin_with
from nanoray.checkpoint.resume import newest_rank_states
from nanoray.checkpoint.run_folder import RunSpec, recovers_in_place
from nanoray.checkpoint.state.train_state import TrainState
from nanoray.checkpoint.writer import CheckpointWriter
from nanoray.config import Batch, batch_for, resolve_batch
from nanoray.data.fallible import FallibleSamples
from nanoray.data.lengths import lengths_of
from nanoray.data.tokens import MicroBatches
from nanoray.faults.inject import Injector
from nanoray.models.precision import LossScaler, MeanLoss
from nanoray.observe.track.observer import Observer
from nanoray.observe.watch.watch import Watch
from nanoray.parallel.mesh import Mesh
from nanoray.parallel.plan import Loss, Plan
from nanoray.parallel.rendezvous import Order, Rendezvous
from nanoray.train.agree import note_group
from nanoray.train.broadcast_state import broadcast_state
from nanoray.train.elastic import Rejoin, TrainingGroup, warning_of_strays
from nanoray.train.engine import Engine
from nanoray.train.final_sample import sample_of
from nanoray.train.guard.guards import Guards
from nanoray.train.hardware import peak_of_all_ranks, this_device
from nanoray.train.mirror import copy_to_mirror, give_shares
from nanoray.train.model import new_model
from nanoray.train.out_of_memory import announcement, asked_of, record
from nanoray.train.saving import read_checkpoint
from nanoray.train.state_share import (
    mirrored_rank,
    require_shards,
    share_of,
    weights_of,
)
from nanoray.train.tasks import Task

log = logging.getLogger("nanoray.rank")


class Recipe:
    """The parts that this process keeps between groups of ranks, and the engine of each group."""

    def __init__(
        self,
        group: TrainingGroup,
        observers: Sequence[Observer],
        wanted: Callable[[], Order],
        injector: Injector,
        task: Task,
        replaces_lost: bool = False,
    ) -> None:
        """Make model, optimizer and data; nothing communicates.

        Where lost ranks are replaced, each rank may also keep a copy of another rank's share of a
        sharded state.
        """
        spec = group.spec
        mesh = group.mesh
        cfg = spec.config
        self._cfg = cfg
        self.fitted = group.memory.limit  # the most sequences of a micro batch; 0: as asked for
        self._wanted = wanted
        # Mirrors cost memory, and serve only a run that replaces lost ranks.
        in_place = replaces_lost and recovers_in_place(cfg, mesh.backend, mesh.slots)
        self._mirrors = in_place and cfg.mirrors(mesh.backend)
        self.device = this_device(mesh)
        self.task = task

        # A fault can change weights, of the model that the present group uses.
        self._injector = injector
        injector.model_of = lambda: self.state.model

        # The state of the run, at step 0. All ranks draw the same initial weights.
        torch.manual_seed(cfg.seed)
        model = new_model(task, cfg, mesh.device)
        self.scaler = LossScaler(mesh.device, cfg.precision.startswith("fp16"), late=cfg.pure)
        fp16_scaler = self.scaler if self.scaler.enabled else None
        self.guards = Guards(cfg, self.batch_for(mesh), mesh.device, fp16_scaler)
        self.state = TrainState(model, task.optimizer(model, None), self.scaler, self.guards)
        self.state.schedule = task.schedule
        self.data = self.task.data(mesh.device)

        # Whatever observes.
        takes_over = group.source is not None or spec.attempt > 0
        self.watch = Watch(spec, mesh.slot, observers, model, self.scaler.scale, takes_over)
        self.observers = self.watch.observers
        self.writer = CheckpointWriter(spec, self.observers.note, self.observers.saved)

    @property
    def model(self) -> nn.Module:
        """The model of the present group. The state alone keeps it: it may refer to the group."""
        return self.state.model

    def batch_for(self, mesh: Mesh) -> Batch:
        """Return how the group's ranks share the global batch, whose size is fixed."""
        data_ranks_of_all_slots = mesh.slots // mesh.layout.replica_ranks
        batch = batch_for(self._cfg, data_ranks_of_all_slots, mesh.layout.dp, self.fitted)
        # None for a group that forms only to save: it does no step.
        return batch or resolve_batch(self._cfg, data_ranks_of_all_slots)

    def build(self, group: TrainingGroup) -> Engine:
        """Build the engine of a group; afterwards `state` holds the state of the run. (all ranks)"""
        before = self.batch_for(group.mesh)
        self.fitted = group.memory.limit
        if group.memory.why and group.mesh.rank == 0:
            now = self.batch_for(group.mesh)
            self.observers.note(announcement(group.memory.why, before, now))
            asked = asked_of(self._cfg, group.mesh)
            record(group.spec.folder, self.state.step + 1, asked, group.memory)

        if group.source is not None:
            par = self.rejoined(group, group.source)
        elif self.state.whole:
            par = self.again(group)
        elif group.spec.resume:
            par = self.resumed(group)
        else:
            par = self.fresh(group)
        return self.wire(group, par)

    # The four cases: where the state of the run comes from.

    def again(self, group: TrainingGroup) -> Plan:
        """Go on in this process alone with the state that it has."""
        par, _ = self.cut_model(group)
        return par

    def fresh(self, group: TrainingGroup) -> Plan:
        """Begin at step 0, with the weights of rank 0. (all ranks)"""
        # Weights that were trained before replace the random ones, while the model is whole.
        if self._cfg.init_from:
            begin_with(self.model, self._cfg.init_from, group.mesh)

        par, owner = self.cut_model(group)
        self.hold_share(par, group.mesh, owner)
        # CPUs of different models may initialise weights differently.
        broadcast_state(self.state, group.mesh, 0)
        return par

    def resumed(self, group: TrainingGroup) -> Plan:
        """Continue from a checkpoint on disk. (all ranks)"""
        spec = group.spec
        state = self.state
        par, owner = self.cut_model(group)
        self.hold_share(par, group.mesh, owner)
        note = self.observers.note
        saved = read_checkpoint(spec.resume, self._cfg, spec.dataset, group.mesh, state, note)
        loader_note = self.task.load_data(lambda: (saved.rng, saved.meta["samples_seen"]))
        if loader_note:
            note(loader_note)
        for line in self.task.compare(saved.meta):
            note(line)
        state.load(saved)
        copy_to_mirror(state, group.mesh)
        return par

    def rejoined(self, group: TrainingGroup, source: int) -> Plan:
        """Continue from the memory of the ranks that are left; nothing is repeated. (all ranks)"""
        spec = group.spec
        mesh = group.mesh
        state = self.state
        is_new = not state.whole  # this process has replaced a lost rank
        par, owner = self.cut_model(group)
        wanted = share_of(self.task, par, state, self._cfg, owner)
        if wanted is None:
            broadcast_state(state, mesh, source)
        else:
            weights = weights_of(par, state.model)
            give_shares(state, mesh, source, wanted, weights, self._cfg.grad_clip)
        if group.strays:
            self.guards.count_healed(len(group.strays))
            self.observers.note(f"warning  {warning_of_strays(group)}")

        # A new rank's stream goes on from the newest checkpoint, and skips the batches since then.
        if is_new:
            self.task.load_data(partial(newest_rank_states, spec.checkpoints, spec.resume))

        # Another process may have become rank 0: it opens the files, and reports a lost record.
        observers = self.observers
        observers.open(mesh.rank, state.reported_step)
        observers.catch_up(state.session.newest, state.reported_step)
        observers.note(
            f"rejoin  from step {state.step} in the memory of rank {source}; no step is repeated"
        )
        return par

    def cut_model(self, group: TrainingGroup) -> tuple[Plan, int]:
        """Prepare the model for a group; return its plan, and the rank to mirror. (all ranks)"""
        mesh = group.mesh
        state = self.state
        # A group that is gone had cut the model for its own ranks: start from a whole one. Its
        # initial weights are overwritten, so the random generators must not advance.
        if state.left is not None:
            with torch.random.fork_rng(devices=[]):
                state.model = new_model(self.task, self._cfg, mesh.device)

        # Another rank keeps a copy of this rank's share, and this rank one of `owner`'s.
        distance, owner = mirrored_rank(mesh) if self._mirrors else (0, 0)

        accum = self.batch_for(mesh).accum
        loss = self.loss_on(mesh)
        par = Plan(
            self.model,
            mesh,
            self._cfg,
            accum,
            loss,
            self.scaler,
            distance,
            self.task.script,
        )
        state.take_left()
        if self._cfg.grad_compress != "none" and par.compressor is None:
            self.observers.note(
                f"note    grad_compress = {self._cfg.grad_compress} does nothing: one data rank "
                "sends no gradients"
            )
        return par, owner

    def loss_on(self, mesh: Mesh) -> Loss:
        """Return the function of the mean loss of a batch, in the run's precision."""
        return MeanLoss(mesh.device.type, self._cfg.precision, self.task.loss)

    def hold_share(self, par: Plan, mesh: Mesh, owner: int) -> None:
        """Let `state` be this rank's share, where it is sharded. (all ranks)"""
        require_shards(par, mesh, self._cfg)
        mine = share_of(self.task, par, self.state, self._cfg, owner)
        if mine is not None:
            self.state.hold(mine)

    def wire(self, group: TrainingGroup, par: Plan) -> Engine:
        """Connect the parts of an engine, now that `state` holds the state of the run. (all ranks)"""
        spec = group.spec
        mesh = group.mesh
        state = self.state
        # From here on this rank can serve others, and the driver sees where it began.
        state.whole = True
        self.watch.begin_at(state.step)
        if mesh.rank == 0:
            note_group(spec, mesh, state.step, self.fitted)

        # The parts of this group alone.
        batch = self.batch_for(mesh)
        lengths = lengths_of(self._cfg)
        batches = MicroBatches(self.data, batch, par.data_rank, lengths, par.part)
        peak = peak_of_all_ranks(self.device, mesh, self._cfg.precision)
        workload = self.task.workload(self.loss_on(mesh), mesh.device, self._cfg.precision, peak)
        instruments = self.watch.instruments(
            spec, mesh, par, state, batches, workload, self._injector
        )
        log.info("built the model")
        # Only now: a group that broke before it trains must not have written.
        if group.source is not None:
            self.writer.go_on(spec, mesh.rank)
        return Engine(
            spec=spec,
            mesh=mesh,
            state=state,
            par=par,
            batches=batches,
            guards=self.guards,
            scaler=self.scaler,
            observers=self.observers,
            writer=self.writer,
            workload=workload,
            instruments=instruments,
            wanted=self._wanted,
            regrouped=group.source is not None,
        )

    # Between groups, and at the end.

    def wait_for_orders(
        self, rejoin: Rejoin, lost: str, is_short: bool
    ) -> tuple[RunSpec, Rendezvous]:
        """Wait until the driver has replaced a lost rank; return the next spec and rendezvous.

        is_short: this rank has run out of memory.
        """
        self.watch.group_lost(self.state.step + 1, is_short)
        return rejoin(lost)

    def ended(self, outcome: dict[str, Any], checkpoints: Path) -> None:
        """Add a sample of the model to the outcome of a finished run; report the outcome."""
        if self.observers.opened and outcome["exit_reason"] == "finished":  # rank 0 only
            # Where no rank has all weights, or layers attend to keys of other ranks, the model is
            # read from the newest checkpoint.
            is_whole = self.state.weights is None and self._cfg.cp == 1
            own = self.model if is_whole else None
            outcome["sample"] = sample_of(self.task, own, checkpoints, self.observers.note)
        self.observers.ended(outcome)

    def close(self) -> None:
        """Finish what is still being written, and close this process' files."""
        self.writer.close()
        if isinstance(self.data, FallibleSamples):
            self.data.close()
        self.watch.close()

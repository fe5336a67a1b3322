"""The recipe: a configuration becomes data, model, optimizer, and the engine of each group."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from nanoray.base.points import reached
from nanoray.checkpoint.begin import begin_with
from nanoray.checkpoint.find import newest_rank_states, newest_valid
from nanoray.checkpoint.run import RunSpec
from nanoray.checkpoint.writer import CheckpointWriter
from nanoray.config import Batch, batch_for, resolve_batch
from nanoray.data.fallible import FallibleSamples
from nanoray.data.lengths import length_at
from nanoray.data.tokens import MicroBatches
from nanoray.errors import ConfigError, NanorayError
from nanoray.faults.plan import Injector
from nanoray.faults.progress import UNKNOWN, ProgressFile
from nanoray.host.peaks import peak_flops
from nanoray.mesh.layout import mirrored, split_groups
from nanoray.mesh.mesh import Mesh
from nanoray.mesh.pieces import whole_shards
from nanoray.mesh.rendezvous import Order, Rendezvous
from nanoray.models.build import shape_of
from nanoray.models.fp8 import use_fp8
from nanoray.models.gpt import GPT
from nanoray.models.precision import LossScaler, MeanLoss, float32_products, weight_type
from nanoray.parallel.compile import compile_layers
from nanoray.parallel.plan import Loss, Plan
from nanoray.parallel.statistics import has_statistics
from nanoray.state.optimizer_part import notes_on_resume
from nanoray.state.rank_state import Holding, Share
from nanoray.state.train_state import TrainState
from nanoray.trace.ledger import Ledger
from nanoray.train.agree import describe_group
from nanoray.train.elastic import Rejoin, TrainingGroup, warning_of_strays
from nanoray.train.engine import Engine
from nanoray.train.fetch import share
from nanoray.train.guard.certificate import append
from nanoray.train.guard.guards import Guards
from nanoray.train.hardware import this_device
from nanoray.train.mirror import copy_to_mirror, give_shares
from nanoray.train.out_of_memory import (
    announcement,
    record,
)
from nanoray.train.saving import read_checkpoint
from nanoray.train.tasks import Task
from nanoray.train.track.observer import Observer
from nanoray.train.watch.instruments import Instruments
from nanoray.train.watch.links import Links
from nanoray.train.watch.observers import Observers
from nanoray.train.watch.precision_stats import PrecisionStats
from nanoray.train.watch.profile import Profile
from nanoray.train.watch.routing import RoutingMeans, routing_of
from nanoray.train.watch.statistics import Statistics
from nanoray.train.watch.throughput import Throughput
from nanoray.train.watch.tracing import tracing
from nanoray.train.workload import Workload

log = logging.getLogger("nanoray.rank")


def use_products(device: torch.device, precision: str) -> None:
    """Set how exact float32 matrix products and convolutions are on a GPU."""
    if device.type != "cuda":
        return
    torch.set_float32_matmul_precision(float32_products(precision))
    # Convolutions have a setting of their own.
    torch.backends.cudnn.allow_tf32 = precision != "fp32"


@contextmanager
def settings_put_back() -> Iterator[None]:
    """Put back at the end what a rank sets in torch: a program that trained may compute more itself."""
    threads = torch.get_num_threads()
    products = torch.get_float32_matmul_precision()
    convolutions = torch.backends.cudnn.allow_tf32
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions


class Recipe:
    """The parts that this process keeps between groups of ranks, and the engine of each group."""

    plan: Callable[..., Plan] = Plan
    batches = MicroBatches

    def __init__(
        self,
        group: TrainingGroup,
        observers: Sequence[Observer],
        wanted: Callable[[], Order],
        injector: Injector,
        task: Task,
        mirrors: bool = False,
    ) -> None:
        """Make model, optimizer and data; nothing communicates.

        With `mirrors` each rank also keeps a copy of another rank's share of a sharded state.
        """
        spec = group.spec
        mesh = group.mesh
        cfg = spec.config
        self._cfg = cfg
        self.fitted = group.memory.limit  # the most sequences of a micro batch; 0: as asked for
        self._wanted = wanted
        self._mirrors = mirrors
        self.device = this_device(mesh)
        self.task = task

        # A fault can change weights, of the model that the present group uses.
        self._injector = injector
        injector.model_of = lambda: self.state.model

        # The state of the run, at step 0. All ranks draw the same initial weights.
        torch.manual_seed(cfg.seed)
        model = self._new_model(mesh.device)
        self.scaler = LossScaler(mesh.device, cfg.precision.startswith("fp16"), late=cfg.pure)
        fp16_scaler = self.scaler if self.scaler.enabled else None
        self.guards = Guards(cfg, self.batch_for(mesh), mesh.device, fp16_scaler)
        self.state = TrainState(model, task.optimizer(model, None), self.scaler, self.guards)
        self.state.schedule = task.schedule
        self.data = self.task.data(mesh.device)

        # Whatever observes.
        self.observers = Observers(spec, observers)
        note = self.observers.note
        self.statistics = Statistics(cfg, self.model, self.scaler.scale, note)
        self.profile = Profile(cfg, note)
        self.progress = ProgressFile(spec.progress(mesh.slot))
        takes_over = group.source is not None or spec.attempt > 0
        self.ledger = Ledger(
            spec.ledger(mesh.slot),
            spec.started,
            takes_over,
            storage_ahead_s=spec.storage_ahead_s,
        )

        self.writer = CheckpointWriter(spec, note, self.observers.saved)

    @property
    def model(self) -> nn.Module:
        """The model of the present group. The state alone keeps it: it may refer to the group."""
        return self.state.model

    def _new_model(self, device: torch.device) -> nn.Module:
        """Make a model with initial weights."""
        model = self.task.model().to(device)
        # Weights of 16 bits, or fp8 products of weights that stay float32.
        if self._cfg.pure:
            model.to(weight_type(self._cfg.precision))
        elif self._cfg.precision == "fp8":
            use_fp8(model, self._cfg.fp8_scaling)
        if self._cfg.compile:
            compile_layers(model, self._cfg)
        return model

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
        if group.memory.why:
            self.announce_shortage(group, before)

        if group.source is not None:
            par = self.rejoined(group, group.source)
        elif self.state.whole:
            par = self.again(group)
        elif group.spec.resume:
            par = self.resumed(group)
        else:
            par = self.fresh(group)
        return self.wire(group, par)

    def announce_shortage(self, group: TrainingGroup, before: Batch) -> None:
        """Print and record that a step is done again with a smaller micro batch. (rank 0 only)"""
        if group.mesh.rank > 0:
            return
        batch = self.batch_for(group.mesh)
        depends = self.depends_on_micro()
        self.observers.note(announcement(group.memory.why, before, batch, depends))
        record(group.spec, self.state.step + 1, group.mesh, group.memory)

    def depends_on_micro(self) -> str:
        """Return what is not the same with another micro batch, beside rounding; "": nothing."""
        depends = []
        if self._cfg.model == "own":
            depends.append("what the model draws, and a loss that is no mean over samples")
        elif self._cfg.dropout:
            depends.append("the masks of dropout")
        if has_statistics(self.model):
            depends.append("the statistics of batch norms")
        if self._cfg.experts:
            depends.append("the balance of experts")
        return "; ".join(depends)

    # The four cases: where the state of the run comes from.

    def again(self, group: TrainingGroup) -> Plan:
        """Go on in this process alone with the state that it has."""
        par, _ = self.cut_model(group)
        return par

    def fresh(self, group: TrainingGroup) -> Plan:
        """Begin at step 0, with the weights of rank 0. (all ranks)"""
        # Weights that were trained before replace the random ones, while the model is whole.
        if self._cfg.init_from:
            assert isinstance(self.model, GPT), "the table of conflicts refuses others"
            begin_with(self.model, self._cfg.init_from, group.mesh)

        par, owner = self.cut_model(group)
        self.hold_share(par, group.mesh, owner)
        # CPUs of different models may initialise weights differently.
        share(self.state, group.mesh, 0)
        return par

    def resumed(self, group: TrainingGroup) -> Plan:
        """Continue from a checkpoint on disk. (all ranks)"""
        spec = group.spec
        state = self.state
        par, owner = self.cut_model(group)
        self.hold_share(par, group.mesh, owner)
        shape = shape_of(self._cfg, spec.dataset.vocab_size).to_dict()
        note = self.observers.note
        saved = read_checkpoint(spec.resume, spec, group.mesh, state, shape, note)
        loader_note = self.task.load_data(lambda: (saved.rng, saved.meta["samples_seen"]))
        if loader_note:
            note(loader_note)
        for line in self.task.compare(saved.meta):
            note(line)
        state.load(saved)
        # Of a configuration the notes on other settings say it.
        if self._cfg.model == "own":
            for line in notes_on_resume(state, saved):
                note(line)
        copy_to_mirror(state, group.mesh)
        return par

    def rejoined(self, group: TrainingGroup, source: int) -> Plan:
        """Continue from the memory of the ranks that are left; nothing is repeated. (all ranks)"""
        spec = group.spec
        mesh = group.mesh
        state = self.state
        is_new = not state.whole  # this process has replaced a lost rank
        par, owner = self.cut_model(group)
        wanted = self.share_of(par, owner)
        if wanted is None:
            share(state, mesh, source)
        else:
            weights = whole_shards(state.model) if par.weights is None else par.weights
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
                state.model = self._new_model(mesh.device)

        # Another rank keeps a copy of this rank's share, and this rank one of `owner`'s.
        distance = 0
        owner = 0
        if self._mirrors:
            local_ranks = mesh.all_gather(mesh.local_rank)
            distance, owner = mirrored(mesh.layout, mesh.rank, local_ranks)

        # Hybrid sharding sends most within a group, which should be a node.
        if self._cfg.replicas > 1:
            split = split_groups(mesh.layout, mesh.all_gather(mesh.local_rank))
            if split:
                self.observers.note(
                    f"note    replicas = {self._cfg.replicas}: the group of ranks "
                    f"{', '.join(map(str, split[0]))} lies on several nodes, and sends all gradients "
                    "and weights between them; let the ranks of a group divide those of a node"
                )

        accum = self.batch_for(mesh).accum
        loss = self.loss_on(mesh)
        par = self.plan(
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

    def require_shards(self, par: Plan, mesh: Mesh) -> None:
        """Raise ConfigError where a rank would have nothing of a script's small model. (all ranks)

        Raised on all of them: the others would wait for that rank.
        """
        if self._cfg.model != "own" or par.shards is None:
            return
        counts = mesh.all_gather(len(par.shards))
        if 0 in counts:
            raise ConfigError(
                f"dp_mode = {self._cfg.dp_mode} leaves rank {counts.index(0)} no element of this "
                "small model; use fewer ranks, or dp_mode ddp"
            )

    def share_of(self, par: Plan, owner: int) -> Share | None:
        """Return this rank's share of a sharded state at step 0, with a copy of `owner`'s.

        Without mirrors there is no copy. None: the state is not sharded.
        """
        if not self._cfg.sharded:
            return None
        make_optimizer = self.task.optimizer
        own = whole_shards(self.model) if par.shards is None else par.shards
        # A rank that has a state already keeps its optimizer until the new one is filled.
        of_whole_model = par.shards is None and not self.state.whole
        optimizer = make_optimizer(self.model, None if of_whole_model else own)
        mine = Share(
            Holding(own, optimizer, frozen=par.frozen),
            sharded=par.shards is not None,
            weights=par.weights,
            copies=par.copies,
        )
        if par.mirror_shards is not None:
            optimizer = make_optimizer(self.model, par.mirror_shards)
            mine.mirror = Holding(par.mirror_shards, optimizer, owner, par.mirror_frozen)
        return mine

    def hold_share(self, par: Plan, mesh: Mesh, owner: int) -> None:
        """Let `state` be this rank's share, where it is sharded. (all ranks)"""
        self.require_shards(par, mesh)
        mine = self.share_of(par, owner)
        if mine is not None:
            self.state.hold(mine)

    def wire(self, group: TrainingGroup, par: Plan) -> Engine:
        """Connect the parts of an engine, now that `state` holds the state of the run. (all ranks)"""
        spec = group.spec
        mesh = group.mesh
        state = self.state
        # From here on this rank can serve others, and the driver sees where it began.
        self.progress.base = state.step
        state.whole = True
        reached("shared")
        if mesh.rank == 0:
            group_line = describe_group(spec, mesh, state.step) | {"limit": self.fitted}
            append(spec.folder, group_line)

        # The parts of this group alone.
        batch = self.batch_for(mesh)
        if isinstance(self.data, FallibleSamples):
            self.data.divide(batch, par.data_rank)
        lengths = self._length_of_samples()
        batches = self.batches(self.data, batch, par.data_rank, lengths, par.part)
        workload = self._workload(mesh)
        instruments = self._instruments(group, par, batches, workload)
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

    def _instruments(
        self, group: TrainingGroup, par: Plan, batches: MicroBatches, workload: Workload
    ) -> Instruments:
        """List the instruments of this run; those that are off are left out. (all ranks)"""
        spec = group.spec
        mesh = group.mesh
        state = self.state
        note = self.observers.note
        throughput = Throughput(workload, batches, state)

        # Progress and ledger come first: the driver finds a hang by them, also in an instrument.
        instruments: list[object] = [self.progress, self.ledger]
        trace = tracing(spec, mesh, par, batches, state, note, throughput.pause)
        if trace:
            instruments.append(trace)
        # Rank 0 alone measures the statistics of layers.
        if mesh.rank == 0 and self.statistics.begin(spec.folder, state.step):
            instruments.append(self.statistics)
        # On one host there is no link to measure.
        if len(set(mesh.hosts)) > 1:
            instruments.append(Links(mesh, note))
        if self.profile.begin(spec, mesh, state.step):
            instruments.append(self.profile)
        # These average over all ranks, so they are listed on every rank or on none.
        if routing_of(self.model):
            instruments.append(RoutingMeans(state, mesh))
        if spec.config.stats_every:
            instruments.append(
                PrecisionStats(spec.config.stats_every, spec.config.precision, state, mesh)
            )
        # Planned faults fire after the others have noted the phase.
        if spec.config.faults:
            instruments.append(self._injector)
        # Throughput ends its window last, so that it contains the other measurements.
        instruments.append(throughput)
        return Instruments(instruments)

    def _length_of_samples(self) -> Callable[[int], int] | None:
        """Return the function from step to sequence length; None where it is always the same."""
        if not self._cfg.seq_warmup_steps:
            return None
        return partial(length_at, config=self._cfg)

    def _workload(self, mesh: Mesh) -> Workload:
        peak = peak_flops(self.device, self._cfg.precision) if self.device else None
        peak_of_all_ranks = peak * mesh.world_size if peak else None
        return self.task.workload(
            self.loss_on(mesh), mesh.device, self._cfg.precision, peak_of_all_ranks
        )

    # Between groups, and at the end.

    def wait_for_orders(
        self, rejoin: Rejoin, lost: str, is_short: bool
    ) -> tuple[RunSpec, Rendezvous]:
        """Wait until the driver has replaced a lost rank; return the next spec and rendezvous.

        is_short: this rank has run out of memory.
        """
        self.progress.base = UNKNOWN  # until the next group is built
        self.progress.set(self.state.step + 1, "out_of_memory" if is_short else "regroup")
        self.ledger.group_lost()
        return rejoin(lost)

    def add_sample(self, outcome: dict[str, Any], spec: RunSpec) -> None:
        """Add a sample of the trained model to the outcome, where the task has one. (rank 0 only)"""
        try:
            outcome["sample"] = self.task.closing(partial(self.whole_model, spec))
        except NanorayError as error:
            # Training is done and saved; the sample is optional.
            self.observers.note(f"warning  no sample of text: {error}")

    def whole_model(self, spec: RunSpec) -> nn.Module:
        """Return the model with all weights. (rank 0 only)

        Where no rank has all of them they are read from the newest checkpoint. So are they where
        the layers of the model attend to keys of other ranks.
        """
        if self.state.weights is None and self._cfg.cp == 1:
            return self.model
        newest, _ = newest_valid(spec.checkpoints)
        assert newest, "a run saves before it ends"
        model = self.task.model()
        model.load_state_dict(newest.state.model)
        return model

    def close(self) -> None:
        """Finish what is still being written, and close this process' files."""
        self.writer.close()
        if isinstance(self.data, FallibleSamples):
            self.data.close()
        self.observers.close()
        self.ledger.close()

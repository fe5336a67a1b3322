"""The recipe: a RunSpec and a Rendezvous become data, model, optimizer and engine. No Ray here.

`python -m nanoray.train` runs it in this process; torchrun, or RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT in the environment, make it one rank of many. The Ray actors of nanoray.launch call the
same `train`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nanoray.checkpoint.find import newest_rank_states, newest_valid
from nanoray.checkpoint.writer import CheckpointWriter
from nanoray.config import Batch, batch_for, resolve_batch
from nanoray.data.lengths import length_at
from nanoray.data.tokens import MicroBatches
from nanoray.data.verify import verify
from nanoray.devices.host import keep_freed_memory
from nanoray.devices.peaks import peak_flops
from nanoray.errors import NanorayError
from nanoray.faults.plan import Injector
from nanoray.faults.progress import UNKNOWN, ProgressFile
from nanoray.mesh.layout import Layout, mirrored
from nanoray.mesh.mesh import Mesh, join
from nanoray.mesh.pieces import whole_shards
from nanoray.mesh.rendezvous import Order, Rendezvous
from nanoray.models.build import shape_of
from nanoray.models.fp8 import use_fp8
from nanoray.models.precision import LossScaler, autocast, float32_products, weight_type
from nanoray.parallel.compile import compile_layers
from nanoray.parallel.plan import Loss, Plan
from nanoray.points import reached
from nanoray.run import RunSpec
from nanoray.state import Holding, TrainState, share
from nanoray.trace.ledger import Ledger
from nanoray.trace.log import CommLog, CommTrace
from nanoray.trace.recorder import CommRecorder
from nanoray.train.agree import (
    agree_on_precision,
    describe,
    facts,
    find_checkpoint,
    log_to,
    require_shared_folder,
    resolve_precision,
    resolved,
    told_of_group,
)
from nanoray.train.elastic import Group, Rejoin, compares, furthest, told_of_strays, train_in_groups
from nanoray.train.engine import Engine
from nanoray.train.guard.certificate import append
from nanoray.train.guard.guards import Guards
from nanoray.train.hardware import compare_hardware, this_device
from nanoray.train.mirror import copy_to_mirror, recover
from nanoray.train.saving import read_checkpoint
from nanoray.train.tasks import ConfiguredTask, Task, task_of
from nanoray.train.watch.memory_timeline import MemoryTimeline
from nanoray.train.watch.observers import Callback, Observers
from nanoray.train.watch.profile import Profile
from nanoray.train.watch.statistics import Statistics
from nanoray.train.workload import Workload

log = logging.getLogger("nanoray")


Meet = Callable[..., Mesh]  # takes what nanoray.mesh.mesh.join takes


def train(
    spec: RunSpec,
    rendezvous: Rendezvous,
    watchers: Sequence[Callback] = (),
    wanted: Callable[[], Order] = lambda: Order.GO_ON,
    store: Any = None,
    rejoin: Rejoin | None = None,
    meet: Meet = join,
    task_of: Callable[[RunSpec], Task] = task_of,
) -> dict[str, Any]:
    """Train `spec` as one rank and return the outcome as plain data. (all ranks)

    `watchers` receive notes and records on rank 0. `wanted` is called once per step: STOP on any
    rank stops all ranks after the same step, with a checkpoint; REGROUP makes them form new groups.
    `rejoin` is called for REGROUP and when a peer is lost, and returns the spec and rendezvous to
    continue with. `meet` forms the process groups. `task_of` returns model and data. Raises
    NanorayError when the run cannot start or continue.
    """
    require_shared_folder(spec, rendezvous)
    if spec.dataset.kind != "own":
        verify(spec.dataset.path, spec.dataset.tokens_sha256)
    log_to(spec.log(rendezvous.slot))
    os.environ.update(rendezvous.env)
    torch.set_num_threads(rendezvous.threads)
    if rendezvous.device == "cpu":
        keep_freed_memory()

    injector = Injector(spec.folder / "faults.jsonl")

    def meet_others(spec: RunSpec, rendezvous: Rendezvous, store: Any = None) -> Mesh:
        injector.plan(spec.config.faults, rendezvous.slot, spec.attempt, spec.started)
        reached("meet")
        log.info(
            "attempt %d, pid %d, nice %d, %s", spec.attempt, os.getpid(), os.nice(0), rendezvous
        )
        mesh = meet(
            rendezvous, facts(spec), spec.config.timeout_s, spec.config.init_timeout_s, store
        )
        reached("met")
        log.info("met the group")
        return mesh

    mesh = meet_others(spec, rendezvous, store)
    source, why, resume_step, strays = None, "", 0, tuple[int, ...]()
    if rendezvous.live:  # (all ranks) the survivors know the precision
        source, precision, _, strays = furthest(mesh, None, "", compares(spec.config))
    else:
        precision, why = agree_on_precision(mesh, resolve_precision(spec.config, mesh))
        resume, resume_step, notes = mesh.broadcast(
            find_checkpoint(spec) if mesh.rank == 0 else ("", 0, ())
        )
        spec = replace(spec, resume=resume, notes=(*spec.notes, *notes, *compare_hardware(mesh)))
    use_products(mesh.device, precision)
    task = task_of(spec)
    spec = replace(spec, config=resolved(spec.config, mesh, precision, task.settings()))
    if isinstance(task, ConfiguredTask):
        # Whose attention is no longer `auto`, as the model would not understand it
        task.spec = spec
    group = Group(spec, mesh, source, strays)
    recipe = Recipe(
        group, watchers, wanted, injector, task, bool(rejoin) and spec.config.mirrors(mesh.backend)
    )

    def wait_for_orders(lost: str) -> tuple[RunSpec, Rendezvous]:
        assert rejoin
        recipe.progress.base = UNKNOWN  # until the next group is built
        recipe.progress.set(recipe.state.step + 1, "regroup")
        recipe.ledger.group_lost()
        return rejoin(lost)

    if source is None:
        recipe.observers.open(mesh.rank, resume_step)
        for line in describe(spec, recipe.batch_for(mesh), mesh, recipe.device, why, recipe.task):
            recipe.observers.note(line)
    try:
        outcome = train_in_groups(
            group, recipe.state, recipe.build, meet_others, rejoin and wait_for_orders
        )
        if recipe.observers.callbacks and outcome["exit_reason"] == "finished":  # rank 0 only
            try:
                outcome["sample"] = recipe.task.closing(partial(recipe.whole_model, spec))
            except NanorayError as error:  # training is done and saved; a sample is optional
                recipe.observers.note(f"warning  no sample of text: {error}")
    finally:
        recipe.writer.close()
        recipe.observers.close()
        recipe.ledger.close()
    return outcome


def use_products(device: torch.device, precision: str) -> None:
    """Let float32 matrix products and convolutions on a GPU be as exact as a precision wants them."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision(float32_products(precision))
        # Convolutions have a setting of their own
        torch.backends.cudnn.allow_tf32 = precision != "fp32"


class Recipe:
    """What this process keeps between groups of ranks, and how it builds an engine for a group."""

    plan: Callable[..., Plan] = Plan
    batches = MicroBatches

    def __init__(
        self,
        group: Group,
        watchers: Sequence[Callback],
        wanted: Callable[[], Order],
        injector: Injector,
        task: Task,
        mirrors: bool = False,
    ) -> None:
        """Make model, optimizer and data; nothing communicates. `mirrors`: another rank has each
        rank's share, too.
        """
        spec, mesh = group.spec, group.mesh
        cfg = self._cfg = spec.config
        self._wanted, self.device, self._mirrors = wanted, this_device(mesh), mirrors
        self._length_at = partial(length_at, config=cfg) if cfg.seq_warmup_steps else None
        torch.manual_seed(cfg.seed)  # the same initial weights on every rank
        self.task = task
        self._injector, injector.model_of = injector, lambda: self.state.model
        model = self._new_model(mesh.device)
        self.scaler = LossScaler(mesh.device, cfg.precision.startswith("fp16"), late=cfg.pure)
        self.guards = Guards(
            cfg, self.batch_for(mesh), mesh.device, self.scaler if self.scaler.enabled else None
        )
        self.state = TrainState(model, task.optimizer(model, None), self.scaler, self.guards)
        self.data = self.task.data(mesh.device)
        self.observers = Observers(spec, watchers)
        self.statistics = Statistics(cfg, self.model, self.scaler.scale, self.observers.note)
        self.memory = MemoryTimeline(cfg, self.observers.note)
        self.profile = Profile(cfg, self.observers.note)
        self.writer = CheckpointWriter(spec, self.observers.note, self.observers.saved)
        self.progress = ProgressFile(spec.progress(mesh.slot))
        self.ledger = Ledger(
            spec.ledger(mesh.slot), spec.started, group.source is not None or spec.attempt > 0
        )

    @property
    def model(self) -> nn.Module:
        """The model of the present group. Only the state keeps it, because it may refer to the
        group.
        """
        return self.state.model

    def _new_model(self, device: torch.device) -> nn.Module:
        """Make a model with initial weights."""
        model = self.task.model().to(device)
        if self._cfg.pure:
            model.to(weight_type(self._cfg.precision))
        elif self._cfg.precision == "fp8":
            use_fp8(model, self._cfg.fp8_scaling)
        if self._cfg.compile:
            compile_layers(model, self._cfg)
        return model

    def batch_for(self, mesh: Mesh) -> Batch:
        """Return how the group's ranks share the global batch, whose size is fixed."""
        full, now = (Layout.of(self._cfg, ranks).dp for ranks in (mesh.slots, mesh.world_size))
        # Ranks that only save do no step
        return batch_for(self._cfg, full, now) or resolve_batch(self._cfg, full)

    def build(self, group: Group) -> Engine:
        """Build the engine of a group; afterwards `state` holds the state of the run. (all ranks)"""
        spec, mesh, state, observers = group.spec, group.mesh, self.state, self.observers
        batch, known = self.batch_for(mesh), state.whole
        loss = partial(mean_loss, mesh.device.type, self._cfg.precision, loss=self.task.loss)
        layout = Layout.of(self._cfg, mesh.world_size)
        distance, owner = (
            mirrored(layout, mesh.rank, mesh.all_gather(mesh.local_rank))
            if self._mirrors
            else (0, 0)
        )
        if state.left is not None:  # the model was cut, for a group that is gone
            with torch.random.fork_rng(devices=[]):
                state.model = self._new_model(mesh.device)
        par = self.plan(self.model, mesh, self._cfg, batch.accum, loss, self.scaler.scale, distance)
        state.take_left()
        # Of this group: what another number or set of ranks had left over is gone
        state.memory = par.memory
        if self._cfg.grad_compress != "none" and not par.compresses:
            observers.note(
                f"note    grad_compress = {self._cfg.grad_compress} does nothing: one data rank "
                "sends no gradients"
            )
        if self._cfg.sharded:
            kept = self._holdings(par, mesh.rank, owner, known)
            if group.source is not None:
                whole = whole_shards(self.model) if par.weights is None else par.weights
                recover(state, mesh, group.source, kept, self._cfg.grad_clip, whole)
            state.hold(kept[0], kept[1] if distance else None, par.shards is not None, par.weights)
        if group.source is not None:
            if not self._cfg.sharded:
                share(state, mesh, group.source)
            if group.strays:
                self.guards.count_healed(len(group.strays))
                observers.note(f"warning  {told_of_strays(group)}")
            # A new rank: its loader goes on from the newest checkpoint, and skips what was read
            # since
            if not known:
                self.task.load_data(partial(newest_rank_states, spec.checkpoints, spec.resume))
            observers.open(mesh.rank, state.reported_step)
            observers.catch_up(state.session.newest, state.reported_step)
            observers.note(
                f"rejoin  from step {state.step} in the memory of rank {group.source}; no step is "
                "repeated"
            )
            if par.memory is not None:
                observers.note(
                    "rejoin  what compressed gradients had left to send is gone with the group"
                )
        elif spec.resume:
            shape = shape_of(self._cfg, spec.dataset.vocab_size).to_dict()
            saved = read_checkpoint(spec.resume, spec, mesh, state, shape, par, observers.note)
            if note := self.task.load_data(lambda: (saved.rng, saved.meta["samples_seen"])):
                observers.note(note)
            state.load(saved)
            copy_to_mirror(state, mesh)
        else:
            share(state, mesh, 0)  # CPUs of different models may initialise weights differently
        self.progress.base, state.whole = state.step, True
        reached("shared")
        if mesh.rank == 0:
            append(spec.folder, told_of_group(spec, mesh, state.step))
        trace = comm_trace(spec, mesh, par, state.reported_step)
        listeners: list[Callable[[int, str], None]] = [self.progress.set, self.ledger.on_phase]
        listeners += [trace.on_phase] if trace else []
        listeners += self.statistics.begin(spec.folder, state.step) if mesh.rank == 0 else []
        listeners += self.memory.begin(spec, mesh, par, state, batch)
        listeners += self.profile.begin(spec, mesh, state.step)
        listeners += [self._injector] if spec.config.faults else []
        log.info("built the model")
        # Only now: the group that writes may not break before it trains
        if group.source is not None:
            self.writer.go_on(spec, mesh.rank)
        return Engine(
            spec=spec,
            mesh=mesh,
            state=state,
            par=par,
            batches=self.batches(self.data, batch, par.data.index, self._length_at),
            guards=self.guards,
            scaler=self.scaler,
            observers=observers,
            writer=self.writer,
            workload=self._workload(mesh, loss),
            wanted=self._wanted,
            listeners=listeners,
            trace=trace,
            regrouped=group.source is not None,
        )

    def _holdings(self, par: Plan, rank: int, owner: int, known: bool) -> list[Holding]:
        """Return what this rank keeps, at step 0: own shards, and those that it mirrors. `known`:
        it has others now.
        """
        own = whole_shards(self.model) if par.shards is None else par.shards
        kept = [
            (own, rank),
            *([(par.mirror_shards, owner)] if par.mirror_shards is not None else []),
        ]
        whole, make = par.shards is None and not known, self.task.optimizer
        return [
            Holding(shards, make(self.model, None if whole else shards), owner)
            for shards, owner in kept
        ]

    def whole_model(self, spec: RunSpec) -> nn.Module:
        """Return the model with all weights, from the newest checkpoint where no rank has them.
        (rank 0 only)
        """
        if not self.state.shards_weights:
            return self.model
        newest, _ = newest_valid(spec.checkpoints)
        assert newest, "a run saves before it ends"
        model = self.task.model()
        model.load_state_dict(newest.state.model)
        return model

    def _workload(self, mesh: Mesh, loss: Loss) -> Workload:
        peak = peak_flops(self.device, self._cfg.precision) if self.device else None
        total = peak * mesh.world_size if peak else None
        return self.task.workload(loss, mesh.device, self._cfg.precision, total)


def mean_loss(
    device_type: str,
    precision: str,
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    loss: Loss | None = None,
) -> Tensor:
    """Return a model's mean loss over a batch, computed in the run's precision; without `loss` it
    is model(x, y).
    """
    with autocast(device_type, precision):
        return loss(model, x, y) if loss else model(x, y)


def comm_trace(spec: RunSpec, mesh: Mesh, par: Plan, resume_step: int) -> CommTrace | None:
    """Return the tracer of the run's collectives, or None where tracing is off. (all ranks)"""
    cfg = spec.config
    if not cfg.trace_every or mesh.world_size == 1:
        return None
    profile = cfg.dp_mode == "ddp" and cfg.tp * cfg.pp == 1 and cfg.grad_compress == "none"
    recorder = CommRecorder(mesh, cfg.trace_every, par.reduce, profile, par.data)
    twin = par.add_twin(recorder.hook)
    names = partial(recorder.buckets, twin) if twin else lambda: par.bucket_names
    sizes = {
        "tp": cfg.tp,
        "pp": cfg.pp,
        "dp": par.data.size,
        "ep": cfg.ep,
        "edp": par.data.size // cfg.ep,
    }
    bubble = par.bubble if cfg.pp > 1 else None
    log_of_all = None
    if mesh.rank == 0:
        log_of_all = CommLog(
            spec.folder / "comm", resume_step, spec.attempt, sizes, bubble, spec.started
        )
    return CommTrace(mesh, recorder, names, log_of_all)

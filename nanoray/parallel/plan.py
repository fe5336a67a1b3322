"""The parallelism of a model on a mesh. The loop calls the methods of one Plan and names no mode.

A Plan is built in three steps:

    cut                  whole, seeded model ─► over tp (tp.py) ─► cp (cp.py) ─► pp (pp.py) ─► ep (ep.py)
    flow_of              how micro batches pass through what is left: straight (flow.py) or a pipeline (pp.py)
    make_data_parallel   how data ranks share the batch: ddp.py, buckets.py, fsdp.py, or ep.py

A step calls its methods in this order:

    forward_backward ─► grad_norm ─► clip ─► (the optimizer's update) ─► spread ─► zero_grad
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nanoray.config import Config
from nanoray.config.mesh import AXES
from nanoray.models.modules import Undisturbed
from nanoray.models.precision import LossScaler
from nanoray.models.weighted import mean_of
from nanoray.parallel import cp, ep, hybrid, pp, tp
from nanoray.parallel.axis import Axis, axes_of, data_axis
from nanoray.parallel.buckets import BY_HAND, Buckets
from nanoray.parallel.compress import Compressor
from nanoray.parallel.ddp import TorchDDP
from nanoray.parallel.flow import Flow, Loss, MicroBatch, Phase, Seed, Straight
from nanoray.parallel.fsdp import FSDP, frozen_to_cut
from nanoray.parallel.hooks import StepHook
from nanoray.parallel.hybrid import Groups
from nanoray.parallel.mesh import Mesh
from nanoray.parallel.mode import DataParallel, Hook
from nanoray.parallel.norm import clip_to, norm_of_owned
from nanoray.parallel.pieces import Piece, Shard, whole_shards
from nanoray.parallel.residual_stream import PartialGradients
from nanoray.parallel.running_statistics import RunningStatistics, has_statistics
from nanoray.parallel.script_hooks import ScriptHooks

Axes = Mapping[str, Axis]  # by name, see axes_of
SHARDED = ("zero1", "zero2", "fsdp")  # modes in which a rank updates a part of the parameters


class Plan:
    """How the ranks of a mesh train one model together.

    Replicas of the model share the batch, and exchange gradients once per step. `dp_mode` decides
    which weights, gradients and optimizer state a rank keeps. With `tp` or `pp` a replica is
    several ranks, which read the same samples: each has a part of every layer, or some layers.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        config: Config,
        accum: int,
        loss: Loss,
        scaler: LossScaler,
        mirror: int = 0,
        script: ScriptHooks | None = None,
    ) -> None:
        """Prepare `model` for this mesh. (all ranks)

        accum: micro batches per step. `loss` returns the loss of a batch, in the run's precision;
        `scaler` scales it before its backward (fp16). mirror: with ZeRO and fsdp, rank r + mirror
        keeps a second copy of rank r's share; 0: there is none. script: for a model of a script.

        All ranks must hold equal weights, or receive them before the first step. Weights that are
        cut or sharded are sent here, by rank 0, because afterwards no rank has all of them.
        """
        for axis in AXES:
            divided = getattr(mesh.layout, axis.key) == getattr(config, axis.key)
            assert divided, f"the mesh has another {axis.key} than the configuration"
        axes = axes_of(mesh, config.timeout_s)
        self.model = model
        self.data = axes["dp_cp"]  # the ranks whose gradients are averaged
        self.data_rank = axes["dp"].index  # whose samples this rank reads
        self.part = cp.part_of(axes["cp"])  # which positions of them; None: all
        self._mesh = mesh
        self._axes = axes
        self._accum = accum
        self._loss = loss
        self._scaler = scaler

        # One data rank has nothing to share: torch's wrapper is left out, and so is every exchange.
        mode = config.dp_mode if self.data.size > 1 else "ddp"
        # torch's DDP leaves equal gradients on all ranks: nothing is mirrored, or sent afterwards.
        self._shares_updates = mode != "ddp"
        # Whether another rank has the same gradients, once all ranks know the norm
        self._is_replicated = config.replicated(mesh.slots)
        # Whether they are sent to another rank
        self._is_mirrored = mirror > 0 and self._shares_updates and not self._is_replicated
        self._is_split = config.model_ranks > 1
        if config.model_parts > 1 or mode == "fsdp":
            for tensor in [*model.parameters(), *model.buffers()]:
                mesh.broadcast_tensor(tensor.data, 0)

        # Cut the replica, choose the order of its forwards and backwards, share the batch.
        stage, mirrored_experts = cut(model, axes, config, mirror)
        self.flow = flow_of(model, stage, axes, config, accum, loss, scaler, mesh.device)
        # None: one data rank sends no gradients
        self.compressor: Compressor | None = None
        if config.grad_compress != "none" and self.data.size > 1:
            self.compressor = Compressor(self.data, config.grad_compress)
        # Hybrid sharding: the ranks that share the work are one group of several.
        groups: Groups | None = None
        if axes["replica"].size > 1 and mode in SHARDED:
            groups = Groups(axes["dp_cp"], axes["replica"])
        self.copies = groups.count if groups else 1  # of the whole sharded state
        self._mode = make_data_parallel(
            model, mode, axes, config, self.compressor, mirror, mirrored_experts, groups, script
        )
        self.shards, self.weights = owned_shards(model, mode, axes, self._mode, groups)
        # This rank's shards of frozen weights, where a group of ranks cuts them
        self.frozen = [*self._mode.frozen_shards]
        if groups:
            self.frozen = hybrid.with_owners(self.frozen, groups)
        if config.dp_mode == "fsdp" and mode != "fsdp":
            self.frozen = frozen_to_cut(model)

        # What the optional features add to a step: nothing in a plain run.
        self._hooks: list[StepHook] = []
        if isinstance(self.flow, pp.Pipe) and stage is not None and stage.tied is not None:
            self._hooks.append(pp.TiedEmbedding(self.flow, self._mode, stage.tied))
        if partial := tp.names_of_partial(model):
            self._hooks.append(PartialGradients(self.shards or [], partial, axes["tp"]))
        if has_statistics(model):
            self._hooks.append(RunningStatistics(model, self.data, config.sync_batchnorm))
        if self.compressor is not None:
            self._hooks.append(self.compressor)
        self._script = script
        if script:
            self._hooks += script.hooks(model, self._mode, mesh, self.data)

        # The losses that `forward_backward` has returned in the newest step
        self.own_losses: list[Tensor] = []

    # What the loop and the recipe read.

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that have gradients, by name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @property
    def gradients(self) -> list[Tensor]:
        """The gradients that this rank updates with."""
        return self._mode.gradients

    @property
    def mirror_shards(self) -> list[Shard] | None:
        """The shards of another rank that this rank updates as well; None: nothing is mirrored."""
        return self._mode.mirror_shards

    @property
    def mirror_frozen(self) -> list[Shard]:
        """Copies of another rank's shards of frozen weights, beside `mirror_shards`."""
        return [*self._mode.mirror_frozen]

    # A step, in the order of its calls.

    def forward_backward(
        self, micro_batches: Iterator[MicroBatch], phase: Phase, seed: Seed
    ) -> Tensor:
        """Run a step's micro batches; afterwards gradients are means over all ranks. (all ranks)

        The factor of that mean is on the loss, so what follows is a sum. `phase` is called when a
        phase begins, `seed` with the number of a micro batch before its forward. Returns the mean
        loss of this rank's replica, detached, a scalar on the device.
        """
        # A plain run has no hooks: its step is the flow, and the mode in it.
        for hook in self._hooks:
            hook.begin()
        loss = self.flow.run(self._mode, micro_batches, phase, seed)
        for hook in self._hooks:
            hook.add_up()

        self.own_losses = [loss]
        return loss

    def complete_gradients(self) -> bool:
        """Take the loss scale of fp16 out of the gradients, and send them to a mirror. (all ranks)

        Returns whether the other ranks can finish this step when a rank is lost after the norm.
        """
        if self._scaler.enabled:
            self._scaler.unscale(self.gradients)
        # Only where no other rank has them
        if self._is_mirrored:
            return self._mode.mirror_gradients()
        return self._is_replicated

    def grad_norm(self) -> Tensor:
        """Return the norm of the whole model's gradient, a scalar on the device. (all ranks)"""
        if self._is_split:
            # No mode sees all ranks of a cut model: add up what each rank owns, over the whole mesh.
            owned = []
            for shard in self.shards or ():
                if shard.owner and shard.param.grad is not None:
                    owned.append(shard.param.grad)
            norm = norm_of_owned(owned, data_axis(self._mesh), self._mesh.device)
        else:
            norm = self._mode.norm()
        if self._scaler.enabled:
            norm = self._scaler.norm(norm)
        return norm

    def clip(self, limit: float, norm: Tensor) -> None:
        """Scale the gradients so that their norm, which is `norm` now, is at most `limit`."""
        clip_to(limit, [*self._mode.gradients, *self._mode.mirrored_gradients], norm)

    def spread(self, left_out: Tensor | None = None) -> None:
        """Start to send updated weights to the ranks that have not updated them. (all ranks)

        Running statistics change here, with the weights, unless the update was left out: `left_out`
        is 1 on the device.
        """
        for hook in self._hooks:
            hook.commit(left_out)
        if self._shares_updates:
            self._mode.spread()
        for hook in self._hooks:
            hook.sent()

    def forget_gathered(self) -> None:
        """Free weights that forwards without a backward have gathered and kept.

        Whatever changes shards afterwards, such as a replica that is healed, would be overlooked by
        the next forward.
        """
        self._mode.forget_gathered()

    def undo(self) -> None:
        """Undo what the forwards of a step that broke have changed in the model's buffers."""
        for hook in self._hooks:
            hook.undo()

    def settle(self) -> None:
        """Wait until the weights are complete; a forward waits by itself."""
        self._mode.settle()

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self._mode.zero_grad()
        for hook in self._hooks:
            hook.drop()

    # Other passes than those of a step. They leave the model's buffers as they were.

    def undisturbed(self) -> AbstractContextManager[object]:
        """Return a context after which a script's model has its buffers and extra states of before.

        What else the script's code changes in a forward stays (docs/contract.md).
        """
        # nanoray's own models change nothing outside of a step.
        if self._script is None:
            return nullcontext()
        return Undisturbed(self.model)

    def gradients_of(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Return the gradients of one micro batch, before any sum, by name; it sends nothing.

        They are those of a step's backward. The gradients of the parameters stay as they are. For
        a model that is whole on this rank.
        """
        # torch.autograd.grad leaves `.grad` and its hooks alone, so no bucket is filled.
        loss = mean_of(self._loss(self.model, x, y)) / (self._accum * self._mode.divisor)
        trained = self.trained
        gradients = torch.autograd.grad(
            self._scaler.scale(loss), list(trained.values()), allow_unused=True
        )
        named = zip(trained, gradients, strict=True)
        return {name: gradient for name, gradient in named if gradient is not None}

    def warm_up(self, x: Tensor, y: Tensor) -> None:
        """Run forward and backward passes whose results are thrown away. (all ranks)

        DDP regroups its buckets after the first backward, which changes the order of sums. After
        the regrouping, every step of a fresh and of a resumed run sums in the same order, so resume
        is bit-exact at 3 and more ranks (for a script's model see script/skipping_ddp.py). The
        warm-up also compiles the model, and detects a lack of
        memory, before the first step.
        """
        # The last group may have broken between its update and what a script does after it.
        for hook in self._hooks:
            hook.sent()
        with Undisturbed(self.model):
            self.flow.warm_up(self._mode, x, y)
            self.zero_grad()
            # The first loss shows whether a script's losses come with weights.
            if self._script and self.flow.found_weights and not self.flow.takes_weights:
                self.flow = self._script.weighted_flow(
                    self.model,
                    self._accum,
                    self._loss,
                    self._scaler,
                    self._mesh.device,
                    self.data,
                )

            # The second wrapper has buckets of its own, which are regrouped at its second forward.
            if self._mode.has_twin():
                self._mode.trace(True)
                for _ in range(2):
                    self.flow.warm_up(self._mode, x, y)
                    self.zero_grad()
                self._mode.trace(False)

    # Measuring, and the end.

    def trace(self, traced: bool) -> None:
        """Choose whether the collectives of the next step are measured. (all ranks)"""
        self._mode.trace(traced)

    def add_twin(self, hook: Hook) -> nn.Module | None:
        """Wrap the model a second time, for steps whose collectives are measured. (all ranks)

        None where a second wrapper measures nothing: buckets by hand note themselves, and torch's
        DDP is in no pipeline.
        """
        return self._mode.add_twin(hook) if self.flow.has_twin else None

    @property
    def reduce(self) -> Callable[[Tensor], object] | None:
        """The function that starts torch DDP's all-reduce of a bucket, where it is hand-written."""
        return self._mode.reduce

    @property
    def bucket_names(self) -> dict[int, list[str]]:
        """The parameters of each bucket by hand; empty for fsdp, and for torch's DDP, whose hook
        receives them.
        """
        return self._mode.bucket_names

    def close(self) -> None:
        """Stop the thread of a hand-written all-reduce, and leave the axes' groups. (all ranks)"""
        self._mode.close()
        if not self._mode.keeps_groups:
            for axis in self._axes.values():
                axis.leave()


class CutModel(NamedTuple):
    """What cutting a model leaves behind, besides the model."""

    stage: pp.Stage | None  # the model, if it is a stage of a pipeline now
    mirrored_experts: Mapping[str, tuple[Tensor, Piece]] | None  # copies for another rank, by name


def cut(model: nn.Module, axes: Axes, config: Config, mirror: int) -> CutModel:
    """Keep this rank's part of a whole model, in place. (all ranks) Nothing is sent.

    Layers are cut first, then divided among stages, then experts among ranks: each cut starts from
    the pieces that the one before has left.
    """
    tensor = axes["tp"]
    stages = axes["pp"]
    experts = axes["ep"]

    if tensor.size > 1:
        tp.cut(model, tensor, config.sequence_parallel)

    if axes["cp"].size > 1:
        cp.cut(model, axes["cp"])

    stage: pp.Stage | None = None
    if stages.size > 1:
        stage = pp.split(model, stages.index, stages.size, config.chunks)

    mirrored_experts = None
    if experts.size > 1:
        # Where no other rank has the same experts, a mirror copies them before they are cut away.
        # The axis ep is then all of dp.
        if mirror and axes["edp"].size == 1:
            mirrored_index = (experts.index - mirror) % experts.size
            mirrored_experts = ep.experts_at(model, experts.size, mirrored_index)
        ep.cut(model, experts)

    return CutModel(stage, mirrored_experts)


def flow_of(
    model: nn.Module,
    stage: pp.Stage | None,
    axes: Axes,
    config: Config,
    accum: int,
    loss: Loss,
    scaler: LossScaler,
    device: torch.device,
) -> Flow:
    """Return how micro batches pass through this rank's part of the model."""
    if stage is None:
        return Straight(model, accum, loss, scaler, device)

    # With sequence parallelism the stream between stages has a part of each sequence only.
    parts = axes["tp"].size if config.sequence_parallel else 1
    return pp.Pipe(stage, axes["pp"], config.pp_schedule, accum, loss, scaler, device, parts)


def make_data_parallel(
    model: nn.Module,
    mode: str,
    axes: Axes,
    config: Config,
    compressor: Compressor | None,
    mirror: int,
    mirrored_experts: Mapping[str, tuple[Tensor, Piece]] | None,
    groups: Groups | None,
    script: ScriptHooks | None,
) -> DataParallel:
    """Return how the data ranks share the batch and exchange gradients. (all ranks)"""
    data = axes["shard"] if groups else axes["dp_cp"]
    # A script's own model may skip parameters, which torch's classes would wait for.
    own = script if data.size > 1 else None
    if mode == "ddp":
        make_ddp = own.ddp if own else TorchDDP
        return make_ddp(model, data, config)
    if mode == "fsdp":
        make_fsdp = own.fsdp if own else FSDP
        return make_fsdp(model, data, config, mirror, groups)
    assert mode in BY_HAND
    if axes["ep"].size > 1:
        replicas = axes["edp"]
        return ep.ExpertParallel(
            model, data, replicas, mode, config.bucket_mb, mirror, mirrored_experts
        )
    buckets = Buckets(model, data, mode, config.bucket_mb, mirror, groups=groups)
    buckets.compressor = compressor
    return buckets


def owned_shards(
    model: nn.Module, mode: str, axes: Axes, sharing: DataParallel, groups: Groups | None
) -> tuple[list[Shard] | None, list[Shard] | None]:
    """Return the shards that this rank's optimizer updates, and those of the weights that it has.

    None stands for the model's own parameters: the rank has all of them.
    """
    shards = sharing.shards
    weights: list[Shard] | None = None

    # Of a cut model, several ranks may hold the same piece: mark one of them as its owner.
    tensor = axes["tp"]
    stages = axes["pp"]
    if tensor.size * stages.size * axes["ep"].size > 1:
        names = tp.names_of_cut(model)
        replicas = sharing.replicas
        updated = whole_shards(model) if shards is None else shards
        shards = tp.with_owners(updated, names, tensor, replicas, mode in SHARDED)
        if mode != "fsdp":
            weights = tp.with_owners(whole_shards(model), names, tensor, replicas, False)

    frozen = sharing.frozen_shards
    if groups:  # other groups update the same shards
        shards = hybrid.with_owners(shards or (), groups)
        frozen = hybrid.with_owners(frozen, groups)
    if mode == "fsdp":  # weights lie where they are updated
        weights = [*(shards or ()), *frozen]

    # The first and the last stage of a pipeline both have the tied embedding.
    if stages.size > 1 and shards is not None and weights is not None:
        shards = pp.with_tie(shards, stages.index)
        weights = pp.with_tie(weights, stages.index)
    return shards, weights

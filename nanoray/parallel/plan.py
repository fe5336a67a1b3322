"""The parallelism of a model on a mesh. The loop calls the methods of one Plan and knows no
strategy by name.

whole, seeded model ─► cut over tp (tp.py) ─► split over pp (pp.py) ─► cut over ep (ep.py) ─► shared
over dp (ddp.py, buckets.py, fsdp.py)

forward_backward ─► grad_norm ─► clip ─► (the optimizer's update) ─► spread ─► zero_grad
                                                     and no_sync_backward, warm_up, close around them
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from nanoray.config import Config
from nanoray.mesh.axis import axes_of, data_axis
from nanoray.mesh.layout import Layout
from nanoray.mesh.mesh import Mesh
from nanoray.mesh.pieces import Shard, whole_shards
from nanoray.parallel import ep, pp, tp
from nanoray.parallel.buckets import BY_HAND, Buckets
from nanoray.parallel.compress import Compressor
from nanoray.parallel.ddp import DataParallel, Hook, TorchDDP
from nanoray.parallel.fsdp import FSDP
from nanoray.parallel.norm import norm_of_owned
from nanoray.parallel.schedules import Turn, bubble
from nanoray.parallel.statistics import RunningStatistics

# (model, inputs, targets) -> mean loss of a micro batch
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]
MicroBatch = tuple[Tensor, Tensor]


def _no_phase(name: str) -> None:
    pass


def _no_seed(micro: int) -> None:
    pass


class Plan:
    """Data parallelism: replicas of the model share the batch, and exchange gradients once per
    step.

    What each rank keeps of weights, gradients and optimizer state is the affair of `dp_mode`. With
    `tp` a replica is several ranks, which compute with one part of each layer each, with `pp` they
    compute with some layers each; they read the same samples.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        config: Config,
        accum: int,
        loss: Loss,
        scale: Callable[[Tensor], Tensor],
        mirror: int = 0,
    ) -> None:
        """Prepare `model` for this mesh. (all ranks) `scale` is applied to a loss before its
        backward (fp16).

        mirror: with ZeRO and fsdp, rank r + mirror keeps a second copy of rank r's share; 0: nobody
        does.

        All ranks must hold equal weights, or receive them before the first step; those that no rank
        keeps whole are sent here, by rank 0.
        """
        self.model, self._mesh, self._accum, self._loss, self._scale = (
            model,
            mesh,
            accum,
            loss,
            scale,
        )
        axes = axes_of(Layout.of(config, mesh.world_size), mesh, config.timeout_s)
        self.data, self._tensor, stages = axes["dp"], axes["tp"], axes["pp"]
        self._axes = list(axes.values())
        mode = "ddp" if self.data.size == 1 else config.dp_mode  # one rank shares nothing
        split = self._split = self._tensor.size * stages.size > 1
        sharded = mode in ("zero1", "zero2", "fsdp")
        self._replicated = config.replicated(mesh.slots)
        if split or axes["ep"].size > 1 or mode == "fsdp":
            for tensor in [*model.parameters(), *model.buffers()]:
                mesh.broadcast_tensor(tensor.data, 0)
        if self._tensor.size > 1:
            tp.cut(model, self._tensor, config.sequence_parallel)
        self._flow: pp.Straight | pp.Pipe = pp.Straight(accum)
        self._stage: pp.Stage | None = None
        self.bubble = 0.0  # the share of the time that a stage of a pipeline waits by its schedule
        if stages.size > 1:
            self._stage = pp.split(model, stages.index, stages.size, config.chunks)
            parts = self._tensor.size if config.sequence_parallel else 1
            self._flow = pp.Pipe(self._stage, stages, config.pp_schedule, accum, parts)
            self.bubble = bubble(config.pp_schedule, stages.size, accum, config.chunks)
        self._experts: ep.ExpertParallel | None = None
        if axes["ep"].size > 1:
            block, alike = axes["ep"], axes["edp"]
            # Where no other rank has the same experts, ep is all of dp
            mirrored = (block.index - mirror) % block.size
            others = (
                ep.experts_at(model, block.size, mirrored) if mirror and alike.size == 1 else None
            )
            ep.cut(model, block)
            self._experts = ep.ExpertParallel(
                model, self.data, alike, mode, config.bucket_mb, mirror, others
            )
        compress = config.grad_compress != "none" and self.data.size > 1
        self._compressor = Compressor(model, self.data, config, scale) if compress else None
        self._ddp = TorchDDP(model, self.data, config, self._compressor) if mode == "ddp" else None
        by_hand = mode in BY_HAND and self._experts is None
        self._buckets = (
            Buckets(model, self.data, mode, config.bucket_mb, mirror) if by_hand else None
        )
        if self._buckets:
            self._buckets.compressor = self._compressor
        self._fsdp = FSDP(model, self.data, config, mirror) if mode == "fsdp" else None
        parallel: DataParallel | None = self._ddp or self._experts or self._buckets or self._fsdp
        assert parallel
        self._parallel, self._mirrored = parallel, self._experts or self._buckets or self._fsdp
        self._statistics = RunningStatistics(model, self.data, config.sync_batchnorm)
        self._partial = tp.names_of_partial(model)
        # What the optimizer updates; None: the parameters
        self.shards: list[Shard] | None = self._parallel.shards
        self.weights: list[Shard] | None = None  # the weights of this rank; None: all of them
        # Of the newest step, what `forward_backward` has returned
        self.own_losses: list[Tensor] = []
        if split or self._experts:
            replicas = self._experts.replicas if self._experts else lambda name: self.data
            of_cut = tp.names_of_cut(model), self._tensor, replicas
            own = whole_shards(model) if self.shards is None else self.shards
            self.shards = tp.with_owners(own, *of_cut, sharded)
            self.weights = (
                tp.with_owners(whole_shards(model), *of_cut, False) if mode != "fsdp" else None
            )
        if mode == "fsdp":
            self.weights = self.shards
        if stages.size > 1 and self.shards is not None and self.weights is not None:
            self.shards, self.weights = (
                pp.with_tie(of, stages.index) for of in (self.shards, self.weights)
            )

    @property
    def memory(self) -> Tensor | None:
        """What compression keeps on this rank for later steps, flat, live; None: nothing."""
        return self._compressor.memory if self._compressor else None

    def forget_memory(self) -> None:
        """Let what compression keeps begin anew, as in a new run."""
        if self._compressor:
            self._compressor.begin_anew()

    @property
    def compresses(self) -> bool:
        """Whether gradients are compressed: one data rank sends none."""
        return self._compressor is not None

    @property
    def mirror_shards(self) -> list[Shard] | None:
        """What this rank updates a second time, beside its owner; None: nothing is mirrored."""
        return self._mirrored.mirror_shards if self._mirrored else None

    def trace(self, traced: bool) -> None:
        """Measure the collectives of the next step, or do not. (all ranks)"""
        if self._ddp:
            self._ddp.trace(traced)

    def forward_backward(
        self,
        micro_batches: Iterator[MicroBatch],
        phase: Callable[[str], None],
        seed: Callable[[int], None],
    ) -> Tensor:
        """Run a step's micro batches; afterwards gradients are means over all ranks. (all ranks)

        The factor of that mean enters at the loss, so that all that follows is a sum; torch's DDP
        divides by the ranks itself. `phase` is called when a phase begins, `seed` with the number
        of a micro batch before its forward. Returns the mean loss of this rank's replica, detached,
        a scalar on the device.
        """
        parallel, accum = self._parallel, self._accum
        if self._statistics.norms:
            self._statistics.begin()
        total, batches = torch.zeros((), device=self._mesh.device), dict[int, MicroBatch]()
        for turn in self.turns:  # F0 B0 F1 B1 ... without a pipeline
            last = turn.micro == accum - 1 and turn.op in ("F", self._flow.last_half)
            if turn.op == "F":
                if turn.chunk == 0:
                    phase("data")
                    batches[turn.micro] = next(micro_batches)
                x, y = batches[turn.micro]
                self._flow.receive(turn, phase, x)
                with parallel.forward(last):
                    phase("forward")
                    seed(turn.micro)
                    # Mean over (B, T)
                    loss = self._flow.forward(turn, parallel.wrapped, self._loss, x, y)
                if loss is not None:
                    total += loss
                if turn.chunk == self._flow.chunks - 1:
                    del batches[turn.micro], x, y
            else:
                self._flow.receive(turn, phase)
                with parallel.backward(last, turn.chunk, self._flow.late):
                    phase("backward")
                    self._flow.backward(
                        turn, lambda loss: self._scale(loss / (accum * parallel.divisor))
                    )
        total = self._flow.finish(total, phase)
        if isinstance(self._flow, pp.Pipe) and self._stage and self._stage.tied is not None:
            self._flow.add_tied(parallel.sum_of(self._stage.tied))
        if self._partial:
            self._sum_partial()
        if self._statistics.norms:
            self._statistics.add_up()
        self.own_losses = [total / accum]
        return self.own_losses[0]

    def _sum_partial(self) -> None:
        """Add up gradients of which each tensor rank has that of its own positions. (all ranks of a
        replica)
        """
        found = [
            s.param.grad
            for s in self.shards or ()
            if s.piece.name in self._partial and s.param.grad is not None
        ]
        if found:
            total = self._tensor.sum(
                torch.cat([gradient.reshape(-1) for gradient in found]), "gradients"
            )
            for gradient, part in zip(found, total.split([g.numel() for g in found]), strict=True):
                gradient.copy_(part.view_as(gradient))

    @property
    def turns(self) -> list[Turn]:
        """What this rank computes in a step, in this order: forwards, and backwards or halves of
        them.
        """
        return self._flow.turns

    def repeat(
        self,
        batch: Callable[[int], MicroBatch],
        seed: Callable[[int], None],
        look: Callable[[int], None],
    ) -> None:
        """Run a step's turns once more, without a sum over data ranks. (all ranks)

        `batch` returns a micro batch by its number; `look` is called after each turn with the
        number of its own.
        """
        for turn in self.turns:
            self._flow.receive(turn, _no_phase, batch(turn.micro)[0])
            if turn.op == "F":
                seed(turn.micro)
                self._flow.forward(turn, self.model, self._loss, *batch(turn.micro))
            else:
                self._flow.backward(turn, lambda loss: loss / self._accum)
            look(turn.micro)
        self._flow.finish(torch.zeros((), device=self._mesh.device), _no_phase)

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that have gradients, by name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def gradients_of(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Return the gradients of one micro batch as a step's backward makes them, before any sum;
        it sends nothing.

        Those that the parameters have stay as they are. For a model that this rank has whole.
        """
        scaled = self._scale(self._loss(self.model, x, y) / (self._accum * self._parallel.divisor))
        found = torch.autograd.grad(scaled, [*self.trained.values()], allow_unused=True)
        return {name: g for name, g in zip(self.trained, found, strict=True) if g is not None}

    @property
    def whole(self) -> Any:
        """What to call for the loss of a batch without gradients. (all ranks of a replica)"""
        return self._flow.evaluate if isinstance(self._flow, pp.Pipe) else self.model

    @property
    def knows_loss(self) -> bool:
        """Whether `whole` returns the loss on this rank: in a pipeline it does on the last stage."""
        return self._stage is None or self._stage.last

    @property
    def gradients(self) -> list[Tensor]:
        """The gradients that this rank updates with."""
        return self._parallel.gradients

    def mirror_gradients(self) -> bool:
        """Send the gradients to the rank that mirrors this rank's state. (all ranks)

        Returns whether ranks that are lost from now on leave behind all that the others need to
        finish this step.
        """
        if self._replicated:  # another replica has the same gradients, once all know the norm
            return True
        return self._mirrored.mirror_gradients() if self._mirrored else False

    def grad_norm(self) -> Tensor:
        """Return the norm of the whole model's gradient, equal on all ranks, a scalar on the
        device. (all ranks)
        """
        if not self._split:
            return self._parallel.norm()
        owned = [s.param.grad for s in self.shards or () if s.owner and s.param.grad is not None]
        return norm_of_owned(owned, data_axis(self._mesh), self._mesh.device)

    def clip(self, limit: float, norm: Tensor) -> None:
        """Scale the gradients so that their norm, which is `norm` now, is at most `limit`."""
        self._parallel.clip(limit, norm)

    def spread(self, left_out: Tensor | None = None) -> None:
        """Start to send updated weights to the ranks that have not updated them. (all ranks)

        Running statistics change here, with the weights, and so does what compression has not sent
        yet, unless the update was `left_out`: 1 on the device.
        """
        if self._statistics.norms:
            self._statistics.update()
        if self._compressor:
            self._compressor.commit(left_out)
        self._parallel.spread()

    def settle(self) -> None:
        """Wait until the weights are whole; a forward waits by itself."""
        self._parallel.settle()

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self._parallel.zero_grad()
        if self._compressor:
            self._compressor.drop()

    def no_sync_backward(self, x: Tensor, y: Tensor, timed: AbstractContextManager[None]) -> None:
        """Run a forward and backward without communication under `timed`, to compare with a traced
        step.
        """
        if self._ddp:
            self._ddp.trace(False)
        with self._parallel.quiet():
            if self._accum > 1:
                self._backward(x, y)  # a step's last backward adds to existing gradients
            with timed:
                self._backward(x, y)
        self.zero_grad()

    def warm_up(self, x: Tensor, y: Tensor) -> None:
        """Run forward and backward passes whose results are thrown away. (all ranks)

        DDP regroups its buckets after the first backward, which changes the order of sums. After
        the regrouping, every step of a fresh and of a resumed run sums in the same order, so resume
        is bit-exact at 3 and more ranks. The warm-up also compiles the model, and detects a lack of
        memory, before the first step.
        """
        if self._stage:
            self.forward_backward(repeat((x, y)), _no_phase, _no_seed)
        else:
            with self._parallel.backward(last=True):
                self._backward(x, y)
        self.zero_grad()
        if self._ddp and self._ddp.twin:
            self._ddp.trace(True)
            for _ in range(2):  # DDP regroups at the start of the second
                self._backward(x, y)
                self.zero_grad()
            self.no_sync_backward(x, y, nullcontext())

    def add_twin(self, hook: Hook) -> nn.Module | None:
        """Wrap the model a second time, for steps whose collectives are measured. (all ranks)

        None where there is nothing to measure so: buckets by hand and compressed ones note
        themselves, and torch's DDP is in no pipeline.
        """
        return (
            self._ddp.add_twin(hook)
            if self._ddp and not (self._stage or self._compressor)
            else None
        )

    @property
    def reduce(self) -> Callable[[Tensor], object] | None:
        """Function that starts torch DDP's all-reduce of a bucket, where it is written by hand."""
        return self._ddp.reduce if self._ddp else None

    @property
    def bucket_names(self) -> dict[int, list[str]]:
        """The parameters of each bucket by hand; torch's DDP has a hook that tells them, and fsdp
        has no buckets.
        """
        if self._compressor:
            return self._compressor.bucket_names
        by_hand = self._experts or self._buckets
        return by_hand.bucket_names if by_hand else {}

    def close(self) -> None:
        """Stop the thread of a hand-written all-reduce, if any, and leave the groups of the axes.
        (all ranks)
        """
        if self._ddp:
            self._ddp.close()
        if not self._fsdp:  # DTensor (torch 2.13) keeps the names of groups beyond its own life
            for axis in self._axes:
                axis.leave()

    def _backward(self, x: Tensor, y: Tensor) -> None:
        self._scale(self._loss(self._parallel.wrapped, x, y)).backward()

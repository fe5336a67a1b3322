"""The parallelism of a model on a mesh. The loop calls the methods of one Plan and knows no strategy by name.

forward_backward ─► grad_norm ─► clip        and no_sync_backward, warm_up, close around them
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from nanoray.config import Config
from nanoray.mesh.algorithms import AsyncAllReduce
from nanoray.mesh.mesh import Mesh
from nanoray.parallel.ddp import Hook, apply_ddp, average_by

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]  # (model, inputs, targets) -> mean loss of a micro batch
MicroBatch = tuple[Tensor, Tensor]


class Plan:
    """Data parallelism: every rank holds the whole model, and the last backward of a step averages gradients."""

    def __init__(
        self, model: nn.Module, mesh: Mesh, config: Config, accum: int, loss: Loss, scale: Callable[[Tensor], Tensor]
    ) -> None:
        """Wrap `model` for this mesh. (all ranks) `scale` is applied to a loss before its backward (fp16).

        All ranks must hold equal weights, or receive them before the first step: nothing is broadcast here.
        """
        self.model, self._mesh, self._accum, self._loss, self._scale = model, mesh, accum, loss, scale
        self._bucket_mb = config.bucket_mb
        self._params = [p for p in model.parameters() if p.requires_grad]
        self._by_hand: AsyncAllReduce | None = None
        if config.allreduce != "backend" and mesh.world_size > 1:
            group = dist.new_group(timeout=timedelta(seconds=config.timeout_s))
            dist.all_reduce(torch.zeros(1, device=mesh.device), group=group)  # NCCL sets up a group in its first one
            self._by_hand = AsyncAllReduce(config.allreduce, group, mesh.device)
        hook = average_by(self._by_hand.start, mesh.world_size) if self._by_hand else None
        self._wrapped = apply_ddp(model, mesh, config.bucket_mb, hook)
        self.twin: nn.Module | None = None
        self.traced = False  # whether the step goes through the twin

    @property
    def reduce(self) -> Callable[[Tensor], Any] | None:
        """Function that starts the all-reduce of a gradient bucket; None for the backend's own."""
        return self._by_hand.start if self._by_hand else None

    def add_twin(self, hook: Hook) -> nn.Module:
        """Wrap the model a second time, for steps whose collectives are measured. (all ranks)"""
        self.twin = apply_ddp(self.model, self._mesh, self._bucket_mb, hook)
        return self.twin

    @property
    def gradients(self) -> list[Tensor]:
        """The gradients that this rank updates with."""
        return [p.grad for p in self._params if p.grad is not None]

    def forward_backward(self, micro_batches: Iterator[MicroBatch], phase: Callable[[str], None]) -> Tensor:
        """Run a step's micro batches; the last backward averages gradients over the ranks. (all ranks)

        Returns this rank's own mean loss, detached, a scalar on the device. `phase` is called when a phase begins.
        """
        wrapped = self.twin if self.traced and self.twin else self._wrapped
        total = torch.zeros((), device=self._mesh.device)
        for micro in range(self._accum):
            phase("data")
            x, y = next(micro_batches)
            with nullcontext() if micro == self._accum - 1 else self._silent(wrapped):
                phase("forward")
                loss = self._loss(wrapped, x, y)  # mean over (B, T)
                phase("backward")
                self._scale(loss / self._accum).backward()
            total += loss.detach()
        return total / self._accum

    def grad_norm(self) -> Tensor:
        """Return the norm of the whole model's gradient, equal on all ranks, a scalar on the device."""
        return get_total_norm(self.gradients)

    def clip(self, limit: float, norm: Tensor) -> None:
        """Scale the gradients so that their norm, which is `norm` now, is at most `limit`."""
        clip_grads_with_norm_(self._params, limit, norm)

    def no_sync_backward(self, x: Tensor, y: Tensor, timed: AbstractContextManager[None]) -> None:
        """Run a forward and backward without communication under `timed`, to compare with a traced step."""
        with self._silent(self._wrapped):
            if self._accum > 1:
                self._backward(self._wrapped, x, y)  # a step's last backward adds to existing gradients
            with timed:
                self._backward(self._wrapped, x, y)
        self.model.zero_grad(set_to_none=True)

    def warm_up(self, x: Tensor, y: Tensor) -> None:
        """Run forward and backward passes whose results are thrown away. (all ranks)

        DDP regroups its buckets after the first backward, which changes the order of sums. After the regrouping, every
        step of a fresh and of a resumed run sums in the same order, so resume is bit-exact at 3 and more ranks. The
        warm-up also compiles the model, and detects a lack of memory, before the first step.
        """
        self._backward(self._wrapped, x, y)
        self.model.zero_grad(set_to_none=True)
        if self.twin:
            for _ in range(2):  # DDP regroups at the start of the second
                self._backward(self.twin, x, y)
                self.model.zero_grad(set_to_none=True)
            self.no_sync_backward(x, y, nullcontext())

    def close(self) -> None:
        """Stop the thread of a hand-written all-reduce, if any. (all ranks)"""
        if self._by_hand:
            self._by_hand.close()

    def _backward(self, wrapped: nn.Module, x: Tensor, y: Tensor) -> None:
        self._scale(self._loss(wrapped, x, y)).backward()

    def _silent(self, wrapped: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which backward passes only add to the gradients."""
        return wrapped.no_sync() if self._mesh.world_size > 1 else nullcontext()  # type: ignore[operator]

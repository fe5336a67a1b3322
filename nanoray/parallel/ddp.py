"""Data parallelism: every rank holds the whole model and averages gradients with the others while
backward runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm

from nanoray.config import Config
from nanoray.mesh.algorithms import AsyncAllReduce
from nanoray.mesh.axis import Axis, data_axis
from nanoray.mesh.mesh import Mesh
from nanoray.mesh.pieces import Shard
from nanoray.parallel.compress import Compressor, Sent
from nanoray.parallel.norm import clip_to

Hook = Callable[[GradBucket], torch.futures.Future[torch.Tensor]]  # averages a bucket of gradients


class DataParallel(Protocol):
    """One way to share the batch among ranks. The Plan calls these methods in this order in every
    step.
    """

    @property
    def wrapped(self) -> nn.Module:
        """The module to call in a forward."""

    @property
    def divisor(self) -> int:
        """Divides the loss, besides the number of micro batches."""

    @property
    def shards(self) -> list[Shard] | None:
        """What the optimizer updates on this rank; None: the model's own parameters."""

    def forward(self, last: bool) -> AbstractContextManager[None]:
        """Return a context for a forward; with `last` its backward will exchange gradients."""

    def backward(
        self, last: bool, chunk: int = 0, late: Collection[Tensor] | None = None
    ) -> AbstractContextManager[None]:
        """Return a context for a backward; with `last` it exchanges the gradients of a chunk. (all
        ranks)

        late: the parameters whose gradients it adds to, if an earlier backward had the rest; None:
        all.
        """

    def sum_of(self, p: nn.Parameter) -> Tensor:
        """Return what this rank has of the summed gradient of a model's tied parameter; a change
        changes it.
        """

    def quiet(self) -> AbstractContextManager[None]:
        """Return a context for a forward and backward of this rank alone."""

    @property
    def gradients(self) -> list[Tensor]:
        """The gradients that this rank updates with."""

    def norm(self) -> Tensor:
        """Return the norm of the whole model's gradient, equal on all ranks, a scalar on the
        device. (all ranks)
        """

    def clip(self, limit: float, norm: Tensor) -> None:
        """Scale the gradients so that their norm, which is `norm` now, is at most `limit`."""

    def spread(self) -> None:
        """Start to send updated weights to ranks that have not updated them. (all ranks)"""

    def settle(self) -> None:
        """Wait until the weights are whole. A forward does this itself."""

    def zero_grad(self) -> None:
        """Forget the gradients."""


class TorchDDP:
    """torch's DistributedDataParallel. It divides by the ranks itself, and needs no exchange after
    the update.
    """

    divisor, shards = 1, None

    def __init__(
        self, model: nn.Module, axis: Axis, config: Config, compressor: Compressor | None = None
    ) -> None:
        """Wrap `model` for this axis. (all its ranks) They must hold equal weights before the first
        step.
        """
        self._model, self._axis, self._bucket_mb = model, axis, config.bucket_mb
        self._params = [p for p in model.parameters() if p.requires_grad]
        self._by_hand: AsyncAllReduce | None = None
        mesh = axis.mesh
        if config.allreduce != "backend" and axis.size > 1:
            group = dist.new_group(timeout=timedelta(seconds=config.timeout_s))
            # NCCL sets up a group in its first one
            dist.all_reduce(torch.zeros(1, device=mesh.device), group=group)
            self._by_hand = AsyncAllReduce(config.allreduce, group, mesh.device)
        hook = average_by(self._by_hand.start, axis.size) if self._by_hand else None
        hook = compress_by(compressor, axis.size) if compressor else hook
        self._plain = self.wrapped = apply_ddp(model, mesh, config.bucket_mb, hook, axis)
        self.twin: nn.Module | None = None

    @property
    def reduce(self) -> Callable[[Tensor], Any] | None:
        """Function that starts the all-reduce of a gradient bucket; None for the backend's own."""
        return self._by_hand.start if self._by_hand else None

    def add_twin(self, hook: Hook) -> nn.Module:
        """Wrap the model a second time, for steps whose collectives are measured. (all ranks)"""
        self.twin = apply_ddp(self._model, self._axis.mesh, self._bucket_mb, hook, self._axis)
        return self.twin

    def trace(self, traced: bool) -> None:
        """Let the next step go through the twin, or through the plain wrapper."""
        self.wrapped = self.twin if traced and self.twin else self._plain

    def forward(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self.quiet()

    def backward(
        self, last: bool, chunk: int = 0, late: Collection[Tensor] | None = None
    ) -> AbstractContextManager[None]:
        return nullcontext() if last else self.quiet()

    def sum_of(self, p: nn.Parameter) -> Tensor:
        assert p.grad is not None
        return p.grad

    def quiet(self) -> AbstractContextManager[None]:
        return self.wrapped.no_sync() if self._axis.size > 1 else nullcontext()  # type: ignore[operator]

    @property
    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self._params if p.grad is not None]

    def norm(self) -> Tensor:
        own = self.gradients
        # Else the norm would have 16 bits, too
        if own and own[0].dtype in (torch.bfloat16, torch.float16):
            return torch.stack(
                [torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in own]
            ).norm()
        return get_total_norm(own)

    def clip(self, limit: float, norm: Tensor) -> None:
        clip_to(limit, [p.grad for p in self._params if p.grad is not None], norm)

    def spread(self) -> None:
        pass

    def settle(self) -> None:
        pass

    def zero_grad(self) -> None:
        for p in self._params:
            p.grad = None

    def close(self) -> None:
        """Stop the thread of a hand-written all-reduce, if any. (all ranks)"""
        if self._by_hand:
            self._by_hand.close()


def apply_ddp(
    model: nn.Module,
    mesh: Mesh,
    bucket_mb: float,
    hook: Hook | None = None,
    axis: Axis | None = None,
) -> nn.Module:
    """Wrap `model` so that its last backward of a step all-reduces gradients in buckets. (all
    ranks)

    They are summed over `axis`, or over all ranks. These must hold equal weights: nothing is
    broadcast. A single rank needs no wrapper and gets its model back. `hook` averages a bucket in
    place of DDP's own C++ path. A model may be wrapped twice: each wrapper ignores the gradients of
    a forward that went through the other, so a step chooses its path by the wrapper it calls. A
    second one needs another set of buckets, as much memory as the gradients. Source: Li et al.
    2020, PyTorch Distributed.
    """
    axis = axis or data_axis(mesh)
    if axis.size == 1:
        return model
    wrapped = DistributedDataParallel(
        model,
        process_group=axis.group,
        device_ids=[mesh.device.index] if mesh.device.type == "cuda" else None,
        bucket_cap_mb=bucket_mb or default_bucket_mb(mesh.device),
        gradient_as_bucket_view=True,  # gradients live in the buckets, which saves a copy of each
        init_sync=False,
        forward_sync_buffers=False,  # running statistics are equal on all ranks (statistics.py)
    )
    if hook:
        wrapped.register_comm_hook(None, lambda state, bucket: hook(bucket))
    return wrapped


def average_by(reduce: Callable[[torch.Tensor], Any], ranks: int) -> Hook:
    """Return a hook that averages a bucket with `reduce`, which starts an all-reduce and returns
    its future.
    """

    def hook(bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        return reduce(bucket.buffer().mul_(1.0 / ranks)).then(
            lambda future: first_of(future.value())
        )

    return hook


def compress_by(compressor: Compressor, ranks: int) -> Hook:
    """Return a hook that averages a bucket compressed; its futures are done with those of the last
    bucket.
    """
    waiting: list[tuple[torch.futures.Future[Tensor], Tensor]] = []

    def hook(bucket: GradBucket) -> torch.futures.Future[Tensor]:
        flat, gradients = bucket.buffer().mul_(1.0 / ranks), bucket.gradients()
        if bucket.index() == 0:
            waiting.clear()
        starts = [int(gradient.storage_offset() - flat.storage_offset()) for gradient in gradients]
        compressor.send(Sent(flat, bucket.parameters(), starts, bucket.index(), bucket.is_last()))
        waiting.append(
            (torch.futures.Future(devices=[flat.device] if flat.is_cuda else None), flat)
        )
        future = waiting[-1][0]
        if bucket.is_last():
            compressor.drain()
            for done, average in waiting:
                done.set_result(average)
            waiting.clear()
        return future

    return hook


def first_of(value: Any) -> torch.Tensor:
    """Return the tensor of a future, which may hold it in a list, as torch's own do."""
    return value[0] if isinstance(value, list) else value


def default_bucket_mb(device: torch.device) -> float:
    """Return 25 MB on GPUs, where large messages reach full bandwidth, and 8 MB on CPU.

    On CPU communication takes cores from compute, and each bucket costs its latency: `bench
    overlap` finds the largest ones fastest with two gloo ranks on two cores. With spare cores a
    large model still has some to hide.
    """
    return 25.0 if device.type == "cuda" else 8.0

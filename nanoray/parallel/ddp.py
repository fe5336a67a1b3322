"""torch's DistributedDataParallel: every rank holds the whole model, and gradients are averaged
while backward runs.

    backward of layer 3   2   1   0
    all-reduce            └ bucket 0 ┘└ bucket 1 ┘     a bucket leaves when its last gradient is computed

A hook may average the buckets in place of the backend, by an all-reduce written by hand
(parallel/algorithms.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm

from nanoray.config import Config
from nanoray.machine.compat import NO_BUFFER_SYNC
from nanoray.parallel.algorithms import AsyncAllReduce
from nanoray.parallel.axis import Axis
from nanoray.parallel.mesh import Mesh
from nanoray.parallel.mode import DataParallel, Hook


class TorchDDP(DataParallel):
    """torch's DistributedDataParallel. It divides by the number of ranks itself, and sends nothing
    after the update.
    """

    def __init__(self, model: nn.Module, axis: Axis, config: Config) -> None:
        """Wrap `model` for this axis. (all its ranks)

        They must hold equal weights before the first step.
        """
        super().__init__(model, axis)
        self._model = model
        self._bucket_mb = config.bucket_mb
        self._params = [p for p in model.parameters() if p.requires_grad]
        self._by_hand: AsyncAllReduce | None = None
        self._twin: nn.Module | None = None

        # Who averages a bucket: the backend (no hook), or an all-reduce by hand.
        hook: Hook | None = None
        if config.allreduce != "backend" and axis.size > 1:
            self._by_hand = _start_all_reduce(config, axis.mesh)
            hook = average_by(self._by_hand.start, axis.size)

        self._plain = self._wrap(hook)
        self.wrapped = self._plain

    def _wrap(self, hook: Hook | None) -> nn.Module:
        """Wrap the model; `hook` averages a bucket in place of DDP itself. (all ranks)"""
        return apply_ddp(self._model, self._axis, self._bucket_mb, hook)

    @property
    def reduce(self) -> Callable[[Tensor], Any] | None:
        return None if self._by_hand is None else self._by_hand.start

    def add_twin(self, hook: Hook) -> nn.Module | None:
        self._twin = self._wrap(hook)
        return self._twin

    def has_twin(self) -> bool:
        return self._twin is not None

    def trace(self, traced: bool) -> None:
        self.wrapped = self._plain
        if traced and self._twin is not None:
            self.wrapped = self._twin

    def forward(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self.quiet()

    def backward(
        self, last: bool, chunk: int = 0, late: Collection[Tensor] | None = None
    ) -> AbstractContextManager[None]:
        return nullcontext() if last else self.quiet()

    def quiet(self) -> AbstractContextManager[None]:
        if self._axis.size == 1:
            return nullcontext()
        return self.wrapped.no_sync()  # type: ignore[operator]

    def sum_of(self, p: nn.Parameter) -> Tensor:
        assert p.grad is not None
        return p.grad

    @property
    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self._params if p.grad is not None]

    def norm(self) -> Tensor:
        gradients = self.gradients
        # torch's function would return a norm of 16 bits, too.
        if gradients and gradients[0].dtype in (torch.bfloat16, torch.float16):
            norms = [torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in gradients]
            return torch.stack(norms).norm()
        return get_total_norm(gradients)

    def zero_grad(self) -> None:
        for p in self._params:
            p.grad = None

    def close(self) -> None:
        if self._by_hand is not None:
            self._by_hand.close()


def _start_all_reduce(config: Config, mesh: Mesh) -> AsyncAllReduce:
    """Form a group for an all-reduce by hand, and start its thread. (all ranks)"""
    # A group of its own: messages are matched by their order, so no other ones may pass here.
    group = dist.new_group(timeout=timedelta(seconds=config.timeout_s))

    # NCCL creates the communicator in a group's first collective, which needs all ranks.
    dist.all_reduce(torch.zeros(1, device=mesh.device), group=group)
    return AsyncAllReduce(config.allreduce, group, mesh.device)


def apply_ddp(
    model: nn.Module, axis: Axis, bucket_mb: float, hook: Hook | None = None
) -> nn.Module:
    """Wrap `model` so that the last backward of a step all-reduces its gradients. (all its ranks)

    They are summed over `axis`, whose ranks must hold equal weights: nothing is broadcast. A single
    rank needs no wrapper and gets its model back. `hook` averages a bucket in place of DDP's own C++
    path. A model may be wrapped twice: each wrapper ignores the gradients of a forward that went
    through the other, so a step chooses its path by the wrapper it calls. The second one has its own
    buckets, which take as much memory as the gradients. Source: Li et al. 2020, PyTorch Distributed.
    """
    if axis.size == 1:
        return model
    device = axis.mesh.device

    # Weights and buffers are equal already, so nothing is broadcast at the start or in a forward.
    wrapped = DistributedDataParallel(
        model,
        process_group=axis.group,
        device_ids=[device.index] if device.type == "cuda" else None,
        bucket_cap_mb=bucket_mb or default_bucket_mb(device),
        gradient_as_bucket_view=True,  # gradients live in the buckets, which saves a copy of each
        init_sync=False,
        **NO_BUFFER_SYNC,  # running statistics are equal on all ranks (running_statistics.py)
    )

    # An object's attributes are released in the order in which they were set, so the wrapper's C++
    # part is never the last owner of the group. It would destroy the group with Python's lock held
    # and wait for a thread of gloo, which may want that lock to release a tensor: a deadlock.
    vars(wrapped)["released_last"] = wrapped.process_group

    # Without a hook DDP averages buckets in C++, and Python does not run between them.
    if hook:
        wrapped.register_comm_hook(None, lambda state, bucket: hook(bucket))
    return wrapped


def average_by(reduce: Callable[[Tensor], Any], ranks: int) -> Hook:
    """Return a hook that averages a bucket with `reduce`.

    `reduce` starts an all-reduce and returns its future.
    """

    def hook(bucket: GradBucket) -> torch.futures.Future[Tensor]:
        # Divided before the sum, as DDP's own path does: 16-bit gradients could overflow else.
        share = bucket.buffer().mul_(1.0 / ranks)
        return reduce(share).then(lambda future: first_of(future.value()))

    return hook


def first_of(value: Any) -> Tensor:
    """Return the tensor of a future, which may hold it in a list, as torch's own do."""
    return value[0] if isinstance(value, list) else value


def default_bucket_mb(device: torch.device) -> float:
    """Return 25 MB on GPUs, where large messages reach full bandwidth, and 8 MB on CPU.

    On CPU communication takes cores from compute, and each bucket costs its latency: `bench
    overlap` finds the largest ones fastest with two gloo ranks on two cores. With spare cores a
    large model still has some to hide.
    """
    return 25.0 if device.type == "cuda" else 8.0

"""What every way to share the batch has in common: the methods that the Plan calls in each step.

    forward ─► backward ─► norm ─► (clip, the optimizer's update) ─► spread ─► zero_grad
                  └─ the last one exchanges gradients                     └─ sends updated weights

ddp.py, buckets.py, fsdp.py and ep.py each have one subclass.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket

from nanoray.parallel.axis import Axis
from nanoray.parallel.hybrid import Groups
from nanoray.parallel.pieces import Shard

Hook = Callable[[GradBucket], torch.futures.Future[Tensor]]  # averages a bucket of gradients


class DataParallel:
    """One way to share the batch among the ranks of an axis. Most defaults do nothing."""

    divisor = 1  # divides the loss, besides the number of micro batches
    shards: list[Shard] | None = None  # what the optimizer updates; None: the model's parameters
    mirror_shards: list[Shard] | None = None  # another rank's shards, updated here as well
    frozen_shards: Sequence[Shard] = ()  # of frozen weights, where no rank has all of them
    mirror_frozen: Sequence[Shard] = ()  # copies of those of the mirrored rank
    mirrored_gradients: Sequence[Tensor] = ()  # those that `mirror_gradients` has received
    keeps_groups = False  # whether something refers to the process groups after `close`

    def __init__(self, model: nn.Module, axis: Axis, groups: Groups | None = None) -> None:
        """axis: the ranks that share the work; with `groups` they are one group of several."""
        self.wrapped: nn.Module = model  # the module to call in a forward
        self._axis = axis
        self._groups = groups
        self._data = groups.data if groups else axis  # the ranks whose gradients are summed

    # Forward and backward of a micro batch.

    def forward(self, last: bool) -> AbstractContextManager[None]:
        """Return a context for a forward; with `last` its backward will exchange gradients."""
        return nullcontext()

    def backward(
        self, last: bool, chunk: int = 0, late: Collection[Tensor] | None = None
    ) -> AbstractContextManager[None]:
        """Return a context for a chunk's backward. (all ranks) With `last` it exchanges gradients.

        late: the parameters whose gradients this backward adds to, if an earlier backward has
        computed the others; None: all of the chunk.
        """
        raise NotImplementedError

    def quiet(self) -> AbstractContextManager[None]:
        """Return a context for a forward and backward that do not exchange gradients."""
        return nullcontext()

    # Gradients, once the last backward has ended.

    @property
    def gradients(self) -> list[Tensor]:
        """The gradients that this rank updates with."""
        raise NotImplementedError

    @property
    def computed(self) -> set[str]:
        """The names of the parameters that this rank has computed a gradient of in this step."""
        raise NotImplementedError

    def leave_out(self, absent: Collection[str]) -> None:
        """Let these parameters have no gradient in this step: no rank has computed one."""
        raise NotImplementedError

    def sum_of(self, p: nn.Parameter) -> Tensor:
        """Return this rank's part of the summed gradient of a tied parameter, as a live tensor."""
        raise NotImplementedError

    def norm(self) -> Tensor:
        """Return the norm of the whole model's gradient, a scalar on the device. (all ranks)"""
        raise NotImplementedError

    def mirror_gradients(self) -> bool:
        """Send this rank's gradients to its mirror; receive those of the mirrored rank. (all ranks)

        Returns whether the other ranks can finish this step when a rank is lost from now on.
        """
        return False

    # The update, and what follows.

    def spread(self) -> None:
        """Start to send updated weights to ranks that have not updated them. (all ranks)"""

    def forget_gathered(self) -> None:
        """Free weights that a forward has gathered and kept: the shards have changed since."""

    def settle(self) -> None:
        """Wait until the weights are complete. A forward does this by itself."""

    def zero_grad(self) -> None:
        """Forget the gradients."""
        raise NotImplementedError

    # Measuring, names, end.

    def add_twin(self, hook: Hook) -> nn.Module | None:
        """Wrap the model again, for measured steps; None: this mode measures itself. (all ranks)"""
        return None

    def has_twin(self) -> bool:
        """Whether `add_twin` has wrapped the model a second time."""
        return False

    def trace(self, traced: bool) -> None:
        """Let the next step go through the twin, if there is one, or through the plain wrapper."""

    @property
    def reduce(self) -> Callable[[Tensor], object] | None:
        """The function that starts a hand-written all-reduce of a bucket; None: there is none."""
        return None

    @property
    def bucket_names(self) -> dict[int, list[str]]:
        """The names of the parameters in each bucket, where buckets are laid out by hand."""
        return {}

    def replicas(self, name: str) -> Axis:
        """Return the axis of the ranks that hold the same part of a parameter of the model."""
        return self._data

    def close(self) -> None:
        """Stop the threads of this mode, if it has any. (all ranks)"""

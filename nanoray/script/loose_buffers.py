"""Buffers that a forward changes: equal on all ranks after each step, and as before after a broken one.

    begin     copy the buffers and the extra states
    forward   each rank changes its own, from the samples that it sees
    add_up    rank 0 sends its buffers: one message of a few bytes, and one of all of them
    commit    all ranks take these over, with the weights
    undo      a step that broke, is not finite, or is done again: back to the copy

torch's DDP also lets rank 0's buffers hold for all, before each forward. Nothing but these messages
depends on the values of others, so a step that is repeated changes a counter once. Extra states
are not sent: as in torch, each rank has its own, and rank 0's are saved.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from nanoray.errors import ConfigError
from nanoray.machine.tensor_memory import assign, bytes_of
from nanoray.models.batch_norm import BatchNorm
from nanoray.models.modules import Undisturbed, buffers_of, has_extra_state
from nanoray.parallel.hooks import StepHook
from nanoray.parallel.mesh import Mesh


def is_loose(model: nn.Module) -> bool:
    """Whether a forward may change what belongs to the model's state, besides running statistics."""
    return bool(_loose(model)) or any(has_extra_state(module) for module in model.modules())


def _loose(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that no step hook keeps equal on all ranks."""
    loose = {}
    for name, buffer in buffers_of(model).items():
        if not isinstance(buffer.module, BatchNorm):
            loose[name] = buffer.tensor
    return loose


class LooseBuffers(StepHook):
    """Keeps the buffers of a script's model equal on all ranks."""

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self._model = model
        self._mesh = mesh
        self._before: Undisturbed | None = None  # set from a step's begin to its end
        self._received = torch.empty(0, dtype=torch.uint8)

    def begin(self) -> None:
        self.undo()  # a step that broke
        self._before = Undisturbed(self._model)

    @torch.no_grad()
    def add_up(self) -> None:
        """Receive the buffers of rank 0. (all ranks) Raises ConfigError where shapes differ."""
        mesh = self._mesh
        if mesh.world_size == 1:
            return
        buffers = _loose(self._model)

        # Shapes may depend on samples. Else a message of another size would break the group.
        layout = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in buffers.items()]
        of_first = mesh.broadcast(layout)
        if of_first != layout:
            raise ConfigError(_difference(mesh.rank, layout, of_first))

        parts = [bytes_of(tensor) for tensor in buffers.values()]
        self._received = torch.cat(parts) if parts else self._received
        mesh.broadcast_tensor(self._received, 0)

    @torch.no_grad()
    def commit(self, left_out: Tensor | None = None) -> None:
        if self._before is None:
            return  # the step was undone
        self._before = None
        if self._mesh.rank == 0:
            return
        begin = 0
        for tensor in _loose(self._model).values():
            part = self._received[begin : begin + tensor.nbytes]
            begin += tensor.nbytes
            # A copy, because the bytes may lie where this dtype may not begin.
            assign(tensor, part.clone().view(tensor.dtype).view(tensor.shape))

    def undo(self) -> None:
        if self._before is not None:
            self._before.restore()
        self._before = None

    def drop(self) -> None:
        self.undo()


def _difference(rank: int, own: Sequence[object], of_first: Sequence[object]) -> str:
    """Describe the first buffer in which a rank differs from rank 0."""
    different = [str(entry) for entry in own if entry not in of_first]
    missing = [str(entry) for entry in of_first if entry not in own]
    return (
        f"after a forward rank {rank} has the buffers {', '.join(different) or 'none'} and rank 0 "
        f"{', '.join(missing) or 'none'}; rank 0's are those of all ranks, so give buffers a shape "
        "that does not depend on the samples"
    )

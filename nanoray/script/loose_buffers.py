"""Buffers that a forward changes: equal on all ranks after each step, and as before after a broken one.

    begin     copy the buffers and the extra states
    forward   each rank changes its own, from the samples that it sees
    add_up    rank 0 sends its buffers, in one message
    commit    all ranks take these over, with the weights
    undo      a step that broke, is not finite, or is done again: back to the copy

torch's DDP also lets rank 0's buffers hold for all, before each forward. Nothing but these messages
depends on the values of others, so a step that is repeated changes a counter once. Buffers that no
checkpoint keeps, and extra states, are not sent: each rank has its own, and rank 0's states are saved.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nanoray.errors import ConfigError
from nanoray.machine.tensor_memory import assign, bytes_of
from nanoray.models.batch_norm import BatchNorm
from nanoray.models.modules import Undisturbed, buffers_of, has_extra_state
from nanoray.parallel.hooks import StepHook
from nanoray.parallel.mesh import Mesh

NONE = "none"  # a buffer that is not there


def is_loose(model: nn.Module) -> bool:
    """Whether a forward may change what belongs to the model's state, besides running statistics."""
    return bool(_loose(model)) or any(has_extra_state(module) for module in model.modules())


def _loose(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of a checkpoint that no step hook keeps equal on all ranks."""
    loose = {}
    for name, buffer in buffers_of(model, persistent=True).items():
        if not isinstance(buffer.module, BatchNorm):
            loose[name] = buffer.tensor
    return loose


class LooseBuffers(StepHook):
    """Keeps the buffers of a script's model equal on all ranks."""

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self._model = model
        self._mesh = mesh
        self._forms = self._forms_now()
        self._before: Undisturbed | None = None  # set from a step's begin to its end
        self._received = torch.empty(0, dtype=torch.uint8)

    def _forms_now(self) -> dict[str, str]:
        """Return the shape and type of each buffer, in words."""
        forms = {}
        for name, tensor in _loose(self._model).items():
            forms[name] = f"{tuple(tensor.shape)} of {tensor.dtype}"
        return forms

    def begin(self) -> None:
        self.undo()  # a step that broke
        self._before = Undisturbed(self._model)

    @torch.no_grad()
    def add_up(self) -> None:
        """Receive the buffers of rank 0. (all ranks) Raises ConfigError where a shape has changed."""
        # A resume makes the model anew, and ranks exchange messages of one size.
        now = self._forms_now()
        for name in sorted(now.keys() | self._forms.keys()):
            if now.get(name) != self._forms.get(name):
                raise ConfigError(
                    f"a forward has changed the buffer {name} from {self._forms.get(name, NONE)} to "
                    f"{now.get(name, NONE)}; register it before RuntimeEngine is made, with the shape that "
                    "it keeps, or with persistent=False if no checkpoint needs it"
                )
        mesh = self._mesh
        if mesh.world_size == 1:
            return
        parts = [bytes_of(tensor) for tensor in _loose(self._model).values()]
        if parts:
            self._received = torch.cat(parts)
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

"""Buffers that a forward changes: equal on all ranks after each step, and as before after a broken one.

    begin     copy the buffers and the extra states
    forward   each rank changes its own, from the samples that it sees
    add_up    rank 0 sends its buffers, in one message
    commit    all ranks take these over, with the weights
    undo      a step that broke, is not finite, or is done again: back to the copy

torch's DDP also lets rank 0's buffers hold for all, before each forward. Nothing but these messages
depends on the values of others, so a step that is repeated changes a counter once. Extra states are
not sent: as in torch, each rank has its own, and rank 0's are saved. A buffer that a forward registers
is refused if a checkpoint would keep it, and else not sent.
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
Forms = dict[str, str]  # by the name of a buffer: its shape and type, in words


def _loose(model: nn.Module, persistent: bool) -> dict[str, Tensor]:
    """Return the buffers, those that state_dict contains or the others, that no other step hook keeps
    equal on all ranks.
    """
    loose = {}
    for name, buffer in buffers_of(model, persistent).items():
        if not isinstance(buffer.module, BatchNorm):
            loose[name] = buffer.tensor
    return loose


def _forms_of(buffers: dict[str, Tensor]) -> Forms:
    return {name: f"{tuple(t.shape)} of {t.dtype}" for name, t in buffers.items()}


class LooseBuffers(StepHook):
    """Keeps the buffers of a script's model equal on all ranks, and refuses new ones."""

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self._model = model
        self._mesh = mesh
        self._kept = _forms_of(_loose(model, persistent=True))
        self._passing = _forms_of(_loose(model, persistent=False))
        # Whether a forward may change what an undone step must bring back. A model may have none.
        has_states = any(has_extra_state(module) for module in model.modules())
        self._changes = bool(self._kept or self._passing) or has_states
        self._before: Undisturbed | None = None  # set from a step's begin to its end
        # Those of the present step that ranks share, and rank 0's bytes of them
        self._shared: list[Tensor] = []
        self._received = torch.empty(0, dtype=torch.uint8)

    def begin(self) -> None:
        self.undo()  # a step that broke
        if self._changes:
            self._before = Undisturbed(self._model)

    @torch.no_grad()
    def add_up(self) -> None:
        """Receive the buffers of rank 0. (all ranks) Raises ConfigError where a shape has changed."""
        kept = _loose(self._model, persistent=True)
        self._require_kept(_forms_of(kept))
        if self._mesh.world_size == 1 or not (self._kept or self._passing):
            return
        passing = {}
        if self._passing:
            now = _loose(self._model, persistent=False)
            # A buffer that a forward has registered is each rank's own.
            passing = {name: now[name] for name in self._passing if name in now}
            self._require_same_passing(_forms_of(passing))

        self._shared = [*kept.values(), *passing.values()]
        if self._shared:
            self._received = torch.cat([bytes_of(tensor) for tensor in self._shared])
            self._mesh.broadcast_tensor(self._received, 0)

    def _require_kept(self, now: Forms) -> None:
        """Raise ConfigError if a forward has registered or changed what a checkpoint keeps."""
        # A resume makes the model anew, and ranks exchange messages of one size.
        for name in sorted(now.keys() | self._kept.keys()):
            if now.get(name) != self._kept.get(name):
                raise ConfigError(
                    f"a forward has changed the buffer {name} from {self._kept.get(name, NONE)} to "
                    f"{now.get(name, NONE)}; register it before RuntimeEngine is made, with the shape that "
                    "it keeps, or with persistent=False if no checkpoint needs it"
                )

    def _require_same_passing(self, now: Forms) -> None:
        """Raise ConfigError, on all ranks, where a buffer has another shape on another rank.

        Buffers that no checkpoint keeps, such as a table for the longest text so far, may grow. But
        rank 0's are those of all. (all ranks)
        """
        own = {name: now.get(name, NONE) for name in self._passing}
        first, *others = self._mesh.all_gather(own)
        for rank, forms in enumerate(others, start=1):
            for name, form in forms.items():
                if form != first[name]:
                    raise ConfigError(
                        f"after a forward rank {rank} has the buffer {name} as {form}, and rank 0 as "
                        f"{first[name]}; rank 0's are those of all ranks, so give buffers a shape "
                        "that does not depend on the samples"
                    )

    @torch.no_grad()
    def commit(self, left_out: Tensor | None = None) -> None:
        if self._before is None:
            return  # the step was undone
        self._before = None
        if self._mesh.rank == 0:
            return
        begin = 0
        for tensor in self._shared:
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

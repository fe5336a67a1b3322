"""The state of a run: everything that a step changes and that the next step needs, on any rank.

    TrainState   parts: counters, guards, loss scale, model, optimizers, ... one after the other
       │  pack()  ─► StateDict ─► a checkpoint's files
       │                      └─► a new rank's memory, over the process group (share)
       ├─ load()  ◄─ StateDict ◄─ a resume, a rollback, a recovery
       └─ tensors() ─► hashes, by which replicas are compared

Each part says what it packs, loads and compares (part.py). What is added to the list is saved,
received by new ranks, rolled back and compared without another line.
"""

from __future__ import annotations

import torch
from torch import nn

from nanoray.checkpoint.state.model_part import ModelPart, without_owner
from nanoray.checkpoint.state.optimizer_part import OptimizerPart
from nanoray.checkpoint.state.optimizers import load_groups
from nanoray.checkpoint.state.part import Counters, GuardsPart, ScalerPart, StatePart
from nanoray.checkpoint.state.rank_state import RankState, Scaler, Share, Values
from nanoray.checkpoint.state.state_dict import StateDict, Tensors


class TrainState(RankState):
    """What a rank has of a run, as a list of parts."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Scaler, guards: Values
    ) -> None:
        """Take everything as it is at step 0. `whole` is set once it is the state of the run."""
        super().__init__(model, optimizer, scaler, guards)
        self._model = ModelPart(self)
        self._optimizer = OptimizerPart(self)
        # In the order in which they are packed, loaded and compared
        self.parts: list[StatePart] = [
            Counters(self),
            GuardsPart(self),
            self._model,
            self._optimizer,
            ScalerPart(self),
        ]
        # What is whole of a model that a former group of ranks had cut: buffers, extra states
        self.left: StateDict | None = None

    # A group of ranks that cuts the state.

    def hold(self, share: Share) -> None:
        """Replace the shards and their optimizers, whose groups keep the values that have changed."""
        groups = self._optimizer.changed_groups()
        self.shards = share.own.shards
        self.optimizer = share.own.optimizer
        self.frozen = share.own.frozen
        self.mirror = share.mirror
        self.optimizers = [holding.optimizer for holding in share.holdings]
        self.sharded = share.sharded
        self.weights = share.weights
        self.copies = share.copies
        for optimizer in self.optimizers:
            load_groups(optimizer, groups)

    def leave_model(self) -> None:
        """Release a model that a group of ranks has cut, and keep its buffers and extra states.

        The shards keep the weights.
        """
        # If the next group breaks before it has built a model, they are here already.
        if self.left is None:
            self.left = StateDict({}, {})
            self._model.pack(self.left)
            self.left.model = without_owner(self.model, self.left.model)
        self.model = nn.Module()

    def take_left(self) -> None:
        """Copy what `leave_model` has kept into the new model."""
        if self.left is not None:
            self._model.load_whole_tensors(self.left)
        self.left = None

    # The one serialiser.

    def pack(self) -> StateDict:
        """Return the state as data: all of it, or of a sharded one the part that all ranks have.

        The tensors are the live ones, which the next step changes.
        """
        packed = StateDict({}, {})
        for part in self.parts:
            part.pack(packed)
        return packed

    def pack_own(self, first: bool) -> StateDict:
        """Return the part of a state in parts that this rank saves: the pieces that it owns.

        The `first` rank adds the tensors that have no owner.
        """
        packed = self.pack()
        packed.pieces = {}
        for shard in [*self.shards, *self.frozen]:
            if shard.owner:
                packed.pieces[shard.piece.name] = shard.piece
        for part in self.parts:
            part.pack_own(packed, first)
        return packed

    def load(self, saved: StateDict) -> None:
        """Load what `pack` returned, in place. Raises CheckpointError for another optimizer or
        model.

        Of a sharded state, `saved.optimizer` has this rank's pieces.
        """
        self.can_finish = False
        for part in self.parts:
            part.load(saved)

    def rewind(self, saved: StateDict, samples: int) -> None:
        """Go back to `saved` and continue with the data from `samples`. Clock and guards keep their
        values.
        """
        before = self.scalars
        guards = self.guards.values()
        self.load(saved)
        self.samples = samples
        self.scalars.train_s = before.train_s
        self.scalars.timed_steps = before.timed_steps
        self.guards.load_values(guards)

    def tensors(self) -> Tensors:
        """Return, in one order on all ranks, the live tensors that must be equal on all replicas.

        Of a model that is cut, and with several groups of hybrid sharding, these are also the
        pieces that other ranks hold as well, named by their places, and not all ranks have the same
        ones.
        """
        tensors: Tensors = {}
        for part in self.parts:
            part.compared(tensors)
        return tensors

"""The model as a part of the state: weights, buffers, extra states, whole or cut."""

from __future__ import annotations

from collections.abc import Collection, Set
from typing import Any

import torch
from torch import Tensor, nn

from nanoray.checkpoint.state.optimizers import optimizer_tensors
from nanoray.checkpoint.state.part import StatePart
from nanoray.checkpoint.state.rank_state import RankState
from nanoray.checkpoint.state.state_dict import (
    Listing,
    StateDict,
    Tensors,
    entries_of,
)
from nanoray.errors import CheckpointError
from nanoray.machine.tensor_memory import assign
from nanoray.models.modules import (
    EXTRA,
    aliases_of,
    buffers_of,
    device_of,
    set_extra_states,
    split,
)
from nanoray.parallel.pieces import is_cut


class ModelPart(StatePart):
    """The model, of which this rank may have pieces only."""

    def __init__(self, state: RankState) -> None:
        """List what a checkpoint must contain, while the model is whole."""
        super().__init__(state)
        self._listing = _listing_of(state.model)

    # To a checkpoint, and to other ranks.

    def pack(self, packed: StateDict) -> None:
        tensors, values = split(self._whole_entries())
        packed.model = tensors
        for name, origin in aliases_of(self._state.model).items():
            if name != origin:
                packed.aliases[name] = origin
        packed.meta["entries"] = values
        packed.meta["listing"] = self._listing

    def pack_own(self, packed: StateDict, first: bool) -> None:
        packed.model = without_owner(self._state.model, packed.model) if first else {}
        for shard in [*self._state.shards, *self._state.frozen]:
            if shard.piece.name in (packed.pieces or ()):
                packed.model[shard.piece.name] = shard.param.detach()

    def _whole_entries(self, keep_vars: bool = False) -> dict[str, Any]:
        """Return the model's state_dict, without what a group of ranks has cut."""
        model = self._state.model
        entries = model.state_dict(keep_vars=keep_vars)
        if self._state.weights is None:
            return entries
        in_shards = {shard.piece.name for shard in self._state.weights}
        aliases = aliases_of(model)
        whole = {}
        for name, value in entries.items():
            # A rank may have no row of a weight that is cut.
            if aliases.get(name, name) not in in_shards and not _is_dtensor(value):
                whole[name] = value
        return whole

    # Back from there.

    @torch.no_grad()
    def load(self, saved: StateDict) -> None:
        """Copy weights, buffers and extra states; a whole model must find all of its own."""
        if saved.has_weights:
            self._refuse_other_model(saved)
        if self._state.weights is not None:
            for shard in self._state.weights:
                # A state that comes from another rank has no weights.
                if shard.piece.name in saved.model:
                    shard.param.copy_(saved.model[shard.piece.name].view_as(shard.param))
            self.load_whole_tensors(saved)
            return

        # As plain torch does, with the hooks that a module may have.
        model = self._state.model
        tensors, values = entries_of(saved, device_of(model))
        model.load_state_dict(tensors | values, strict=saved.has_weights)

    def load_whole_tensors(self, saved: StateDict) -> None:
        """Copy what no rank has cut of a model that is cut: buffers, extra states, some weights."""
        tensors, values = entries_of(saved, device_of(self._state.model))
        for name, own in self._whole_entries(keep_vars=True).items():
            if name not in tensors:
                continue
            if name.rpartition(".")[2] == EXTRA:
                values[name] = tensors[name]
            else:
                assign(own, tensors[name])
        set_extra_states(self._state.model, values)

    def _buffers(self) -> Tensors:
        """Return the buffers that belong to the state, such as running statistics."""
        found = buffers_of(self._state.model, persistent=True)
        return {name: buffer.tensor for name, buffer in found.items()}

    def _refuse_other_model(self, saved: StateDict) -> None:
        """Raise CheckpointError when the saved model has other entries, or others were trained."""
        before: Listing = saved.meta["listing"]
        now = self._listing
        _refuse_other_names(before.keys(), now.keys())
        shapes = [name for name in now if before[name][1] != now[name][1]]
        if shapes:
            name = min(shapes)
            raise CheckpointError(
                f"the checkpoint is of another model: {name} has the shape {before[name][1]} there "
                f"and {now[name][1]} here; resume with the model that wrote it"
            )
        changed = {name for name in now if before[name][0] != now[name][0]}
        if changed:
            name = min(changed)
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            raise CheckpointError(
                f"other weights were trained in the checkpoint: {name} ({before[name][0]} there, "
                f"{now[name][0]} here){more}; resume with the same ones, or begin a new run from "
                "the weights: nanoray checkpoint export, then load_state_dict"
            )

    # To be compared.

    def compared(self, tensors: Tensors) -> None:
        """Add weights and buffers; of a state that is cut, the pieces that other ranks hold, too.

        The latter have the names of their places, and not all ranks have the same ones.
        """
        state = self._state
        if not is_cut(state.model) and state.weights is None:
            for name, p in state.model.named_parameters():
                tensors[name] = p.detach()
        if is_cut(state.model) or state.copies > 1:
            tensors |= self._shared_pieces()
        tensors |= self._buffers()

    def _shared_pieces(self) -> Tensors:
        """Return weights and optimizer state of the pieces that several ranks hold, by place."""
        state = self._state
        tensors: Tensors = {}
        for shard in state.weights or ():
            if shard.holders > 1:
                tensors[shard.piece.place] = shard.param.detach()

        places = {s.piece.name: s.piece.place for s in state.shards if s.holders > 1}
        for name, tensor in optimizer_tensors(state.optimizer, state.shards).items():
            key, _, param = name.partition(".")
            if param in places:
                tensors[f"{key}.{places[param]}"] = tensor
        return tensors


def without_owner(model: nn.Module, tensors: Tensors) -> Tensors:
    """Return the tensors of a model that are in no shard: buffers, frozen and empty weights."""
    in_shards = set()
    for name, p in model.named_parameters():
        if p.requires_grad and p.numel():
            in_shards.add(name)
    aliases = aliases_of(model)
    ownerless = {}
    for name, tensor in tensors.items():
        if name not in in_shards and aliases.get(name, name) == name:
            ownerless[name] = tensor
    return ownerless


def _listing_of(model: nn.Module) -> Listing:
    """Return the kind and the shape of each entry of a whole model, under all of its names."""
    trained = {id(p): p.requires_grad for p in model.parameters()}
    listed: Listing = {}
    for name, value in model.state_dict(keep_vars=True).items():
        # An extra state may be a tensor, too, but of any shape.
        if not isinstance(value, Tensor) or name.rpartition(".")[2] == EXTRA:
            listed[name] = ["extra state", []]
            continue
        kind = "buffer"
        if id(value) in trained:
            kind = "trained" if trained[id(value)] else "frozen"
        listed[name] = [kind, list(value.shape)]
    return listed


def _refuse_other_names(before: Set[str], now: Set[str]) -> None:
    """Raise CheckpointError when a checkpoint and a model have other entries."""
    for names, where in (
        (before - now, "only in the checkpoint"),
        (now - before, "not in the checkpoint"),
    ):
        if names:
            raise CheckpointError(
                f"the checkpoint is of another model: {_first_of(names)} {where}; resume with the "
                "model that wrote it"
            )


def _first_of(names: Collection[str]) -> str:
    """Return the first of some names, and how many more there are."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{min(names)}{more}"


def _is_dtensor(value: Any) -> bool:
    """Whether fully_shard has cut a tensor. Asked in this way, because DTensor's import is slow."""
    return hasattr(value, "to_local")

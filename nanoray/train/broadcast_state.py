"""Get the state of another rank, from memory to memory: small values in one message, then tensors."""

from __future__ import annotations

from dataclasses import asdict

import torch

from nanoray.checkpoint.state.model_part import without_owner
from nanoray.checkpoint.state.rank_state import Session
from nanoray.checkpoint.state.state_dict import StateDict
from nanoray.checkpoint.state.train_state import TrainState
from nanoray.machine.tensor_memory import assign
from nanoray.models.modules import buffers_of
from nanoray.parallel.mesh import Mesh


def broadcast_state(state: TrainState, mesh: Mesh, source: int) -> None:
    """Copy the whole state of rank `source` to all ranks, tensor by tensor. (all ranks)

    Nothing is read from disk. Afterwards every rank has the source's parameters, optimizer, scaler,
    guards, scalars and session. Where weights or optimizer state are sharded, each rank keeps its
    own.
    """
    packed, session = receive_state(state, mesh, source)
    if mesh.rank != source:
        state.load(packed)
    state.session = session
    state.whole = True


def receive_state(
    state: TrainState, mesh: Mesh, source: int, pieces: bool = True
) -> tuple[StateDict, Session]:
    """Return the state and session of rank `source`, without its shards if it is sharded. (all
    ranks)

    Nothing is loaded yet. Without `pieces` it leaves out all that an optimizer updates.
    """
    is_source = mesh.rank == source
    packed = state.pack() if is_source else StateDict({}, {})
    if not pieces:
        packed.model = without_owner(state.model, packed.model)
        packed.optimizer = {}
    # Plain torch sends transient buffers at the start as well. They are in no checkpoint.
    transient = {}
    for name, buffer in buffers_of(state.model, persistent=False).items():
        transient[name] = buffer.tensor
    kinds = {"model": packed.model, "optimizer": packed.optimizer, "transient": {}}
    if is_source:
        kinds["transient"] = transient

    # The source lists its tensors: tied weights once, under their first name.
    layout = []
    for kind, tensors in kinds.items():
        for name, tensor in tensors.items():
            if kind != "model" or name not in packed.aliases:
                layout.append((kind, name, tuple(tensor.shape), tensor.dtype))

    # Small values in one message, then each tensor in the order of that list.
    layout, packed.scaler, packed.meta, session, packed.aliases = mesh.broadcast(
        (layout, packed.scaler, packed.meta, asdict(state.session), packed.aliases), src=source
    )
    for kind, name, shape, dtype in layout:
        if not is_source:
            kinds[kind][name] = torch.empty(shape, dtype=dtype, device=mesh.device)
        mesh.broadcast_tensor(kinds[kind][name].to(mesh.device), source)

    if not is_source:
        for name, tensor in kinds["transient"].items():
            if name in transient:
                assign(transient[name], tensor)
        # All names of a tied weight get the same tensor again.
        for name, first in packed.aliases.items():
            if first in packed.model:
                packed.model[name] = packed.model[first]
    packed.has_weights = pieces
    packed.has_optimizer = pieces and not state.sharded
    return packed, Session(**session)

"""A script's optimizer over this rank's shards: the same class, groups and state, cut as they are."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nanoray.config import Config
from nanoray.errors import ConfigError
from nanoray.mesh.mesh import Mesh
from nanoray.mesh.pieces import Shard
from nanoray.own.optimizer_trial import copy_of
from nanoray.state.optimizers import members_of


def cut_optimizer(
    optimizer: torch.optim.Optimizer,
    updated: Mapping[str, nn.Parameter],
    held: Mapping[str, Shard],
) -> torch.optim.Optimizer:
    """Return a copy of an optimizer of whole parameters over the shards that this rank holds.

    `updated` are its parameters and `held` the shards, by name. A state that the optimizer has
    already is cut like the parameters.
    """
    swap: dict[Tensor, Tensor | None] = {}
    for name, p in updated.items():
        swap[p] = held[name].param if name in held else None
    shards = copy_of(optimizer, swap)

    for member, own in zip(members_of(shards), members_of(optimizer), strict=True):
        for key, state in own.state.items():
            if not isinstance(key, Tensor):
                member.state[key] = copy.deepcopy(state)
        for name, p in updated.items():
            if name in held and p in own.state:
                member.state[held[name].param] = _cut_state(own.state[p], held[name])
    return shards


def _cut_state(state: Mapping[str, Any], shard: Shard) -> dict[str, Any]:
    """Return the part of a whole parameter's state that belongs to a shard of it."""
    cut = {}
    for key, value in state.items():
        if isinstance(value, Tensor) and value.shape == shard.piece.shape and value.dim():
            piece = shard.piece.take(value.to(shard.param.device))
            cut[key] = piece.clone().view_as(shard.param)
        else:
            cut[key] = copy.deepcopy(value)
    return cut


def require_state_everywhere(
    optimizer: torch.optim.Optimizer,
    updated: Mapping[str, nn.Parameter],
    config: Config,
    mesh: Mesh,
) -> None:
    """Raise ConfigError where some ranks alone have loaded a state before `fit`. (all ranks)

    Each rank keeps its own part of the state, so the parts of the others would begin anew.
    """
    members = members_of(optimizer)
    known = [name for name, p in updated.items() if any(p in each.state for each in members)]
    everyone = mesh.all_gather(known)
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise ConfigError(
                f"the optimizer has a state of {len(everyone[0])} parameters on rank 0, and of "
                f"{len(theirs)} on rank {rank}; with dp_mode = {config.dp_mode} each rank keeps its own "
                "part, so load the state on every rank"
            )


def follow_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Move the state that an optimizer has made for its parameters to where these are now."""
    for member in members_of(optimizer):
        for p, state in member.state.items():
            if not isinstance(p, Tensor):
                continue
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim() and value.shape == p.shape:
                    state[key] = value.to(p.device)

"""A script's optimizer over this rank's shards: its class, its groups and its state, cut as they are.

optimizer of whole parameters ─► copy without state and hooks ─► groups of shards, state of pieces
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nanoray.checkpoint.state.optimizers import members_of
from nanoray.machine.compat import OPTIMIZER_HOOKS
from nanoray.parallel.pieces import Shard


def cut_optimizer(
    optimizer: Optimizer, updated: Mapping[str, nn.Parameter], held: Mapping[str, Shard]
) -> Optimizer:
    """Return a copy of an optimizer of whole parameters over the shards that this rank holds.

    `updated` are its parameters and `held` the shards, by name. A state that the optimizer has
    already is cut like the parameters.
    """
    names: dict[Tensor, str] = {p: name for name, p in updated.items()}
    copies = [_cut_one(member, names, held) for member in members_of(optimizer)]
    if copies and members_of(optimizer) == [optimizer]:
        return copies[0]
    several: Any = type(optimizer)
    composite: Optimizer = several(copies)
    return composite


def _cut_one(
    optimizer: Optimizer, names: Mapping[Tensor, str], held: Mapping[str, Shard]
) -> Optimizer:
    """Return a copy of one optimizer. Nothing is constructed anew, so its arguments do not matter."""
    shards = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        # The script's hooks see whole parameters; and a scheduler has replaced `step`.
        if name in OPTIMIZER_HOOKS:
            shards.__dict__[name] = OrderedDict()
        elif name != "step":
            shards.__dict__[name] = value

    shards.param_groups = []
    for group in optimizer.param_groups:
        values = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        own = [held[names[p]].param for p in group["params"] if names[p] in held]
        shards.param_groups.append({"params": own, **values})

    shards.state = defaultdict(dict)
    for p, state in optimizer.state.items():
        if names[p] in held:
            shard = held[names[p]]
            shards.state[shard.param] = _cut_state(state, shard)
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


def follow_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Move the state that an optimizer has made for its parameters to where these are now."""
    for member in members_of(optimizer):
        for p, state in member.state.items():
            if not isinstance(p, Tensor):
                continue
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim() and value.shape == p.shape:
                    state[key] = value.to(p.device)

"""The state of a run as plain data: what a checkpoint's files contain, and what a new rank gets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nanoray.models.modules import join
from nanoray.models.values import tensors_within
from nanoray.parallel.pieces import Piece

# The kinds of a model's tensors: weights, persistent buffers, and other entries of its state_dict
TRAINED = "trained"
FROZEN = "frozen"
BUFFER = "buffer"
ENTRY = "entry"
WEIGHTS = (TRAINED, FROZEN)
Listing = dict[str, list[Any]]  # by name: kind, dtype, shape
Tensors = dict[str, Tensor]

_COMPILED = "_orig_mod."  # what torch.compile puts into the names of a module's tensors


@dataclass
class StateDict:
    """A TrainState as plain data. `meta` holds `step` and anything else that is JSON.

    With `pieces`, the tensor of a parameter named there is that piece, flat. Others are whole.
    `model` also has the tensors of extra states; meta["entries"] has what else is in these, and
    meta["tensors"] the kind, dtype and shape of each tensor of the model.
    """

    model: Tensors
    optimizer: Tensors  # flat names: "exp_avg.<param>", "step.<param>"
    # Per rank: generators, loader, compression's memory
    rng: list[Tensors] = field(default_factory=list)
    scaler: dict[str, float] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    pieces: dict[str, Piece] | None = None  # by parameter; None: all tensors are whole
    # Further names of tied weights, which are saved once
    aliases: dict[str, str] = field(default_factory=dict)
    # Of `rng`, what this rank alone had; empty where another number of ranks has saved it
    own: Tensors = field(default_factory=dict)
    # Another rank's state may lack these, where ranks cut the state: then a rank that loads it keeps
    # its own optimizer state, or its own trained weights as well
    has_optimizer: bool = True
    has_weights: bool = True


def entries_of(saved: StateDict, device: torch.device) -> tuple[Tensors, dict[str, Any]]:
    """Return the entries of the model's state_dict: those that are tensors, and the others."""
    encoded = saved.meta.get("entries", {})
    values = join(encoded, saved.model, device)
    within = set(tensors_within([*encoded.values()]))
    tensors = {}
    for name, tensor in saved.model.items():
        if name not in within:
            tensors[name] = tensor
    return tensors, values


# A script may compile its model, or modules of it, in the run that saves or in the one that resumes.


def compiled_otherwise(saved: Iterable[str], own: Iterable[str]) -> dict[str, str]:
    """Return by its saved name the own name of each tensor whose names torch.compile makes differ."""
    own_names = {name.replace(_COMPILED, ""): name for name in own}
    others = {}
    for name in saved:
        own_name = own_names.get(name.replace(_COMPILED, ""), name)
        if own_name != name:
            others[name] = own_name
    return others


def rename(state: StateDict, names: Mapping[str, str]) -> None:
    """Give the tensors of a state other names, by the ones that they have. Tied weights have one."""

    def renamed(values: Mapping[str, Any]) -> dict[str, Any]:
        return {names.get(name, name): value for name, value in values.items()}

    state.model = renamed(state.model)
    optimizer = {}
    for name, tensor in state.optimizer.items():
        key, _, param = name.partition(".")
        optimizer[f"{key}.{names.get(param, param)}"] = tensor
    state.optimizer = optimizer

    for key in ("tensors", "entries"):
        if key in state.meta:
            state.meta[key] = renamed(state.meta[key])
    for kept in state.meta.get("optimizer", {}).get("state", {}).values():
        if "parameters" in kept:
            kept["parameters"] = renamed(kept["parameters"])

"""The state of a run as plain data: what a checkpoint's files contain, and what a new rank gets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nanoray.models.modules import join
from nanoray.models.values import tensors_within
from nanoray.parallel.pieces import Piece

# By the name of a model's entry: "trained", "frozen", "buffer" or "extra state"; its shape
Listing = dict[str, list[Any]]
Tensors = dict[str, Tensor]


@dataclass
class StateDict:
    """A TrainState as plain data. `meta` holds `step` and anything else that is JSON.

    With `pieces`, the tensor of a parameter named there is that piece, flat. Others are whole.
    `model` also has the tensors of extra states; meta["entries"] has what else is in these, and
    meta["listing"] the kind and the shape of each entry of the whole model.
    """

    model: Tensors
    optimizer: Tensors  # flat names: "exp_avg.<param>", "step.<param>"
    # Per rank: generators, and the state of its data
    rng: list[Tensors] = field(default_factory=list)
    scaler: dict[str, float] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    pieces: dict[str, Piece] | None = None  # by parameter; None: all tensors are whole
    # Further names of tied weights, which are saved once
    aliases: dict[str, str] = field(default_factory=dict)
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

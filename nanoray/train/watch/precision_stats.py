"""What a step's number formats lose, layer by layer: gradients that are zero or subnormal, weights
that stay as before.

Gradients are looked at as backward left them, with the loss scale still in them. The counts are
exact, over all elements of all ranks; a step that is not looked at costs nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nanoray.mesh.mesh import Mesh
from nanoray.state import TrainState
from nanoray.train.watch.dangers import PRECISION, SHARES, SUBNORMAL, UNCHANGED, ZERO

# Normal number of the format of gradients; else:
SMALLEST = {"fp16": 2.0**-14, "fp16_pure": 2.0**-14}
FLOAT32_SMALLEST = 2.0**-126  # bf16's, too


class PrecisionStats:
    """Counts on every K-th step. `look` comes before the gradients are unscaled, `measured` after
    the update.
    """

    def __init__(self, every: int, precision: str) -> None:
        """Count on every step that `every` divides; 0: never."""
        self.every, self._smallest = every, SMALLEST.get(precision, FLOAT32_SMALLEST)
        self._found: dict[str, Tensor] = {}  # layer -> elements, zero, subnormal, unchanged
        self._before: list[Tensor] | None = None  # the weights, while a step is looked at

    def due(self, step: int) -> bool:
        """Whether that step is looked at."""
        return bool(self.every) and step % self.every == 0

    @torch.no_grad()
    def look(self, state: TrainState, step: int) -> None:
        """Count the gradients of a step, where it is due, and copy the weights."""
        self._found, self._before = {}, None
        if not self.due(step):
            return
        self._before = []
        for shard in state.shards:
            grad, counts = (
                shard.param.grad,
                torch.zeros(4, dtype=torch.float64, device=shard.param.device),
            )
            if shard.owner and grad is not None:
                zero, small = (grad == 0).sum(), (grad.abs() < self._smallest).sum()
                counts[:3] = torch.stack([torch.full_like(zero, grad.numel()), zero, small - zero])
            layer = layer_of(shard.piece.name)
            self._found[layer] = self._found.get(layer, 0) + counts
            self._before.append(shard.param.detach().clone())

    @torch.no_grad()
    def measured(self, state: TrainState, mesh: Mesh) -> dict[str, Any]:
        """Return what a record has of the step that `look` has seen; {} if it was not due. (all
        ranks)
        """
        if self._before is None:
            return {}
        for shard, before in zip(state.shards, self._before, strict=True):
            if shard.owner:
                self._found[layer_of(shard.piece.name)][3] += (shard.param.detach() == before).sum()
        self._before = None
        if state.sharded:  # (all ranks) each has counted its own elements
            names = sorted(
                {name for of_rank in mesh.all_gather(list(self._found)) for name in of_rank}
            )
            none = torch.zeros(4, dtype=torch.float64, device=mesh.device)
            summed = mesh.all_reduce(
                torch.stack([self._found.get(name, none) for name in names]), "precision"
            )
            self._found = dict(zip(names, summed, strict=True))
        counts = torch.stack(list(self._found.values())).tolist()
        total = [sum(column) for column in zip(*counts, strict=True)]
        layers = {name: shares(each) for name, each in zip(self._found, counts, strict=True)}
        whole = shares(total)
        return {
            "precision/grad_lost": whole[ZERO] + whole[SUBNORMAL],
            "precision/unchanged": whole[UNCHANGED],
            PRECISION: {
                name: {key: round(share, 4) for key, share in each.items()}
                for name, each in layers.items()
            },
        }


def shares(counts: list[float]) -> dict[str, float]:
    """Return counts (elements, zero, subnormal, unchanged) as percentages of the elements."""
    elements, *lost = counts
    return {k: 100.0 * n / max(1.0, elements) for k, n in zip(SHARES, lost, strict=True)}


def layer_of(name: str) -> str:
    """Return the layer of a parameter: `blocks.3`, or the first part of its name."""
    first, second, *_ = [*name.split("."), ""]
    return f"{first}.{second}" if second.isdigit() else first

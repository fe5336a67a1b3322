"""Losses of a step's number formats, layer by layer.

Gradients that are zero or subnormal are counted as backward left them, with the loss scale still in
them; then weights that an update leaves as they were. The counts are exact, over all elements of all
ranks. Only every K-th step is counted, and the others cost nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nanoray.checkpoint.state.train_state import TrainState
from nanoray.observe.watch.dangers import PERCENT_KEYS, PRECISION, SUBNORMAL, UNCHANGED, ZERO
from nanoray.parallel.mesh import Mesh

# The smallest normal number of the format of gradients
SMALLEST = {"fp16": 2.0**-14, "fp16_pure": 2.0**-14}
FLOAT32_SMALLEST = 2.0**-126  # bf16's, too


class PrecisionStats:
    """Counts on every K-th step, which is always logged."""

    def __init__(self, every: int, precision: str, state: TrainState, mesh: Mesh) -> None:
        """Count on every step that `every` divides; 0: never."""
        self.every = every
        self._smallest = SMALLEST.get(precision, FLOAT32_SMALLEST)
        self._state = state
        self._mesh = mesh
        # Layer -> numbers of elements: all, zero, subnormal, unchanged; (4,)
        self._counts: dict[str, Tensor] = {}
        self._before: list[Tensor] | None = None  # the weights, while a step is counted

    def due(self, step: int) -> bool:
        """Return whether that step is counted."""
        return bool(self.every) and step % self.every == 0

    @torch.no_grad()
    def gradients_ready(self, step: int, logged: bool) -> None:
        """Count the gradients of a step that is due, and copy the weights."""
        self._counts = {}
        self._before = None
        if not self.due(step):
            return

        self._before = []
        for shard in self._state.shards:
            grad = shard.param.grad
            counts = torch.zeros(4, dtype=torch.float64, device=shard.param.device)
            # Of several ranks that hold the same shard, its owner counts.
            if shard.owner and grad is not None:
                zero = (grad == 0).sum()
                below = (grad.abs() < self._smallest).sum()  # zeros, too
                elements = torch.full_like(zero, grad.numel())
                counts[:3] = torch.stack([elements, zero, below - zero])
            layer = layer_of(shard.piece.name)
            self._counts[layer] = self._counts.get(layer, 0) + counts
            self._before.append(shard.param.detach().clone())

    @torch.no_grad()
    def measured(self) -> dict[str, Any]:
        """Return the counts of the step as percentages in percent; {} if it was not due. (all ranks)"""
        if self._before is None:
            return {}

        # Count the weights that have the same bits after the update.
        for shard, before in zip(self._state.shards, self._before, strict=True):
            if shard.owner:
                unchanged = (shard.param.detach() == before).sum()
                self._counts[layer_of(shard.piece.name)][3] += unchanged
        self._before = None

        # (all ranks) With a sharded state each rank has counted its own elements.
        if self._state.sharded:
            self._add_up()

        counts = torch.stack(list(self._counts.values())).tolist()  # (layers, 4)
        layers = {}
        for name, counts_of_layer in zip(self._counts, counts, strict=True):
            of_layer = percentages(counts_of_layer)
            layers[name] = {key: round(percentage, 4) for key, percentage in of_layer.items()}
        of_model = percentages([sum(column) for column in zip(*counts, strict=True)])
        return {
            "precision/grad_lost": of_model[ZERO] + of_model[SUBNORMAL],
            "precision/unchanged": of_model[UNCHANGED],
            PRECISION: layers,
        }

    def _add_up(self) -> None:
        """Sum the counts over all ranks, each of which may have other layers. (all ranks)"""
        names: set[str] = set()
        for names_of_rank in self._mesh.all_gather(list(self._counts)):
            names.update(names_of_rank)
        none = torch.zeros(4, dtype=torch.float64, device=self._mesh.device)
        own = torch.stack([self._counts.get(name, none) for name in sorted(names)])
        summed = self._mesh.all_reduce(own, "precision")
        self._counts = dict(zip(sorted(names), summed, strict=True))


def percentages(counts: list[float]) -> dict[str, float]:
    """Return counts (elements, zero, subnormal, unchanged) as percentages of the elements."""
    elements, *lost = counts
    whole = max(1.0, elements)
    return {name: 100.0 * count / whole for name, count in zip(PERCENT_KEYS, lost, strict=True)}


def layer_of(name: str) -> str:
    """Return the layer of a parameter: `blocks.3`, or the first part of its name."""
    parts = name.split(".")
    if len(parts) > 1 and parts[1].isdigit():
        return f"{parts[0]}.{parts[1]}"
    return parts[0]

"""The optimizers as a part of the state: this rank's own, and the groups of that of its mirror."""

from __future__ import annotations

from typing import Any

from nanoray.checkpoint.state.optimizers import (
    apart,
    changed_groups,
    group_values,
    kind_of,
    load_groups,
    load_optimizer_tensors,
    name_of,
    optimizer_tensors,
)
from nanoray.checkpoint.state.part import StatePart
from nanoray.checkpoint.state.rank_state import RankState
from nanoray.checkpoint.state.state_dict import StateDict, Tensors
from nanoray.errors import CheckpointError


class OptimizerPart(StatePart):
    """The optimizer state of this rank's shards, its groups, and a script's schedulers."""

    def __init__(self, state: RankState) -> None:
        super().__init__(state)
        # The values of the optimizer's groups, to see which ones it changes
        self._group_values = group_values(state.optimizer)

    def pack(self, packed: StateDict) -> None:
        state = self._state
        tensors, kept = apart(state.optimizer, state.shards)
        if state.sharded and kept:
            raise CheckpointError(
                f"{name_of(state.optimizer)} keeps more than tensors and numbers of its parameters, "
                "which ranks cannot share; use dp_mode ddp"
            )
        if state.sharded:
            packed.has_optimizer = False
        else:
            packed.optimizer = tensors

        values: dict[str, Any] = {}
        groups = self.changed_groups()
        if groups:
            values["groups"] = groups
        if kept:
            values["state"] = kept
        if state.schedule and state.schedule.has_state:
            values["schedule"] = state.schedule.values()
        if values:
            packed.meta["optimizer"] = values
        packed.meta["optimizer_kind"] = kind_of(state.optimizer)

    def pack_own(self, packed: StateDict, first: bool) -> None:
        packed.optimizer = {}
        for name, tensor in optimizer_tensors(self._state.optimizer, self._state.shards).items():
            _, _, param = name.partition(".")
            if param in (packed.pieces or ()):
                packed.optimizer[name] = tensor

    def changed_groups(self) -> list[list[dict[str, Any]]]:
        """Return the values of the optimizer's groups that have changed since the start, as JSON."""
        # Without a schedule of the script, the rate is a function of the step.
        skip = ("lr_factor",) if self._state.schedule else ("lr", "lr_factor")
        return changed_groups(self._state.optimizer, self._group_values, skip)

    def load(self, saved: StateDict) -> None:
        """Restore it; of a sharded state, `saved.optimizer` has this rank's pieces."""
        state = self._state
        step = saved.meta["step"]
        here, there = kind_of(state.optimizer), saved.meta["optimizer_kind"]
        if here != there:
            raise CheckpointError(
                f"the checkpoint has the state of {there}, and the optimizer is {here}; resume with "
                "the optimizer, and the precision, that wrote it"
            )
        values = saved.meta.get("optimizer", {})
        if saved.has_optimizer:
            load_optimizer_tensors(
                state.optimizer,
                state.shards,
                saved.optimizer,
                values.get("state"),
                state.sharded,
            )
        for each in state.optimizers:
            load_groups(each, values.get("groups", []))
        if state.schedule:
            state.schedule.load_values(values.get("schedule"), step)

    def compared(self, tensors: Tensors) -> None:
        if self._state.sharded:
            return
        # An optimizer creates its state in the order of the gradients, which may differ.
        own = optimizer_tensors(self._state.optimizer, self._state.shards)
        tensors |= dict(sorted(own.items()))

"""The optimizers as a part of the state: this rank's own, and the groups of that of its mirror."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nanoray.checkpoint.state.optimizers import (
    changed_groups,
    group_values,
    known_format,
    load_groups,
    load_tensors,
    members_of,
    name_of,
    tensors_of,
    values_of,
)
from nanoray.checkpoint.state.part import StatePart
from nanoray.checkpoint.state.rank_state import RankState
from nanoray.checkpoint.state.state_dict import StateDict, Tensors
from nanoray.errors import CheckpointError
from nanoray.parallel.pieces import Shard


class OptimizerPart(StatePart):
    """The optimizer state of this rank's shards, its groups, and a script's schedulers."""

    def __init__(self, state: RankState) -> None:
        super().__init__(state)
        # The values of the optimizer's groups, to see which ones it changes
        self._group_values = group_values(state.optimizer)

    def pack(self, packed: StateDict) -> None:
        state = self._state
        if state.sharded:
            packed.has_optimizer = False
        else:
            packed.optimizer = optimizer_tensors(state.optimizer, state.shards)

        values: dict[str, Any] = {}
        groups = self.changed_groups()
        if groups:
            values["groups"] = groups
        # Of a sharded state, no parameter has such values.
        kept = values_of(state.optimizer, _names_of(state.shards))
        if kept:
            values["state"] = kept
        if state.schedule and state.schedule.has_state:
            values["schedule"] = state.schedule.values()
        if values:
            packed.meta["optimizer"] = values
        packed.meta["optimizer_class"] = name_of(state.optimizer)

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
        require_same_class(state.optimizer, saved)
        values = saved.meta.get("optimizer", {})
        kept = values.get("state", {})
        tensors = saved.optimizer
        # Before its first step an optimizer has no state.
        if saved.has_optimizer and (tensors or kept or step > 0):
            load_optimizer_tensors(state.optimizer, state.shards, tensors, kept, state.sharded)
        for each in state.optimizers:
            load_groups(each, values.get("groups", []))
        if state.schedule:
            state.schedule.load_values(values.get("schedule"), step)
        elif "schedule" in values:
            raise CheckpointError(
                "the checkpoint has the state of a scheduler, but the script gives none; give "
                "RuntimeEngine the same scheduler, or start anew with resume none"
            )

    def compared(self, tensors: Tensors) -> None:
        if self._state.sharded:
            return
        # An optimizer creates its state in the order of the gradients, which may differ.
        own = optimizer_tensors(self._state.optimizer, self._state.shards)
        tensors |= dict(sorted(own.items()))


def require_same_class(optimizer: torch.optim.Optimizer, saved: StateDict) -> None:
    """Raise CheckpointError for the state of another class, where its keys do not show whether it fits."""
    here, there = name_of(optimizer), saved.meta["optimizer_class"]
    is_unknown = any(known_format(member).keys is None for member in members_of(optimizer))
    if there != here and is_unknown:
        raise CheckpointError(
            f"the checkpoint has the state of {there}, and the optimizer is {here}; resume with the "
            "optimizer that wrote it"
        )


def notes_on_resume(state: RankState, saved: StateDict) -> list[str]:
    """Return what a user must know where another optimizer goes on with a state that fits."""
    notes = []
    here = name_of(state.optimizer)
    there = saved.meta["optimizer_class"]
    if there != here:
        notes.append(
            f"resume  the optimizer is {there} there and {here} here; its state fits, and is taken over"
        )
    # A rank's pieces may have no state because their parameters have had no gradient yet.
    if state.sharded and not saved.optimizer and saved.meta["step"] > 0:
        needed = known_format(state.optimizer).required
        if needed:
            notes.append(
                f"resume  the checkpoint has no state of the optimizer for the parameters of this rank; "
                f"{', '.join(sorted(needed))} begin anew"
            )
    return notes


def optimizer_tensors(optimizer: torch.optim.Optimizer, shards: Sequence[Shard]) -> Tensors:
    """Return the optimizer's state as one flat dict with names such as `exp_avg.<parameter>`."""
    return tensors_of(optimizer, _names_of(shards))


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer,
    shards: Sequence[Shard],
    tensors: Tensors,
    values: dict[str, Any] | None = None,
    cut: bool = False,
) -> None:
    """Restore what `optimizer_tensors` returned, in place on each parameter's device.

    `values` are those of `values_of`; with `cut` the tensors are flat pieces. Raises CheckpointError
    when the state belongs to another optimizer or to other parameters.
    """
    params = {shard.piece.name: shard.param for shard in shards}
    load_tensors(optimizer, params, tensors, values or {}, cut)


def _names_of(shards: Sequence[Shard]) -> dict[Tensor, str]:
    return {shard.param: shard.piece.name for shard in shards}

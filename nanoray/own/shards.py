"""A script's optimizer over this rank's shards: its class, groups and state, cut as they are, and its
hooks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nanoray.base.compat import STEP_POST_HOOKS, STEP_PRE_HOOKS, global_optimizer_hooks
from nanoray.config import Config
from nanoray.errors import ConfigError
from nanoray.mesh.mesh import Mesh
from nanoray.mesh.pieces import Shard
from nanoray.own.optimizer_trial import copy_of
from nanoray.parallel.hooks import StepHook
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


# The hooks of a script's optimizer, where a copy of it steps this rank's shards of the weights.
#
#     the copy steps its shards ─► the ranks exchange weights ─► hooks of the script's own optimizer
#
# `StepHooks` calls them, as the hook `AfterUpdate` of the Plan's steps.
#
# torch calls them from `step()`, at a moment when a rank has updated its own shards alone: a moving
# average of the weights (torch.optim.swa_utils.AveragedModel) would mix old and new ones. So the
# copies have none of the hooks, and the script's are called when the weights are complete, once per
# step. They receive the script's own optimizer, whose groups have the copy's values by then.
#
# In the other modes the script's optimizer itself steps, and torch calls its hooks.


def require_callable_hooks(optimizer: Optimizer, config: Config, has_whole_model: bool) -> None:
    """Raise ConfigError for hooks of a step that a mode could not call as torch does.

    has_whole_model: this rank updates the script's own model, and all of it.
    """
    if has_whole_model or not config.sharded:
        return
    mode = config.dp_mode
    for member in members_of(optimizer):
        name = type(member).__name__
        if getattr(member, STEP_PRE_HOOKS, None):
            raise ConfigError(
                f"dp_mode = {mode} leaves each rank a part of the gradients, which is all that the "
                f"hook before the step of {name} (register_step_pre_hook) would see; use "
                "register_step_post_hook, or dp_mode ddp or ddp_by_hand"
            )
        if mode == "fsdp" and getattr(member, STEP_POST_HOOKS, None):
            raise ConfigError(
                f"dp_mode = fsdp leaves no rank the whole weights, which the hook after the step of "
                f"{name} (register_step_post_hook) would expect; use dp_mode zero1 or zero2"
            )
        if _is_replaced(member):
            raise ConfigError(
                f"the step of this {name} has been replaced by another function, but dp_mode = "
                f"{mode} steps copies of it over shards; use register_step_post_hook, a subclass of "
                f"{name}, or dp_mode ddp or ddp_by_hand"
            )
    if any(global_optimizer_hooks()):
        raise ConfigError(
            "a hook on the steps of all optimizers (register_optimizer_step_pre_hook or _post_hook "
            f"of torch.optim.optimizer) would also see the copies that dp_mode = {mode} steps; "
            "register it on the optimizer: optimizer.register_step_post_hook(...)"
        )


def _is_replaced(optimizer: Optimizer) -> bool:
    """Return whether an optimizer object has another step than its class, but for a scheduler's."""
    step = vars(optimizer).get("step")
    return step is not None and not hasattr(step, "_wrapped_by_lr_sched")


class StepHooks:
    """Calls the hooks of a script's optimizer after the steps of copies of it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        # The copies that have stepped since the hooks were called, by the number of the optimizer
        self._stepped: dict[int, Optimizer] = {}

    def follow(self, shards: Optimizer) -> None:
        """Note the steps of a copy, of this rank's shards or of those that it mirrors."""
        for number, member in enumerate(members_of(shards)):
            member.register_step_post_hook(partial(self._note, number))

    def _note(self, number: int, copy: Optimizer, *arguments: object) -> None:
        self._stepped[number] = copy

    def call(self, wait: Callable[[], None]) -> None:
        """Call the hooks if there was a step; `wait` returns when the weights are complete.

        A rank may be lost in between. Then the next group of ranks calls this before its first step.
        """
        stepped = self._stepped
        hooked = []
        for number, member in enumerate(members_of(self._optimizer)):
            hooks: dict[int, Any] = getattr(member, STEP_POST_HOOKS, {})
            if number in stepped and hooks:
                hooked.append((member, stepped[number], [*hooks.values()]))
        if hooked:
            wait()
        # Only now: the wait fails where a rank is lost.
        self._stepped = {}

        for member, shards, functions in hooked:
            for group, of_shards in zip(member.param_groups, shards.param_groups, strict=True):
                group.update({key: of_shards[key] for key in of_shards if key != "params"})
            for function in functions:
                function(member, (), {})


class AfterUpdate(StepHook):
    """Calls the hooks of a script's optimizer after an update, when this rank has all weights."""

    def __init__(self, hooks: StepHooks, wait: Callable[[], None]) -> None:
        """`wait` returns when the weights are complete."""
        self._hooks = hooks
        self._wait = wait

    def sent(self) -> None:
        self._hooks.call(self._wait)

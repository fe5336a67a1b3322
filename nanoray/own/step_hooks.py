"""The hooks of a script's optimizer, where a copy of it steps this rank's shards of the weights.

    the copy steps its shards ─► the ranks exchange weights ─► hooks of the script's own optimizer

`StepHooks` calls them, as the hook `AfterUpdate` of the Plan's steps.

torch calls them from `step()`, at a moment when a rank has updated its own shards alone: a moving
average of the weights (torch.optim.swa_utils.AveragedModel) would mix old and new ones. So the
copies have none of the hooks, and the script's are called when the weights are complete, once per
step. They receive the script's own optimizer, whose groups have the copy's values by then.

In the other modes the script's optimizer itself steps, and torch calls its hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim import Optimizer

from nanoray.base.compat import STEP_POST_HOOKS, STEP_PRE_HOOKS, global_optimizer_hooks
from nanoray.config import Config
from nanoray.errors import ConfigError
from nanoray.parallel.hooks import StepHook
from nanoray.state.optimizers import members_of


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

"""The learning rates of a script: those that its optimizers have, moved by its own schedulers.

    update ─► schedulers' step() ─► groups of the script's optimizers ─┬─► ddp: they are what trains
                                                                       └─► zero, fsdp: copied to the
                                                                           optimizers of the shards

A scheduler steps once for each completed step of the run, also for one whose update was left out:
so its length is counted in the run's steps, and no GPU is waited for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from nanoray.checkpoint.state.optimizers import (
    changed_groups,
    group_values,
    load_groups,
    members_of,
)
from nanoray.errors import CheckpointError, ConfigError
from nanoray.machine.compat import mark_as_stepped
from nanoray.models.values import put_together, take_apart

Optimizer = torch.optim.Optimizer


class ScriptSchedule:
    """The rates of a script's optimizers (state.Schedule). Without schedulers they stay as they are."""

    def __init__(self, schedulers: Sequence[Any], optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._schedulers = list(schedulers)
        self._by_step = [s for s in self._schedulers if not isinstance(s, ReduceLROnPlateau)]
        self._by_loss = [s for s in self._schedulers if isinstance(s, ReduceLROnPlateau)]
        self._before = group_values(optimizer)

    @property
    def lr(self) -> float | Tensor | None:
        """The rate of the first group in the next update. A tensor is copied, not waited for."""
        lr: float | Tensor | None = self._optimizer.param_groups[0].get("lr")
        return lr.clone() if isinstance(lr, Tensor) else lr

    @property
    def has_state(self) -> bool:
        return bool(self._schedulers)

    def require_losses(self, eval_every: int) -> None:
        """Raise ConfigError for a scheduler that follows a loss which the run never computes."""
        if self._by_loss and not eval_every:
            raise ConfigError(
                f"{_name(self._by_loss[0])} follows the validation loss, but the run evaluates "
                "nothing; give fit(train_data, val_data), and eval_every above 0"
            )

    def step(self, optimizers: Sequence[Optimizer]) -> None:
        if not self._by_step:
            return
        with self._passed_on(optimizers):
            for member in members_of(self._optimizer):
                # In a sharded mode another optimizer has stepped, and torch would warn.
                mark_as_stepped(member)
            for scheduler in self._by_step:
                scheduler.step()

    def see_loss(self, loss: float, optimizers: Sequence[Optimizer]) -> None:
        with self._passed_on(optimizers):
            for scheduler in self._by_loss:
                scheduler.step(loss)

    @contextmanager
    def _passed_on(self, optimizers: Sequence[Optimizer]) -> Iterator[None]:
        """Copy what the schedulers change inside to the optimizers that train, where these are others."""
        others = [optimizer for optimizer in optimizers if optimizer is not self._optimizer]
        before = group_values(self._optimizer) if others else []
        yield
        if others:
            changed = changed_groups(self._optimizer, before)
            for optimizer in others:
                load_groups(optimizer, changed)

    def values(self) -> dict[str, Any]:
        states = []
        for scheduler in self._schedulers:
            states.append(take_apart(scheduler.state_dict(), _name(scheduler)))
        return {
            "schedulers": [_name(scheduler) for scheduler in self._schedulers],
            "states": states,
            "groups": changed_groups(self._optimizer, self._before),
        }

    def load_values(self, values: dict[str, Any] | None, step: int) -> None:
        names = [_name(scheduler) for scheduler in self._schedulers]
        saved = [] if values is None else values["schedulers"]
        # A run that has begun under other rates would continue at a wrong place of the schedule.
        if saved != names and (saved or step > 0):
            raise CheckpointError(
                f"the checkpoint of step {step} has the state of {_listed(saved)}, but the script "
                f"gives {_listed(names)}; give the same as the run that wrote it, or start anew "
                "with resume none"
            )
        if values is None:
            return
        for scheduler, state in zip(self._schedulers, values["states"], strict=True):
            scheduler.load_state_dict(put_together(state))
        load_groups(self._optimizer, values["groups"])


def _name(scheduler: Any) -> str:
    return type(scheduler).__name__


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "no scheduler"


# What a script gives.


def schedulers_of(given: Any, optimizer: Optimizer) -> list[Any]:
    """Return a script's schedulers: None, one, a list, or a function of the step.

    A function returns the factor of the rate after a number of steps, as LambdaLR's does.
    Raises ConfigError for one that would change nothing, and for one that was left out.
    """
    given = given if isinstance(given, (list, tuple)) else [given]
    schedulers: list[Any] = []
    for each in given:
        if callable(each) and not hasattr(each, "step"):
            for member in members_of(optimizer):
                schedulers.append(LambdaLR(member, each))
        elif each is not None:
            schedulers.append(each)
    for scheduler in schedulers:
        _require_own(scheduler, optimizer)
    for member in members_of(optimizer):
        _require_given(schedulers, member)
    return schedulers


def _require_own(scheduler: Any, optimizer: Optimizer) -> None:
    """Raise ConfigError for a scheduler of another optimizer."""
    driven = getattr(scheduler, "optimizer", None)
    if not any(driven is member for member in members_of(optimizer)):
        raise ConfigError(
            f"{_name(scheduler)} does not belong to the optimizer that RuntimeEngine was given, so "
            "it would change nothing; make it from that optimizer"
        )


def _require_given(schedulers: Sequence[Any], member: Optimizer) -> None:
    """Raise ConfigError for an optimizer with a scheduler that the script has not given.

    It would never step, and the run would train at its first rate.
    """
    has_one = hasattr(member.step, "_wrapped_by_lr_sched")  # ReduceLROnPlateau leaves no trace
    if has_one and not any(each.optimizer is member for each in schedulers):
        raise ConfigError(
            f"a scheduler is attached to {type(member).__name__}, but RuntimeEngine does not have "
            "it and would never step it; give RuntimeEngine(..., scheduler=...), or remove it"
        )

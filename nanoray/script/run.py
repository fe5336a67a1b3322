"""One rank's part of a run, as a script's function receives it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanoray.checkpoint.run_folder import RunSpec
from nanoray.config import Config
from nanoray.errors import ConfigError
from nanoray.machine.metrics import METRICS, RECORD_KEYS
from nanoray.parallel.rendezvous import Order, Rendezvous

Value = float | int | str


class DryRunEnded(BaseException):
    """Raised by `fit` at the end of a dry run; no `except Exception` of a script catches it."""


@dataclass
class Run:
    """One rank's part of a run.

    nanoray.launch passes it to the script's function, on every rank; a callback receives it on rank
    0; in a plain script it is the engine's attribute `run`. Rank and number of ranks may change
    after a fault, so read them when they are needed.
    """

    spec: RunSpec
    """what all ranks share: configuration, data set, folder, and `started` (Unix seconds)"""

    rendezvous: Rendezvous
    """this rank's place, device and address; of the launchers"""

    given: frozenset[str]
    """keys of the configuration that the script has set; of the launchers"""

    observers: Sequence[Any] = ()
    """observers of notes and records; of the launchers"""

    wanted: Callable[[], Order] = lambda: Order.GO_ON
    """the order of the launcher that started this rank; of the launchers"""

    store: Any = field(default=None, repr=False)
    """the TCPStore, if this process serves it; of the launchers"""

    rejoin: Any = field(default=None, repr=False)
    """waits for the next group after a fault; of the launchers"""

    outcome: dict[str, Any] | None = None
    """what `fit` has returned; None before its end"""

    # What the script has asked for
    _finish: bool = field(default=False, repr=False)
    _save: bool = field(default=False, repr=False)
    _voted_to_save: bool = field(default=False, repr=False)
    # Values that wait for the next record
    _logged: dict[str, Value] = field(default_factory=dict, repr=False)

    on_fit: Callable[[Any], None] | None = None
    """of a dry run: receives the task that `fit` would train, and ends the script"""

    loop: Any = field(default=None, repr=False)
    """the ScriptLoop (script/loop.py): what a loop of the script's own needs, until an engine trains"""

    @property
    def config(self) -> Config:
        """The complete configuration, with all defaults."""
        return self.spec.config

    @property
    def folder(self) -> Path:
        """The run's folder: checkpoints, metrics.jsonl, logs. The same on all ranks."""
        return self.spec.folder

    @property
    def rank(self) -> int:
        """The number of this rank among all, from 0."""
        return self.rendezvous.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.rendezvous.world_size

    @property
    def local_rank(self) -> int:
        """The number of this rank among those of its node, from 0."""
        return self.rendezvous.local_rank

    @property
    def device(self) -> str:
        """The device of this rank, as torch.device takes it: `cpu`, or `cuda:0`."""
        return self.rendezvous.device

    @property
    def restarts(self) -> int:
        """How often a fault has made all ranks start again, or an engine's ranks meet again."""
        return self.spec.attempt

    @property
    def should_stop(self) -> bool:
        """Whether a loop of its own should save and leave: a stop, or a node that is drained.

        Ranks learn it at different moments, so let them agree, as in examples/own_loop.py. An engine
        stops by itself.
        """
        return self._finish or self.wanted() is Order.STOP

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Add values to the record of a step: metrics.jsonl, TensorBoard and trackers.

        Values are numbers, tensors of one element, or strings. Only those of rank 0 are recorded.

        Of an engine: from `on_step_end` and `on_eval_end` they belong to that step, from anywhere
        else to the next record, and after the last one to that one. A loop of its own gives the
        `step`, best on all ranks: the driver then names it when a rank fails.

        Raises ConfigError for a name of docs/metrics.md, unless a loop of its own gives it, for a
        step while an engine counts them, and what float() raises for another value.
        """
        loop = self.loop
        if step is not None and loop is None:
            raise ConfigError(
                f"run.log: step = {step} is for a loop of its own, and an engine counts its steps; "
                "drop the step"
            )
        taken = RECORD_KEYS if step is not None else (*METRICS, *RECORD_KEYS)
        logged: dict[str, Value] = {}
        for name, value in values.items():
            if name in taken:
                raise ConfigError(f"run.log: {name} is a name of nanoray's own; choose another one")
            if type(value) in (int, str):
                logged[name] = value
            else:
                # float() of a loss that still requires a gradient would warn.
                logged[name] = float(value.detach() if hasattr(value, "detach") else value)
        if step is None or loop is None:
            self._logged |= logged
            return
        loop.require_in_order(step)
        self._logged |= logged
        loop.record(step)

    def leave_loop(self, error: BaseException | None = None) -> None:
        """Close the files of a loop of its own, which `error` may have ended. (of the launchers)"""
        loop, self.loop = self.loop, None
        if loop is not None:
            loop.close(error)

    def take_logged(self) -> dict[str, Value]:
        """Return the values since the last call. (of the engine)"""
        values = self._logged
        self._logged = {}
        # JSON has no NaN and no infinity: they are recorded as texts.
        for name, value in values.items():
            if isinstance(value, float) and not math.isfinite(value):
                values[name] = str(value)
        return values

    def stop(self) -> None:
        """End the run with a checkpoint, on all ranks after the same step. (any rank, any thread)

        From a callback, that is the step after the one that the callback was called for.
        """
        self._finish = True

    def save(self) -> None:
        """Save a checkpoint, on all ranks after the same step. (any rank, any thread)"""
        self._save = True

    def order(self) -> Order:
        """Return what this rank votes for in the next step."""
        order = self.wanted()
        self._voted_to_save = self._save
        self._save = False
        if self._finish:
            order = max(order, Order.FINISH)
        if self._voted_to_save:
            order = max(order, Order.SAVE)
        return order

    def group_lost(self) -> None:
        """Ask again for a checkpoint that the lost group may not have saved."""
        self._save = self._save or self._voted_to_save

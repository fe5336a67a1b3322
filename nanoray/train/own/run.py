"""One rank's part of a run, as a script's function receives it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from nanoray.config import Config
from nanoray.mesh.rendezvous import Order, Rendezvous
from nanoray.run import RunSpec


@dataclass
class Run:
    """One rank's part of a run, as the script's function receives it."""

    spec: RunSpec
    rendezvous: Rendezvous
    given: frozenset[str]  # keys of the configuration that the script has set
    watchers: Sequence[Any] = ()
    wanted: Callable[[], Order] = lambda: Order.GO_ON
    store: Any = field(default=None, repr=False)
    rejoin: Any = field(default=None, repr=False)
    outcome: dict[str, Any] | None = None  # of `fit`
    # What the script has asked for
    _finish: bool = field(default=False, repr=False)
    _save: bool = field(default=False, repr=False)
    _voted_to_save: bool = field(default=False, repr=False)
    # Of a dry run: receives the task that `fit` would train, and ends the script
    on_fit: Callable[[Any], None] | None = None

    @property
    def config(self) -> Config:
        return self.spec.config

    @property
    def rank(self) -> int:
        return self.rendezvous.rank

    @property
    def world_size(self) -> int:
        return self.rendezvous.world_size

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

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

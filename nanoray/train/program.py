"""What a command trains in the place of rank.train: a script's function, which script/ makes a Program.

    train_here(loaded, started)           ─► rank.train
    train_here(loaded, started, program)  ─► program ─► the script ─► ... ─► rank.train

So what opens a run does not know how a script is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from nanoray.checkpoint.run_folder import RunSpec
from nanoray.config import Config
from nanoray.parallel.rendezvous import Order, Rendezvous


class Trains(Protocol):
    """Trains as one rank, or describes what it would train. It can be pickled."""

    @property
    def name(self) -> str:
        """The name of the script's function."""

    @property
    def main(self) -> Callable[[Any], Any] | None:
        """The script's function, if there is one."""

    def __call__(
        self,
        spec: RunSpec,
        rendezvous: Rendezvous,
        observers: Sequence[Any] = (),
        wanted: Callable[[], Order] = lambda: Order.GO_ON,
        store: Any = None,
        rejoin: Any = None,
    ) -> dict[str, Any]:
        """Train `spec` as one rank and return the outcome, as rank.train does. (all ranks)"""

    def dry_run(self, config: Config, ranks: int, placement: str) -> None:
        """Print mesh, batch and memory of a run of this many ranks, without training."""

"""The program of `nanoray tune`: what each rank runs in the place of rank.train.

    nanoray tune ─► launch, or train_here ─► Tuning(spec, rendezvous, ...) ─► Search ─► tuned.yaml

So a search has what a run has: placement on Ray, torchrun, a RayJob, logs, a restart after a lost
rank. After a restart it goes on from the blocks in tune.jsonl.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanoray.checkpoint.run_folder import RunSpec
from nanoray.config import Config
from nanoray.errors import ConfigError
from nanoray.lab.tune.request import SearchRequest
from nanoray.parallel.rendezvous import Order, Rendezvous


@dataclass(frozen=True)
class Tuning(SearchRequest):
    """A search in the place of a training run (train.program.Trains)."""

    # Where this process has searched: only rank 0 could find it by the time of its command
    folders: list[Path] = field(default_factory=list)

    @property
    def name(self) -> str:
        return "nanoray tune"

    def __call__(
        self,
        spec: RunSpec,
        rendezvous: Rendezvous,
        observers: Sequence[Any] = (),
        wanted: Callable[[], Order] = lambda: Order.GO_ON,
        store: Any = None,
        rejoin: Any = None,
    ) -> dict[str, Any]:
        """Search as one rank, and return the outcome. (all ranks)"""
        # It imports torch, which the driver does without.
        from nanoray.lab.tune.rank import search_on_rank

        outcome = search_on_rank(self, spec, rendezvous, observers, wanted, store)
        self.folders.append(spec.folder)
        return outcome

    def dry_run(self, config: Config, ranks: int, placement: str) -> None:
        """Print the plan of the run that would be tuned."""
        raise ConfigError("a search has no dry run; leave --dry_run to the run itself")

"""What is tuned: the model of a configuration, or that of a script."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from nanoray.checkpoint.run_folder import RunSpec
from nanoray.errors import ConfigError
from nanoray.parallel.rendezvous import Rendezvous
from nanoray.script.run import DryRunEnded, Run
from nanoray.train.tasks import Task, task_of

T = TypeVar("T")


@dataclass(frozen=True)
class TunedModel:
    """Hands the model and the data of a run to those who train."""

    main: Callable[[Run], Any] | None  # of a script, called anew for each block, up to its `fit`
    given: frozenset[str]  # keys that the script has set
    rendezvous: Rendezvous

    def open(self, spec: RunSpec, use: Callable[[Task], T]) -> T:
        """Make the task of `spec`, and return what `use` returns for it. (all ranks)"""
        if self.main is None:
            return use(task_of(spec))
        results: list[T] = []
        torch.manual_seed(spec.config.seed)  # the same new weights on all ranks
        run = Run(spec, self.rendezvous, self.given, on_fit=lambda task: results.append(use(task)))
        try:
            self.main(run)
        except DryRunEnded:
            return results[0]
        raise ConfigError(
            "the function returned without training; call RuntimeEngine(...).fit in it"
        )

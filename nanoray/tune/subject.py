"""What is tuned: the model of a configuration, or that of a script."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from nanoray.checkpoint.run import RunSpec
from nanoray.errors import ConfigError
from nanoray.mesh.rendezvous import Rendezvous
from nanoray.own.run import DryRunEnded, Run
from nanoray.train.tasks import Task, task_of
from nanoray.tune.trials import T, TuneSubject


class Configured:
    """The model that the configuration describes."""

    keeps_tasks = True

    def open(self, spec: RunSpec, use: Callable[[Task], T]) -> T:
        """Make the task of `spec`, and return what `use` returns for it. (all ranks)"""
        return use(task_of(spec))


@dataclass(frozen=True)
class Scripted:
    """The model of a script, whose function is called anew for each block, up to its `fit`."""

    main: Callable[[Run], Any]
    given: frozenset[str]
    rendezvous: Rendezvous
    keeps_tasks = False  # when its function returns, what it made may be closed

    def open(self, spec: RunSpec, use: Callable[[Task], T]) -> T:
        """Make the task of `spec`, and return what `use` returns for it. (all ranks)"""
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


def subject_of(
    spec: RunSpec,
    rendezvous: Rendezvous,
    main: Callable[[Run], Any] | None,
    given: frozenset[str],
) -> TuneSubject:
    """Return what is tuned in a run."""
    return Scripted(main, given, rendezvous) if main else Configured()

"""Train a module of the user's script, with checkpoints, recovery, parallelism and metrics.

The launchers call a Program on every rank, which calls the script's function. It makes a
RuntimeEngine, and its `fit` calls recipe.train with an OwnTask:

    nanoray.launch(main, config) ─► Program ─► main(run)
    main(run) ─► RuntimeEngine(model, ..., run).fit(data) ─► recipe.train
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from nanoray.checkpoint.storable import unstorable
from nanoray.errors import ConfigError
from nanoray.forecast.own_models import DryRunEnded
from nanoray.mesh.rendezvous import Rendezvous
from nanoray.models.batch_norm import replace_norms
from nanoray.run import RunSpec
from nanoray.train.own.callbacks import Callback, Observer
from nanoray.train.own.optimizer import group_of, require_plain_state
from nanoray.train.own.run import Run
from nanoray.train.own.task import Given, LossFn, OwnTask
from nanoray.train.recipe import train


class RuntimeEngine:
    """Trains a module on data of the script's own, as one rank of a run."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        run: Run,
        loss_fn: LossFn | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        """Take a model and the optimizer of its parameters. All ranks start from rank 0's weights.

        The loss of a batch is loss_fn(model(inputs), targets), a mean over the batch; without
        `loss_fn`, model(inputs, targets). The optimizer keeps its rates and groups; `lr` and
        `schedule` of the configuration replace the rate of its first group, and the others keep
        their ratio to it. torch's BatchNorm is replaced, in place, by one whose running statistics
        are equal on all ranks (models/batch_norm.py).
        """
        self.model = model
        self.optimizer = optimizer
        self.run = run
        self.loss_fn = loss_fn
        self.callbacks = callbacks
        # torch's BatchNorm would let running statistics drift apart.
        replace_norms(model)
        groups = group_of(model, optimizer)
        require_plain_state(optimizer)
        for line in unstorable(model, optimizer, run.config.sharded):
            raise ConfigError(line)
        self._given = Given(model, optimizer, loss_fn, groups, run)

    def fit(
        self, train_data: Any, val_data: Any = None, steps: int | None = None
    ) -> dict[str, Any]:
        """Train for `steps` optimizer steps, and return the outcome. (all ranks)

        Without `steps` they are max_steps of the configuration. `train_data` and `val_data`: a
        dataset with len() and [], a DataLoader (its dataset is taken), or an iterable of batches of
        micro_batch_size samples. Items and batches are pairs (inputs, targets). Raises ConfigError
        for a second call, and NanorayError when the run cannot start or continue.
        """
        run = self.run
        if run.outcome is not None:
            raise ConfigError("fit was called twice in one run; launch a run for each of them")
        # A dry run, or `nanoray inspect`, ends the script here.
        if run.on_fit:
            run.on_fit(OwnTask(self._given, run.spec, train_data, val_data, steps))
            raise DryRunEnded
        observers = [Observer(callback, run) for callback in self.callbacks]
        watchers = [*run.watchers, *observers]

        def task_of(spec: RunSpec) -> OwnTask:
            return OwnTask(self._given, spec, train_data, val_data, steps)

        # The script may read run.rank later, so it follows each new rendezvous.
        def rejoin(lost: str) -> tuple[RunSpec, Rendezvous]:
            spec, run.rendezvous = run.rejoin(lost)
            return spec, run.rendezvous

        again = rejoin if run.rejoin else None
        run.outcome = train(
            run.spec, run.rendezvous, watchers, run.wanted, run.store, again, task_of=task_of
        )
        if run.rank == 0:
            for observer in observers:
                observer.on_end(run.outcome)
        return run.outcome

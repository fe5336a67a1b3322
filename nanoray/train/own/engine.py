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
from nanoray.train.own.checks import (
    lazy_parameters,
    require_dataset,
    require_loss_fn,
    require_module,
    require_trainable,
)
from nanoray.train.own.optimizer import (
    optimizer_of,
    require_all_parameters,
    require_elementwise,
)
from nanoray.train.own.run import Run
from nanoray.train.own.schedule import (
    OwnSchedule,
    require_no_other_scheduler,
    schedulers_of,
)
from nanoray.train.own.task import Given, LossFn, OwnTask
from nanoray.train.own.trial import fill_lazy_parameters
from nanoray.train.recipe import train


class RuntimeEngine:
    """Trains a module on data of the script's own, as one rank of a run."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        run: Run,
        loss_fn: LossFn | None = None,
        callbacks: Sequence[Callback] = (),
        scheduler: Any = None,
    ) -> None:
        """Take a model and the optimizer of its parameters. All ranks start from rank 0's weights.

        The loss of a batch is loss_fn(model(inputs), targets), a mean over the batch or a
        nanoray.Weighted; without `loss_fn`, model(inputs, targets). Several optimizers are stepped
        in their order. They keep their rates and groups, unless the configuration sets `lr`,
        `schedule` or `warmup_steps`: then the rate of the first group follows it, and the others
        keep their ratio to it. A `scheduler` of torch, a list of them, or a function that returns
        the factor of the rate after a number of steps, is stepped once per optimizer step. torch's
        BatchNorm is replaced, in place, by one whose running statistics are equal on all ranks
        (models/batch_norm.py).
        """
        require_module(model)
        require_loss_fn(loss_fn)
        self.model = model
        self.optimizer = optimizer
        self.run = run
        self.loss_fn = loss_fn
        self.callbacks = callbacks
        one = optimizer_of(optimizer)
        updated = require_all_parameters(model, one)
        schedulers = schedulers_of(scheduler, one)
        require_no_other_scheduler(one, schedulers)
        if run.config.sharded:
            require_elementwise(one, run.config.dp_mode)
        for line in unstorable(model, one, run.config.sharded):
            raise ConfigError(line)
        self._given = Given(model, one, loss_fn, updated, run, OwnSchedule(schedulers, one))
        # torch's BatchNorm would let running statistics drift apart. A lazy norm has no channels
        # before its first batch.
        if not lazy_parameters(model):
            replace_norms(model)

    def fit(
        self, train_data: Any, val_data: Any = None, steps: int | None = None
    ) -> dict[str, Any]:
        """Train for `steps` optimizer steps, and return the outcome. (all ranks)

        Without `steps` they are max_steps of the configuration. `train_data` and `val_data`: a
        dataset with len() and [], a DataLoader, or an iterable of batches. Items and batches are
        pairs (inputs, targets), or dicts of the model's arguments. Raises ConfigError
        for a second call, and NanorayError when the run cannot start or continue.
        """
        run = self.run
        if run.outcome is not None:
            raise ConfigError("fit was called twice in one run; launch a run for each of them")
        require_dataset(train_data, "train", val_data)
        require_dataset(val_data, "validation")
        if lazy_parameters(self.model):
            task = OwnTask(self._given, run.spec, train_data, val_data, steps)
            fill_lazy_parameters(self.model, self.loss_fn, *task.first_batch())
            replace_norms(self.model)
        require_trainable(self.model, run.config)

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

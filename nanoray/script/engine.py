"""Train a module of the user's script, with checkpoints, recovery, parallelism and metrics.

The launchers call a Program on every rank, which calls the script's function. It makes a
RuntimeEngine, and its `fit` calls rank.train with an ScriptTask:

    nanoray.launch(main, config) ─► Program ─► main(run)
    main(run) ─► RuntimeEngine(model, ..., run).fit(data) ─► rank.train

A plain script needs no function: with a configuration in the place of `run`, `fit` trains in this
process, or as a rank of torchrun:

    RuntimeEngine(model, ..., {"dp_mode": "zero1"}).fit(data) ─► Program ─► rank.train
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, SupportsIndex

import torch
from torch import nn

from nanoray.checkpoint.run_folder import RunSpec
from nanoray.cli import Loaded
from nanoray.config import Config
from nanoray.errors import ConfigError, NanorayError
from nanoray.machine.output import lasting_output
from nanoray.models.batch_norm import adopt_norms
from nanoray.parallel.mesh import abandon_groups
from nanoray.parallel.rendezvous import Rendezvous
from nanoray.script.call import WithLoss, is_part_of_model
from nanoray.script.callbacks import Callback, observers_of
from nanoray.script.checks import require_module, require_sharable, require_storable
from nanoray.script.optimizer import (
    optimizer_of,
    require_all_parameters,
    require_elementwise,
    require_no_hooks,
)
from nanoray.script.program import Program
from nanoray.script.run import DryRunEnded, Run
from nanoray.script.schedule import ScriptSchedule, schedulers_of
from nanoray.script.settings import loaded_of, refuse_while_spawned, steps_of, with_steps
from nanoray.script.task import Given, LossFn, ScriptTask
from nanoray.train.__main__ import train_here
from nanoray.train.agree import tensors_in_order
from nanoray.train.rank import train


class RuntimeEngine:
    """Trains a module on data of the script's own, as one rank of a run.

    One engine has one model and its optimizers. Each rank makes its own, with the same code.
    """

    model: nn.Module
    """the script's module, trained in place; with fsdp on Ray a copy of it is trained"""

    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
    """the script's optimizer, or its list of them"""

    loss_fn: LossFn | None
    """the function of the model's output and the targets; None: the model returns the loss. A
    module with tensors of its own is trained and saved with the model"""

    callbacks: Sequence[Callback]
    """the script's callbacks, which are called on rank 0"""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        run: Run | Config | Mapping[str, Any],
        loss_fn: LossFn | None = None,
        callbacks: Sequence[Callback] = (),
        scheduler: Any = None,
        elementwise: bool = False,
    ) -> None:
        """Take a model and the optimizer of its parameters. All ranks start from rank 0's weights.

        `run` is what nanoray.launch passes to a function; or, in a plain script, the configuration.
        The loss of a batch is loss_fn(model(inputs), targets), a mean over the batch or a
        nanoray.Weighted; without `loss_fn`, model(inputs, targets). Several optimizers are stepped
        in their order, and keep their rates and groups. A `scheduler` of torch, a list of them, or a
        function from the step to the factor of the rate, is stepped once per optimizer step.
        `elementwise`: each optimizer
        updates an element from its own gradient and state alone, so that zero and fsdp may cut it;
        of torch's AdamW and the like that is known. The running statistics of torch's batch norms
        become equal on all ranks (models/batch_norm.py).
        """
        self._loaded: Loaded | None = None
        if isinstance(run, Run):
            self._run: Run | None = run
        else:
            end_in_one_line()
            self._run = None
            self._loaded = loaded_of(run)
        require_module(model)
        self.model = model
        self.optimizer = optimizer
        self.loss_fn = loss_fn
        self.callbacks = [*callbacks]  # an iterator would yield them once
        # A loss with tensors of its own is trained and saved with the model.
        self._trained = model
        self._loss_fn = loss_fn
        if isinstance(loss_fn, nn.Module) and is_part_of_model(loss_fn):
            self._trained = WithLoss(model, loss_fn)
            self._loss_fn = None
        self._one = optimizer_of(optimizer)
        self._updated = require_all_parameters(self._trained, self._one)
        self._schedule = ScriptSchedule(schedulers_of(scheduler, self._one), self._one)
        self._elementwise = elementwise
        self._is_cut = False  # whether a fit has left the optimizer's state to its shards
        # torch's batch norms would let running statistics drift apart.
        adopt_norms(self._trained)

    @property
    def run(self) -> Run:
        """This rank's part of the run.

        In a plain script there is one from `fit` on; before it this raises ConfigError.
        """
        if self._run is None:
            raise ConfigError("there is no run before fit; read it there, or in a callback")
        return self._run

    def fit(
        self, train_data: Any, val_data: Any = None, steps: SupportsIndex | None = None
    ) -> dict[str, Any]:
        """Train for `steps` optimizer steps, and return the outcome. (all ranks)

        Without `steps` they are max_steps of the configuration. `train_data` and `val_data`: a
        dataset with len() and [], a DataLoader, or an iterable of batches. Items and batches are
        pairs (inputs, targets), or dicts of the model's arguments. With a configuration, a second
        call is a new run, which goes on with the weights and the optimizer as they are. Raises
        ConfigError for a second call in a run of nanoray.launch, and NanorayError when the run
        cannot start or continue.
        """

        own_steps = steps_of(steps)

        def fit_as(run: Run) -> None:
            self._run = run
            self._fit(run, train_data, val_data, own_steps)
            self._is_cut = run.config.sharded

        if self._loaded is not None:
            if self._is_cut:
                raise ConfigError(
                    f"dp_mode = {self._loaded.config.dp_mode} has cut the state of the optimizer in "
                    "the first fit; fit once, or start anew with resume auto and more steps"
                )
            return fit_here(self._loaded, own_steps, fit_as)

        run = self.run
        if run.outcome is not None:
            raise ConfigError("fit was called twice in one run; launch a run for each of them")
        return self._fit(run, train_data, val_data, own_steps)

    def _fit(self, run: Run, train_data: Any, val_data: Any, steps: int | None) -> dict[str, Any]:
        given = Given(
            self._trained,
            self._one,
            self._loss_fn,
            self._updated,
            run,
            self._schedule,
        )

        def task_of(spec: RunSpec) -> ScriptTask:
            return ScriptTask(given, spec, train_data, val_data, steps)

        require_sharable(self._trained, run.config, run.world_size)
        require_storable(self._trained, run.config.sharded)
        if run.config.sharded:
            require_elementwise(self._one, run.config.dp_mode, self._elementwise)
            require_no_hooks(self._one, run.config.dp_mode)

        # A dry run, or `nanoray inspect`, ends the script here.
        if run.on_fit:
            run.on_fit(task_of(run.spec))
            raise DryRunEnded
        run.leave_loop()  # from here on the engine counts the steps, and keeps the files
        observers = [*run.observers, *observers_of(self.callbacks, run, self._trained)]

        # The script may read run.rank later, so it follows each new rendezvous.
        def rejoin(lost: str) -> tuple[RunSpec, Rendezvous]:
            run.group_lost()
            spec, run.rendezvous = run.rejoin(lost)
            return spec, run.rendezvous

        again = rejoin if run.rejoin else None
        run.outcome = train(
            run.spec,
            run.rendezvous,
            observers,
            run.order,
            run.store,
            again,
            task_of=task_of,
            tensors=tensors_in_order(self._trained),
        )
        return run.outcome


# `fit` of a plain script, without nanoray.launch: `python script.py`, or under torchrun.
#
# The script calls `fit` in the middle, and goes on after it. So a run that fails raises, signals are
# handled only while it trains, and process groups are left at its end.


def fit_here(loaded: Loaded, steps: int | None, fit: Callable[[Run], None]) -> dict[str, Any]:
    """Train in this process, as the only rank or as one of a launcher's; return the outcome.

    `fit` trains a model as the rank that it is given. After Ctrl-C, with a checkpoint, it raises
    KeyboardInterrupt, and after another stop signal SystemExit, as Python would without nanoray.
    """
    refuse_while_spawned()
    loaded = with_steps(loaded, steps)
    try:
        # A terminal that is closed must not end the run before it has saved.
        with lasting_output():
            ended = train_here(loaded, time.time(), Program(fit, loaded.given, may_loop=False))
    finally:
        # The next fit forms its own groups, and the end of Python must not wait for their threads.
        abandon_groups()
    if ended is None:  # a dry run, which ends the script
        raise SystemExit(0)
    if ended.code == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    if ended.code:
        raise SystemExit(ended.code)
    return ended.outcome


def end_in_one_line() -> None:
    """Let an error of nanoray that a script does not catch end it in one line, with its exit code.

    Nothing changes where another program has its own way to show errors, as notebooks have.
    """
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _print_in_one_line


def _print_in_one_line(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    if not isinstance(error, NanorayError):
        sys.__excepthook__(kind, error, traceback)
        return
    # init_process_group has a hook around this one, which would lose what it keeps of sys.stderr.
    print(f"error: {error}", file=sys.__stderr__, flush=True)
    raise SystemExit(error.exit_code)

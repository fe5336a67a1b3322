"""Train a module of the user's script, with checkpoints, recovery, parallelism and metrics.

The launchers call a Program on every rank, which calls the script's function. It makes a
RuntimeEngine, and its `fit` calls recipe.train with an OwnTask:

    nanoray.launch(main, config) ─► Program ─► main(run)
    main(run) ─► RuntimeEngine(model, ..., run).fit(data) ─► recipe.train
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nanoray.config import Batch, Config, resolve_batch
from nanoray.data.dataset import own_data
from nanoray.data.own import LOADER, OwnData
from nanoray.data.tokens import Samples
from nanoray.errors import CheckpointError, ConfigError
from nanoray.forecast.own_models import DryRunEnded, own_lines
from nanoray.mesh.pieces import Shard
from nanoray.mesh.rendezvous import Order, Rendezvous
from nanoray.models.batch_norm import replace_norms
from nanoray.run import RunSpec
from nanoray.state import PROBE, kept_alone
from nanoray.train.recipe import train
from nanoray.train.tasks import Loss, RankStates
from nanoray.train.workload import Workload

log = logging.getLogger("nanoray")
LossFn = Callable[[Any, Any], Tensor]  # (the model's output, targets) -> mean loss


class Callback:
    """Hooks that a script overrides to receive the reports of a run, on rank 0.

    They only observe: an exception in one of them is logged, and the run goes on. The step waits
    for them, so they must be quick.
    """

    def on_run_start(self, run: Run) -> None:
        """Before the first step. Called again in the process that becomes rank 0 after a fault."""

    def on_step_end(self, step: int, record: Mapping[str, Any]) -> None:
        """After a logged step (`log_every`), with its record: docs/metrics.md has the names."""

    def on_eval_end(self, step: int, record: Mapping[str, Any]) -> None:
        """After an evaluation; `record` has val/loss."""

    def on_checkpoint(self, step: int) -> None:
        """After the checkpoint of a step is on disk."""

    def on_fault(self, text: str) -> None:
        """After a warning, a rollback, or a recovery from a lost rank."""

    def on_run_end(self, outcome: Mapping[str, Any]) -> None:
        """After the last checkpoint is on disk."""


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
    on_fit: Callable[[OwnTask], None] | None = None

    @property
    def config(self) -> Config:
        return self.spec.config

    @property
    def rank(self) -> int:
        return self.rendezvous.rank

    @property
    def world_size(self) -> int:
        return self.rendezvous.world_size


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
        self.groups = _group_of(model, optimizer)
        _require_plain_state(optimizer)

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
            run.on_fit(OwnTask(self, run.spec, train_data, val_data, steps))
            raise DryRunEnded
        observers = [_Observer(callback, run) for callback in self.callbacks]
        watchers = [*run.watchers, *observers]

        def task_of(spec: RunSpec) -> OwnTask:
            return OwnTask(self, spec, train_data, val_data, steps)

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


class OwnTask:
    """The task (tasks.Task) of a model, an optimizer and data of a script."""

    def __init__(
        self,
        engine: RuntimeEngine,
        spec: RunSpec,
        train_data: Any,
        val_data: Any,
        steps: int | None,
    ) -> None:
        self._engine = engine
        self._spec = spec
        self._steps = steps
        self._train_data = train_data
        self._val_data = val_data

    def settings(self) -> dict[str, Any]:
        """Return the keys of the configuration that the optimizer and the call of `fit` decide.

        Raises ConfigError for learning rates that contradict each other.
        """
        # Keys that the script has set itself stay as they are.
        given = self._engine.run.given
        lr = self._engine.optimizer.param_groups[0]["lr"]
        if not lr > 0:
            raise ConfigError(
                f"the optimizer's first group has lr = {lr:g}, and the schedule sets all groups in "
                "proportion to it; give it a rate above 0, and freeze weights with "
                "requires_grad_(False)"
            )
        if "lr" not in given and "min_lr" in given and self._spec.config.min_lr > lr:
            raise ConfigError(
                f"min_lr = {self._spec.config.min_lr:g} is above the optimizer's lr = {lr:g}; "
                "lower min_lr, or give the optimizer a larger lr"
            )

        settings: dict[str, Any] = {}
        if "lr" not in given:
            settings["lr"] = lr
            if "min_lr" not in given:
                settings["min_lr"] = 0.1 * lr
        if self._steps is not None:
            settings["max_steps"] = self._steps
        if self._val_data is None:
            settings["eval_every"] = 0
        return settings

    def model(self) -> nn.Module:
        """Return the script's model, or a copy with fsdp, where each group cuts a model for good."""
        model = self._engine.model
        if self._spec.config.dp_mode == "fsdp" and self._engine.run.rejoin is not None:
            model = copy.deepcopy(model)
        # Weights in another memory format (channels_last) are laid out anew: ranks exchange, and
        # cut, rows.
        for p in model.parameters():
            p.data = p.data.contiguous()
        return model

    def optimizer(self, model: nn.Module, shards: list[Shard] | None) -> torch.optim.Optimizer:
        """Return the script's optimizer; for shards, one of its class with the same groups."""
        own = self._engine.optimizer
        first_lr = own.param_groups[0]["lr"]
        # The schedule sets the first group's rate, and keeps the ratios of the others to it.
        for group in own.param_groups:
            group.setdefault("lr_factor", group["lr"] / first_lr)
        if shards is None:
            return own

        # torch refuses a group without parameters, and a rank may have no element of one.
        groups: list[dict[str, Any]] = []
        for number, group in enumerate(own.param_groups):
            params = []
            for shard in shards:
                if self._engine.groups.get(shard.piece.name) == number:
                    params.append(shard.param)
            if params:
                groups.append({**group, "params": params})
        if not groups:
            raise ConfigError(
                f"dp_mode = {self._spec.config.dp_mode} leaves rank {self._engine.run.rank} no "
                "element of this small model; use fewer ranks, or dp_mode ddp"
            )
        return type(own)(groups, lr=first_lr)  # type: ignore[call-arg]

    def loss(self, model: nn.Module, x: Any, y: Any) -> Tensor:
        loss_fn = self._engine.loss_fn
        if loss_fn is None:
            return model(x, y)
        return loss_fn(model(x), y)

    def data(self, device: torch.device) -> Samples:
        cfg = self._spec.config
        ranks = self._engine.run.rendezvous.slots
        place = (self._engine.run.rank, ranks)
        batch = resolve_batch(cfg, ranks)
        # Batches of a fixed size, or loaders that each rank has alone, fit one number of ranks.
        self._data = OwnData(self._train_data, self._val_data, cfg.seed, batch.micro, device, place)
        if self._data.in_batches and cfg.recovery == "shrink":
            kind = "batches of a fixed size"
            if self._data.stateful:
                kind = f"a loader with a state, one of {ranks}"
            raise ConfigError(
                "recovery = shrink changes the number of ranks and the micro batch, but the train "
                f"data are {kind}; use recovery in_place or restart, or give a dataset with len() "
                "and []"
            )
        return self._data

    def load_data(self, saved: Callable[[], tuple[RankStates, int]]) -> str:
        """Let the script's loader continue from this rank's state in a checkpoint.

        Without such a state the loader starts over, and the samples that were used are read and
        skipped, as with any iterable. Raises CheckpointError when another number of ranks has saved
        the states.
        """
        if not self._data.stateful:
            return ""
        states, samples = saved()
        ranks = self._engine.run.rendezvous.slots
        if not any(LOADER in state for state in states):
            return (
                "resume  the checkpoint has no state of the loader: it begins anew and skips what "
                "was used"
            )
        if len(states) != ranks:
            raise CheckpointError(
                f"the checkpoint has the states of {len(states)} loaders, one of each rank, but "
                f"now there are {ranks} ranks; resume with {len(states)} ranks, or give a dataset "
                "with len() and [], which any number shares"
            )
        # Each rank continues its own loader.
        self._data.load_state(states[self._engine.run.rank], samples)
        return f"resume  each rank's loader goes on from its own state after {samples} samples"

    def workload(
        self, loss: Loss, device: torch.device, precision: str, peak: float | None
    ) -> Workload:
        meta = {"model_shape": {}, "dataset": self._spec.dataset.to_dict()}
        return Workload(
            loss, 1, None, None, meta, unit="samples", draws=True, loader=self._data.state_at
        )

    def describe(self, batch: Batch) -> list[str]:
        numbers = sum(p.numel() for p in self._engine.model.parameters())
        return [
            "data   of the script",
            f"batch  {batch.micro} samples × {batch.accum} accum × {batch.dp} dp = "
            f"{batch.global_size} samples/step"
            f"      model {type(self._engine.model).__name__}, {numbers / 1e6:.2f} M parameters",
        ]

    def example(self) -> tuple[Config, Batch, tuple[Any, Any]]:
        """Return the configuration with the script's settings, its batch, and a micro batch."""
        config = self._spec.config.model_copy(update=self.settings())
        batch = resolve_batch(config, self._engine.run.world_size)
        return config, batch, self.data(torch.device("cpu")).train_batch(0, batch.micro)

    def dry_run_lines(self, placement: str) -> list[str]:
        """Return the lines of a dry run. Reads one micro batch."""
        config, batch, example = self.example()
        engine = self._engine
        return own_lines(
            config, engine.model, engine.optimizer, self.loss, batch, example, placement
        )

    def closing(self, model_of: Callable[[], nn.Module]) -> str | None:
        return None


class Program:
    """A script's function in the place of recipe.train: the launchers call it on every rank."""

    def __init__(self, main: Callable[[Run], Any], given: frozenset[str]) -> None:
        self._main = main
        self._given = given

    def __call__(
        self,
        spec: RunSpec,
        rendezvous: Rendezvous,
        watchers: Sequence[Any] = (),
        wanted: Callable[[], Order] = lambda: Order.GO_ON,
        store: Any = None,
        rejoin: Any = None,
    ) -> dict[str, Any]:
        run = Run(spec, rendezvous, self._given, watchers, wanted, store, rejoin)
        torch.manual_seed(spec.config.seed)  # the same new weights on all ranks
        self._main(run)
        if run.outcome is None:
            raise ConfigError(_untrained(self._main))
        return run.outcome


def dry_run(
    main: Callable[[Run], Any], config: Config, given: frozenset[str], ranks: int, placement: str
) -> None:
    """Call a script's function up to `fit`, which prints mesh, batch and memory.

    The model is made in this process; no rank is started, no device taken and no run folder made.
    """

    def print_lines(task: OwnTask) -> None:
        print("\n".join(task.dry_run_lines(placement)))

    call_until_fit(main, config, given, ranks, print_lines)


def call_until_fit(
    main: Callable[[Run], Any],
    config: Config,
    given: frozenset[str],
    ranks: int,
    on_fit: Callable[[OwnTask], None],
) -> None:
    """Call a script's function up to `fit`, which calls `on_fit` and ends the function."""
    spec = RunSpec(config, own_data(), Path(config.out_dir), time.time())
    torch.manual_seed(config.seed)
    try:
        main(Run(spec, Rendezvous(world_size=ranks), given, on_fit=on_fit))
    except DryRunEnded:
        return
    raise ConfigError(_untrained(main))


def _untrained(main: Callable[[Run], Any]) -> str:
    name = getattr(main, "__name__", "the function")
    return (
        f"{name} returned without training; call RuntimeEngine(model, optimizer, run).fit(...) in "
        "it"
    )


class _Observer:
    """A script's callback as the engine calls it (observers.Callback)."""

    def __init__(self, callback: Callback, run: Run) -> None:
        self._callback = callback
        self._run = run
        self._begun = False
        self._failed: set[str] = set()  # names of the hooks that have raised, to warn once

    def on_note(self, text: str) -> None:
        self._begin()
        if text.startswith(("warning", "rejoin")):
            self._call("on_fault", text)

    def on_record(self, record: dict[str, Any]) -> None:
        self._begin()
        self._call("on_step_end", record["step"], record)
        if "val/loss" in record:
            self._call("on_eval_end", record["step"], record)

    def on_saved(self, step: int) -> None:
        self._call("on_checkpoint", step)

    def on_end(self, outcome: Mapping[str, Any]) -> None:
        self._call("on_run_end", outcome)

    def close(self) -> None:
        """Do nothing: a callback keeps no file of the run."""

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            self._call("on_run_start", self._run)

    def _call(self, name: str, *args: Any) -> None:
        # A hook that fails must not end the run. It is reported once, and called again.
        try:
            getattr(self._callback, name)(*args)
        except Exception as error:
            if name not in self._failed:
                self._failed.add(name)
                where = f"{type(self._callback).__name__}.{name}"
                log.exception("%s failed", where)
                for watcher in self._run.watchers:
                    watcher.on_note(
                        f"warning  {where} raised {type(error).__name__}: {error}; the run goes on"
                    )


def _require_plain_state(optimizer: torch.optim.Optimizer) -> None:
    """Raise ConfigError for an optimizer whose state a checkpoint cannot hold."""
    for key, value in (kept_alone(optimizer) or {}).items():
        if value.dim() and value.shape != PROBE:
            raise ConfigError(
                f"{type(optimizer).__name__} keeps {key} of shape {list(value.shape)} for a "
                "parameter of shape "
                f"{list(PROBE)}; checkpoints hold numbers and tensors shaped like the parameter: "
                "use another optimizer"
            )


def _group_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return the number of the optimizer's group of each parameter, by name.

    Raises ConfigError when the optimizer has a parameter of another model, or misses one.
    """
    # By identity: parameters compare element by element.
    names = {id(p): name for name, p in model.named_parameters()}
    groups = {}
    for number, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if id(p) not in names:
                raise ConfigError(
                    f"the optimizer has a parameter of shape {tuple(p.shape)} that is not the "
                    "model's; make it from model.parameters(), after the last change of the model"
                )
            groups[names[id(p)]] = number
    missing = [
        name for name, p in model.named_parameters() if p.requires_grad and name not in groups
    ]
    if missing:
        raise ConfigError(
            f"the optimizer does not update {missing[0]}; give it all parameters, or set "
            "requires_grad to False"
        )
    return groups

"""The task (tasks.Task) of a model, an optimizer and data of a script."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nanoray.checkpoint.run_folder import RunSpec
from nanoray.config import Batch, Config, resolve_batch
from nanoray.data.tokens import Samples
from nanoray.errors import CheckpointError, ConfigError
from nanoray.machine.text import parameters
from nanoray.models.weighted import LossValue, Weighted, mean_of
from nanoray.models.workload import Workload
from nanoray.parallel.axis import Axis
from nanoray.parallel.hooks import StepHook
from nanoray.parallel.mesh import Mesh
from nanoray.parallel.mode import DataParallel
from nanoray.parallel.pieces import Shard
from nanoray.parallel.script_hooks import ScriptHooks
from nanoray.script.absent_gradients import AbsentGradients, FrozenParameters
from nanoray.script.call import WithLoss, loss_of
from nanoray.script.data.batch import CountedTargets
from nanoray.script.data.source import ORDER, STREAM, ScriptData, batch_size_of
from nanoray.script.data.stream import Stream
from nanoray.script.dry_run import own_lines
from nanoray.script.even_fsdp import EvenFSDP
from nanoray.script.loose_buffers import LooseBuffers
from nanoray.script.run import Run
from nanoray.script.schedule import ScriptSchedule
from nanoray.script.shards import cut_optimizer, follow_parameters
from nanoray.script.skipping_ddp import SkippingDDP
from nanoray.script.user_code import describe, first_batch, user_code
from nanoray.script.weighted_flow import WeightedFlow
from nanoray.train.tasks import Loss, RankStates

# (the model's output, targets) -> mean loss, or its sum and weight
LossFn = Callable[[Any, Any], LossValue]
UNKNOWN = -1  # the size of the data's batches, before they were looked at


@dataclass(frozen=True)
class Given:
    """What a script has given to its RuntimeEngine."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss_fn: LossFn | None
    updated: dict[str, nn.Parameter]  # the optimizer's parameters, by their names in the model
    run: Run
    schedule: ScriptSchedule


class ScriptTask:
    """The task (tasks.Task) of a model, an optimizer and data of a script."""

    def __init__(
        self,
        given: Given,
        spec: RunSpec,
        train_data: Any,
        val_data: Any,
        steps: int | None,
    ) -> None:
        self._given = given
        self._spec = spec
        self._steps = steps
        self._train_data = train_data
        self._val_data = val_data
        self._batch_size: int | None = UNKNOWN  # of the data; None: they have none of their own
        self._begun: Stream | None = None  # whose first batch was read for that
        self._has_weights: bool | None = None  # whether losses come with weights; not known yet
        # What a resume compares, as the script has made it
        self._script = script_of(given)

    @property
    def schedule(self) -> ScriptSchedule:
        return self._given.schedule

    def settings(self) -> dict[str, Any]:
        """Return the keys of the configuration that the optimizer and the call of `fit` decide."""
        settings = self._size_of_batches()
        if self._steps is not None:
            settings["max_steps"] = self._steps
        if self._val_data is None:
            settings["eval_every"] = 0
        cfg = self._spec.config.model_copy(update=settings)
        self.schedule.require_losses(cfg.eval_every)

        # The rates are those of the script. In the configuration they are for the record alone.
        lr = float(self._given.optimizer.param_groups[0].get("lr", 0.0))
        if lr > 0:
            settings["lr"] = lr
            settings["min_lr"] = lr
        return settings

    def _size_of_batches(self) -> dict[str, Any]:
        """Return micro_batch_size where the data come in batches: each is one rank's micro batch.

        Raises ConfigError where the configuration has another size.
        """
        config = self._spec.config
        if self._batch_size == UNKNOWN:
            with _reading("train", self._train_data):
                self._batch_size, self._begun = batch_size_of(self._train_data, config.seed)
        size = self._batch_size
        if size is None:
            return {}
        if "micro_batch_size" in self._given.run.given and config.micro_batch_size != size:
            raise ConfigError(
                f"micro_batch_size = {config.micro_batch_size}, but the train data come in batches "
                f"of {size} samples, and each is one rank's micro batch; drop the key, or give "
                "batches of that size"
            )
        return {"micro_batch_size": size}

    def model(self) -> nn.Module:
        """Return the script's model, or a copy with fsdp, where each group cuts a model for good."""
        model = self._given.model
        if self._spec.config.dp_mode == "fsdp" and self._given.run.rejoin is not None:
            model = copied(model)
        # Weights in another memory format (channels_last) are laid out anew: ranks exchange, and
        # cut, rows. An expanded buffer gets memory for each of its elements.
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.data = tensor.data.contiguous()
        return model

    def optimizer(self, model: nn.Module, shards: list[Shard] | None) -> torch.optim.Optimizer:
        """Return the script's optimizer; for shards, a copy of it over them."""
        own = self._given.optimizer
        if shards is None:
            follow_parameters(own)
            return own

        held = {shard.piece.name: shard for shard in shards}
        return cut_optimizer(own, self._given.updated, held)

    @property
    def loss_fn(self) -> LossFn | None:
        """The script's own, which may be a module with attributes."""
        return self._given.loss_fn

    @property
    def script(self) -> ScriptHooks:
        return ScriptHooks(self._step_hooks, SkippingDDP, EvenFSDP, WeightedFlow)

    def _step_hooks(
        self,
        model: nn.Module,
        mode: DataParallel,
        mesh: Mesh,
        data: Axis,
    ) -> list[StepHook]:
        """Return what a script's model adds to a step. (all ranks)"""
        hooks: list[StepHook] = []
        # No parameter may begin to train in the middle of a run. Some may be left without a gradient,
        # which fsdp refuses.
        hooks.append(FrozenParameters(model, mesh))
        if data.size > 1 and not isinstance(mode, EvenFSDP):
            hooks.append(AbsentGradients(model, mode, mesh))
        # Also for a model without buffers, because a forward may register one.
        hooks.append(LooseBuffers(model, mesh))
        return hooks

    def loss(self, model: nn.Module, x: Any, y: Any) -> LossValue:
        """Return the loss of a batch. Raises ConfigError where a later one is of another kind."""
        samples = None
        if isinstance(y, CountedTargets):
            y, samples = y
        loss = loss_of(model, self._given.loss_fn, x, y)

        # An evaluation, which has no backward, would take anything.
        scalar = loss.sum if isinstance(loss, Weighted) else loss
        if not isinstance(scalar, Tensor) or not scalar.is_floating_point() or scalar.dim():
            raise ConfigError(
                f"the loss of a batch is {describe(scalar)}; return its mean over the batch as a tensor "
                "of one real number, such as loss.mean() without .item(), or nanoray.Weighted(sum=..., "
                "weight=...), with weight 0 for a batch to skip"
            )
        # All ranks add up weights, or none does.
        has_weight = isinstance(loss, Weighted)
        if self._has_weights is None:
            self._has_weights = has_weight
        if has_weight != self._has_weights:
            raise ConfigError(
                "the loss is nanoray.Weighted for some batches and a mean for others; return "
                "nanoray.Weighted(sum=..., weight=...) for all of them"
            )

        # A micro batch with fewer samples than others counts for less, and one without for nothing.
        if samples is None:
            return loss
        if not isinstance(loss, Weighted):
            return Weighted(sum=loss * samples, weight=samples)
        if samples == 0:
            return Weighted(sum=loss.sum * 0, weight=0)
        return loss

    def mean_loss(self, model: nn.Module, x: Any, y: Any) -> Tensor:
        """Return the mean loss of a batch alone."""
        return mean_of(self.loss(model, x, y))

    def data(self, device: torch.device) -> Samples:
        cfg = self._spec.config.model_copy(update=self._size_of_batches())
        ranks = self._given.run.rendezvous.slots
        place = (self._given.run.rank, ranks)
        batch = resolve_batch(cfg, ranks)
        with _reading("train and validation", (self._train_data, self._val_data)):
            self._data = ScriptData(
                self._train_data, self._val_data, cfg.seed, batch.micro, device, place, self._begun
            )
        # The driver decides which numbers of ranks are possible, and it does not see the data.
        if cfg.recovery == "shrink" and self._batch_size is not None:
            raise ConfigError(
                "recovery = shrink changes the number of ranks and the micro batch, but the train data "
                f"come in batches of {self._batch_size} samples; give a dataset with len() and [], and "
                "its batch size as micro_batch_size, or use recovery in_place or restart"
            )
        return self._data

    def load_data(self, saved: Callable[[], tuple[RankStates, int]]) -> str:
        """Let a script's stream continue from its state in a checkpoint.

        All ranks read the same stream, so one state serves any number of them. Without one, and from
        other data, the samples that were used follow from their number. Raises DataError when the
        data had another order.
        """
        # A process that replaces a lost rank compares its data with those of the other ranks.
        is_new = self._given.run.rendezvous.live
        if is_new and not self._data.has_state:
            return ""
        states, samples = saved()
        # A new process may find no checkpoint: then its stream is read from the start.
        if not states:
            return ""
        self._data.require_same_order(states[0][ORDER])
        if not self._data.has_state or STREAM not in states[0]:
            return ""
        self._data.load_state(states[0], samples)
        return f"resume  the stream goes on from its state after {samples} samples"

    def compare(self, meta: dict[str, Any]) -> list[str]:
        """Return notes where a checkpoint's model, loss or learning rate are not this script's.

        Raises CheckpointError for another model or loss where the run was found and not named.
        """
        before = meta["script"]
        others = [key for key, now in self._script.items() if before[key] != now]
        lines = [f"{key} is {before[key]} there and {self._script[key]} here" for key in others]
        is_another = "model" in others or "loss" in others
        if is_another and self._spec.config.resume == "auto":
            raise CheckpointError(
                f"resume = auto found the run {self._spec.folder.name}, but {', '.join(lines)}; set "
                "resume to the folder of that run to go on with it, or to none for a new one"
            )
        return [f"resume  {line}" for line in lines]

    def workload(
        self, loss: Loss, device: torch.device, precision: str, peak: float | None
    ) -> Workload:
        meta = {
            "model_shape": {},
            "dataset": self._spec.dataset.to_dict(),
            "script": self._script,
        }
        return Workload(
            loss,
            1,
            None,
            None,
            meta,
            unit="samples",
            draws=True,
            loader=self._data.state_at,
            first_batch=partial(first_batch, self._script["model"]),
        )

    def describe(self, batch: Batch) -> list[str]:
        numbers = sum(p.numel() for p in self._given.model.parameters())
        return [
            f"data   of the script: {self._data.describe()}",
            f"batch  {batch.micro} samples × {batch.accum} accum × {batch.dp} dp = "
            f"{batch.global_size} samples/step"
            f"      model {self._script['model']}, {parameters(numbers)}",
        ]

    def example(self) -> tuple[Config, Batch, tuple[Any, Any]]:
        """Return the configuration with the script's settings, its batch, and a micro batch."""
        config = self._spec.config.model_copy(update=self.settings())
        batch = resolve_batch(config, self._given.run.world_size)
        data = self.data(torch.device("cpu"))
        with _reading("train", self._train_data):
            first = data.train_batch(self._given.run.rank * batch.micro, batch.micro)
        return config, batch, first

    def dry_run_lines(self, placement: str) -> list[str]:
        """Return the lines of a dry run. Reads one micro batch."""
        config, batch, example = self.example()
        given = self._given
        return own_lines(
            config, given.model, given.optimizer, self.mean_loss, batch, example, placement
        )

    def closing(self, model_of: Callable[[], nn.Module]) -> str | None:
        return None


def script_of(given: Given) -> dict[str, Any]:
    """Return the names of a script's model and loss, and the rate of its first parameters."""
    model: Any = given.model
    loss_fn: Any = given.loss_fn
    if isinstance(model, WithLoss):
        model, loss_fn = model.model, model.loss_fn
    model = getattr(model, "_orig_mod", model)  # within torch.compile
    loss = "the model's own"
    if loss_fn is not None:
        loss = getattr(loss_fn, "__qualname__", type(loss_fn).__qualname__)
    lr = given.optimizer.param_groups[0].get("lr", 0.0)
    return {"model": type(model).__qualname__, "loss": loss, "lr": float(lr)}


def copied(model: nn.Module) -> nn.Module:
    """Return a copy of a script's model. Raises ConfigError for one that cannot be copied."""
    what = f"dp_mode = fsdp on Ray trains a copy of the model, but copy.deepcopy of {type(model).__name__}"
    with user_code(what, "keep what cannot be copied outside of the model, or use dp_mode zero2"):
        return copy.deepcopy(model)


def _reading(split: str, data: Any) -> AbstractContextManager[None]:
    """Name the data of a split where reading them fails."""
    return user_code(
        f"reading the {split} data, {describe(data)},",
        "mend it, or give a dataset with len() and [], a DataLoader or an iterable, of pairs (inputs, "
        "targets) or dicts, and for two arrays torch.utils.data.TensorDataset(inputs, targets)",
    )

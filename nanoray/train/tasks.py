"""Tasks: a GPT on text, or a ResNet on images. The recipe uses them, the loop their Workload."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from nanoray.checkpoint.run_folder import RunSpec
from nanoray.checkpoint.state.rank_state import Schedule
from nanoray.config import Batch, Config
from nanoray.data.dataset import DatasetInfo
from nanoray.data.images import ImageData
from nanoray.data.lengths import format_lengths
from nanoray.data.tokenizer import tokenizer_from_json
from nanoray.data.tokens import Samples, TokenData
from nanoray.machine.text import parameters, short
from nanoray.models import costs, resnet_costs
from nanoray.models.build import build_model
from nanoray.models.gpt import GPT, ModelShape
from nanoray.models.precision import autocast
from nanoray.models.resnet import ResNetShape, loss_and_accuracy
from nanoray.models.sampling import write_text
from nanoray.models.weighted import LossValue
from nanoray.models.workload import Workload
from nanoray.parallel.pieces import Shard
from nanoray.parallel.script_hooks import ScriptHooks
from nanoray.train.optim.groups import make_optimizer

Loss = Callable[[nn.Module, Tensor, Tensor], LossValue]
RankStates = list[dict[str, Tensor]]  # the parts of a checkpoint that one rank alone has


class Task(Protocol):
    """A model and its data."""

    def settings(self) -> dict[str, Any]:
        """Return keys of the configuration that the task decides."""

    def model(self) -> nn.Module:
        """Return the model with new weights."""

    def optimizer(self, model: nn.Module, shards: list[Shard] | None) -> torch.optim.Optimizer:
        """Return the optimizer of the model's parameters, or of these shards of them."""

    @property
    def schedule(self) -> Schedule | None:
        """The rates of a script's optimizer; None: the configuration sets them in each step."""

    @property
    def loss(self) -> Loss | None:
        """The function of a batch's mean loss, or of its sum and weight; None: the model's own."""

    @property
    def script(self) -> ScriptHooks | None:
        """What a step calls of a script besides the model; None: the model is nanoray's own."""

    def data(self, device: torch.device) -> Samples:
        """Open the dataset."""

    def load_data(self, saved: Callable[[], tuple[RankStates, int]]) -> str:
        """Let a script's data continue where they were at a checkpoint; return a note, or "".

        `saved` reads the states of all ranks in the checkpoint, and the samples consumed before it.
        """

    def compare(self, meta: dict[str, Any]) -> list[str]:
        """Return notes where the meta of a checkpoint is that of another script.

        Raises CheckpointError where it is another experiment.
        """

    def workload(
        self, loss: Loss, device: torch.device, precision: str, peak: float | None
    ) -> Workload:
        """Return the facts for the loop; `peak` is the FLOP/s of all ranks together, if known."""

    def describe(self, batch: Batch) -> list[str]:
        """Return lines: notes, then one on the data and one on the batch and the model's size."""

    def closing(self, model_of: Callable[[], nn.Module]) -> str | None:
        """Return a sample of the trained model, which `model_of` returns, if any. (rank 0 only)"""


def task_of(spec: RunSpec) -> Task:
    """Return the task of a run."""
    if spec.config.model == "resnet":
        return ImageTask(spec.config, spec.dataset)
    return TextTask(spec.config, spec.dataset)


class ConfiguredTask:
    """The base of the tasks whose model and optimizer the configuration describes."""

    loss: Loss | None = None  # the model returns its mean loss, given targets
    schedule: Schedule | None = None  # the configuration sets the rates
    script: ScriptHooks | None = None

    def __init__(self, config: Config, dataset: DatasetInfo) -> None:
        self.config = config
        self.dataset = dataset

    def settings(self) -> dict[str, Any]:
        return {}

    def compare(self, meta: dict[str, Any]) -> list[str]:
        return []

    def model(self) -> nn.Module:
        return build_model(self.config, self.dataset.vocab_size)

    def optimizer(self, model: nn.Module, shards: list[Shard] | None) -> torch.optim.Optimizer:
        return make_optimizer(model, self.config, shards)

    def load_data(self, saved: Callable[[], tuple[RankStates, int]]) -> str:
        return ""

    def closing(self, model_of: Callable[[], nn.Module]) -> str | None:
        return None


class TextTask(ConfiguredTask):
    """A GPT that predicts the next token."""

    def __init__(self, config: Config, dataset: DatasetInfo) -> None:
        super().__init__(config, dataset)
        self.shape = ModelShape.of(config, dataset.vocab_size)

    def data(self, device: torch.device) -> Samples:
        return TokenData(self.dataset, self.config.block_size, self.config.seed, device)

    def workload(
        self, loss: Loss, device: torch.device, precision: str, peak: float | None
    ) -> Workload:
        return Workload(
            loss=loss,
            tokens_per_sample=self.config.block_size,
            flops_per_token=costs.flops_per_token(self.shape),
            peak_flops=peak,
            meta={"model_shape": self.shape.to_dict(), "dataset": self.dataset.to_dict()},
        )

    def describe(self, batch: Batch) -> list[str]:
        data = self.dataset
        config = self.config
        length = config.block_size
        cut = f", {format_lengths(config)}" if config.seq_warmup_steps else ""
        return [
            f"data   {data.note} · {short(data.train_tokens)} train + {short(data.val_tokens)} val "
            f"tokens, vocabulary {data.vocab_size}",
            f"batch  {batch.micro} seq × {batch.accum} accum × {batch.dp} dp × {length} tok = "
            f"{batch.global_size * length} tok/step{cut}      model {parameters(costs.count_parameters(self.shape))}"
            + costs.describe_experts(self.shape),
        ]

    def closing(self, model_of: Callable[[], nn.Module]) -> str | None:
        if not self.config.sample_tokens:
            return None
        model = model_of()
        assert isinstance(model, GPT)
        # The tokenizer's own prompt is a newline where the vocabulary has one: it fits most texts.
        tokenizer = tokenizer_from_json(self.dataset.tokenizer)
        config = self.config
        return write_text(model, tokenizer, config.sample_tokens, config.seed)


class ImageTask(ConfiguredTask):
    """A ResNet that classifies images."""

    def __init__(self, config: Config, dataset: DatasetInfo) -> None:
        super().__init__(config, dataset)
        self.shape = ResNetShape.of(config, dataset.vocab_size)

    def data(self, device: torch.device) -> Samples:
        return ImageData(self.dataset, self.config.seed, device)

    def workload(
        self, loss: Loss, device: torch.device, precision: str, peak: float | None
    ) -> Workload:
        def scores(model: nn.Module, x: Tensor, y: Tensor) -> Sequence[Tensor]:
            with autocast(device.type, precision):
                return loss_and_accuracy(model, x, y)

        return Workload(
            loss=loss,
            tokens_per_sample=1,
            flops_per_token=resnet_costs.flops_per_image(self.shape),
            peak_flops=peak,
            meta={"model_shape": self.shape.to_dict(), "dataset": self.dataset.to_dict()},
            unit="samples",
            score_names=("val/loss", "val/accuracy"),
            scores=scores,
        )

    def describe(self, batch: Batch) -> list[str]:
        data = self.dataset
        size = resnet_costs.count_parameters(self.shape)
        return [
            f"data   {data.note} · {short(data.train_tokens)} train + {short(data.val_tokens)} val "
            f"images, {data.vocab_size} classes",
            f"batch  {batch.micro} images × {batch.accum} accum × {batch.dp} dp = "
            f"{batch.global_size} images/step      "
            f"model ResNet-{self.shape.resnet_depth}, {parameters(size)}",
        ]

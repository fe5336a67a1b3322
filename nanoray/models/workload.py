"""The facts about a model and its data that the loop needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from nanoray.models.weighted import LossValue


@dataclass(frozen=True)
class Workload:
    """The facts about a model and its data that the loop needs. A task fills them in."""

    # (model, inputs, targets) -> mean loss, or sum and weight, in the run's precision
    loss: Callable[[nn.Module, Tensor, Tensor], LossValue]
    tokens_per_sample: int
    flops_per_token: float | None
    peak_flops: float | None  # of all ranks together; None for an unknown device
    meta: dict[str, Any]  # for checkpoints: model_shape, dataset
    # The unit of speed: tok, or samples for data without tokens (tokens_per_sample is 1)
    unit: str = "tok"
    draws: bool = False  # the model may draw random numbers although dropout is 0
    score_names: tuple[str, ...] = ("val/loss",)  # metrics of an evaluation; the first is the loss
    # The means of these metrics over a batch; None: the loss alone
    scores: Callable[[nn.Module, Tensor, Tensor], Sequence[Tensor]] | None = None
    # samples consumed -> the state of the script's data at that place
    loader: Callable[[int], dict[str, Tensor]] = lambda samples: {}
    # Around the warm-up: names a mistake that a script's model shows there
    first_batch: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def total_name(self) -> str:
        """The metric that counts the data consumed so far."""
        return "train/samples" if self.unit == "samples" else "train/tokens"

    def score(self, model: nn.Module, x: Tensor, y: Tensor) -> Sequence[LossValue]:
        """Return the means over a batch that an evaluation measures, as scalars on the device.

        The loss may be a sum with a weight.
        """
        if self.scores:
            return self.scores(model, x, y)
        return (self.loss(model, x, y),)

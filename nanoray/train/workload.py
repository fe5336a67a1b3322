"""What the loop needs to know about a model and its data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class Workload:
    """What the loop needs to know about a model and its data. The recipe fills it in."""

    # (model, inputs, targets) -> mean loss, in the run's precision
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    tokens_per_sample: int
    flops_per_token: float | None
    peak_flops: float | None  # of all ranks together; None for an unknown device
    meta: dict[str, Any]  # for checkpoints: model_shape, dataset
    # What speed is measured in: tok, or samples for data without tokens (tokens_per_sample is 1)
    unit: str = "tok"
    draws: bool = False  # the model may draw random numbers although dropout is 0
    score_names: tuple[str, ...] = ("val/loss",)  # metrics of an evaluation; the first is the loss
    # Their means; None: the loss alone
    scores: Callable[[nn.Module, Tensor, Tensor], Sequence[Tensor]] | None = None
    # State of this rank's loader after so many samples
    loader: Callable[[int], dict[str, Tensor]] = lambda samples: {}

    def score(self, model: nn.Module, x: Tensor, y: Tensor) -> Sequence[Tensor]:
        """Return the means over a batch of what an evaluation measures, as scalars on the device."""
        return self.scores(model, x, y) if self.scores else (self.loss(model, x, y),)

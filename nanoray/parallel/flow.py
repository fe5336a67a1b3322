"""How the micro batches of a step pass through a rank.

    Straight   the whole model is on this rank: F0 B0 F1 B1 F2 B2 ...
    pp.Pipe    a stage of a pipeline is: forwards and backwards by a schedule

The loss of a script's model may be a sum with a weight: then script/weighted_flow.py takes the place of
Straight.

They put the factor of the mean, 1/(accum · divisor), on the loss, so that all sums of gradients that
follow are plain sums.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from nanoray.models.precision import LossScaler
from nanoray.models.weighted import LossValue, Weighted, mean_of
from nanoray.parallel.mode import DataParallel

# (model, inputs, targets) -> mean loss, or its sum and weight
Loss = Callable[[nn.Module, Tensor, Tensor], LossValue]
MicroBatch = tuple[Tensor, Tensor]  # inputs, targets
Phase = Callable[[str], None]  # called with a phase's name when the phase begins
# Called with a micro batch's number before its forward; None: the model draws no random numbers
Seed = Callable[[int], None] | None


class Flow(ABC):
    """Runs the micro batches of one step."""

    bubble = 0.0  # the share of the time that this rank waits by its schedule
    has_loss = True  # whether `whole` returns the loss on this rank
    has_twin = True  # whether a second DDP wrapper can measure a step
    found_weights = False  # whether the loss of the warm-up was a sum with a weight
    takes_weights = False  # whether `run` can take such losses

    def __init__(
        self, model: nn.Module, accum: int, loss: Loss, scaler: LossScaler, device: torch.device
    ) -> None:
        """accum: micro batches per step; `scaler` scales a loss before its backward (fp16)."""
        self._model = model
        self._accum = accum
        self._loss = loss
        self._scaler = scaler
        self._device = device

    @property
    @abstractmethod
    def whole(self) -> Any:
        """What to call for the loss of a batch without gradients. (all ranks of a replica)"""

    @abstractmethod
    def run(
        self, mode: DataParallel, micro_batches: Iterator[MicroBatch], phase: Phase, seed: Seed
    ) -> Tensor:
        """Run a step's forwards and backwards; return the mean of the replica's losses. (all ranks)"""

    @abstractmethod
    def repeat(
        self, batch: Callable[[int], MicroBatch], seed: Seed, after: Callable[[int], None]
    ) -> None:
        """Run a step's micro batches once more, without a sum over data ranks.

        `batch` returns a micro batch by its number; `after` is called with that number after each
        forward and backward.
        """

    def backward_once(self, model: nn.Module, x: Tensor, y: Tensor) -> None:
        """Run a forward and backward of one batch that belongs to no step."""
        loss = self._loss(model, x, y)
        self.found_weights = isinstance(loss, Weighted)
        self._scaler.scale(mean_of(loss)).backward()

    @abstractmethod
    def warm_up(self, mode: DataParallel, x: Tensor, y: Tensor) -> None:
        """Run forwards and backwards as a step does, on one batch. (all ranks)"""


class Straight(Flow):
    """The whole model is on every rank: each forward is followed by its backward."""

    @property
    def whole(self) -> Any:
        return self._model

    def run(
        self, mode: DataParallel, micro_batches: Iterator[MicroBatch], phase: Phase, seed: Seed
    ) -> Tensor:
        # A script may have set another default type, in whose 16 bits a sum loses digits.
        total = torch.zeros((), dtype=torch.float32, device=self._device)
        for micro in range(self._accum):
            last = micro == self._accum - 1
            phase("data")
            x, y = next(micro_batches)

            with mode.forward(last):
                phase("forward")
                if seed:
                    seed(micro)
                loss = self._loss(mode.wrapped, x, y)  # mean over (B, T)
                assert isinstance(loss, Tensor), "see script/weighted_flow.py"

            # Only the graph keeps what backward needs of the batch.
            total = total + loss.detach()  # float64 where the loss is
            del x, y

            # The last backward exchanges the gradients of all micro batches.
            with mode.backward(last):
                phase("backward")
                loss = loss / (self._accum * mode.divisor)
                if self._scaler.enabled:
                    loss = self._scaler.scale(loss)
                loss.backward()
            del loss  # its graph would else live until the next forward has ended

        # Every micro batch has the same size, so the mean of their means is the mean of all.
        return total / self._accum

    def repeat(
        self, batch: Callable[[int], MicroBatch], seed: Seed, after: Callable[[int], None]
    ) -> None:
        for micro in range(self._accum):
            x, y = batch(micro)
            if seed:
                seed(micro)
            loss = mean_of(self._loss(self._model, x, y))
            after(micro)
            (loss / self._accum).backward()
            after(micro)

    def warm_up(self, mode: DataParallel, x: Tensor, y: Tensor) -> None:
        with mode.backward(last=True):
            self.backward_once(mode.wrapped, x, y)

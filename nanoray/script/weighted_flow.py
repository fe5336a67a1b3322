"""The micro batches of a step whose loss is a sum with a weight (models/weighted.py).

    rank 0   F0 ─► s0, w0     F1 ─► s1, w1        gradient = grad(s0 + s1 + s2 + s3) / (w0 + w1 + w2 + w3)
    rank 1   F0 ─► s2, w2     F1 ─► s3, w3        loss     =     (s0 + s1 + s2 + s3) / (w0 + w1 + w2 + w3)

The total weight is known after the last forward, and the first backward needs a factor. So the first
micro batches, of all ranks, give a unit: a power of two near the total. Backward divides by the unit,
and what is left of the division follows after the last backward. A step with one micro batch has the
total from the start. This costs one all-reduce of a number, or two and a pass over the gradients.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from nanoray.machine.compat import foreach_mul_
from nanoray.models.precision import LossScaler
from nanoray.models.weighted import Weighted, positive, weight_of
from nanoray.parallel.axis import Axis
from nanoray.parallel.flow import Loss, MicroBatch, Phase, Seed, Straight
from nanoray.parallel.mode import DataParallel


class WeightedFlow(Straight):
    """As Straight, for a loss that is a sum with a weight."""

    takes_weights = True

    def __init__(
        self,
        model: nn.Module,
        accum: int,
        loss: Loss,
        scaler: LossScaler,
        device: torch.device,
        axis: Axis,
    ) -> None:
        """`axis`: the data ranks, whose weights are added up."""
        super().__init__(model, accum, loss, scaler, device)
        self._axis = axis

    def run(
        self, mode: DataParallel, micro_batches: Iterator[MicroBatch], phase: Phase, seed: Seed
    ) -> Tensor:
        own_sum = torch.zeros((), dtype=torch.float32, device=self._device)
        own_weight = torch.zeros_like(own_sum)
        total = torch.zeros_like(own_sum)  # the weight of the step, on all ranks
        unit = torch.ones_like(own_sum)
        # torch's DDP averages over the ranks; the other modes add up.
        ranks_averaged = self._axis.size / mode.divisor

        for micro in range(self._accum):
            last = micro == self._accum - 1
            phase("data")
            x, y = next(micro_batches)

            with mode.forward(last):
                phase("forward")
                if seed:
                    seed(micro)
                loss = self._loss(mode.wrapped, x, y)
                assert isinstance(loss, Weighted), "as in the warm-up"

            # Only the graph keeps what backward needs of the batch.
            own_sum = own_sum + loss.sum.detach()  # float64 where the loss is
            own_weight = own_weight + weight_of(loss)
            del x, y

            # (all ranks) The unit comes from the first micro batch, the total from all of them.
            if last:
                total = positive(self._axis.sum(own_weight.clone(), "loss"))
            if micro == 0:
                unit = total if last else self._choose_unit(own_weight)

            # The last backward exchanges the gradients of all micro batches.
            with mode.backward(last):
                phase("backward")
                factor = (ranks_averaged / unit).to(loss.sum.dtype)
                self._scaler.scale(loss.sum * factor).backward()
            del loss  # its graph would else live until the next forward has ended

        # One division is left, in place. With a single micro batch the unit was the total.
        gradients = mode.gradients  # with fsdp a rank may have none
        if self._accum > 1 and gradients:
            foreach_mul_(gradients, unit / total)

        # The mean over the ranks of what they return is the sum of all over the total weight.
        return own_sum * self._axis.size / total

    def _choose_unit(self, first_weight: Tensor) -> Tensor:
        """Return a power of two near a step's total weight, equal on all ranks. (all ranks)

        Dividing by it rounds nothing, so the result does not depend on the first micro batch.
        """
        weight_of_all = self._axis.sum(first_weight.clone(), "loss") * self._accum
        _, exponent = torch.frexp(positive(weight_of_all))
        return torch.ldexp(torch.ones_like(weight_of_all), exponent)

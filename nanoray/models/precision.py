"""The number formats in which a model computes, and the loss scaling that fp16 needs.

    fp32        all numbers have 32 bits
    tf32        as fp32, but a GPU may multiply with TF32's 10 bits of fraction
    bf16, fp16  weights, gradients and optimizer state stay float32, so rounding loses no small
                update; matrix products and attention run in 16 bits, by autocast
    fp8         as bf16, but the linear layers of the blocks multiply 8-bit floats (fp8.py)
    bf16_pure, fp16_pure
                weights and gradients have 16 bits, too; the optimizer must then not lose small
                updates (train/optim/optim16.py)

Loss scaling keeps gradients from underflowing in fp16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nanoray.errors import TrainingDiverged
from nanoray.machine.compat import foreach_mul_
from nanoray.models.weighted import LossValue

# The dtype of autocast; with fp8 it applies outside of the products of fp8.py
_AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
# The dtype of weights and gradients, where it is not float32
_WEIGHT_DTYPES = {"bf16_pure": torch.bfloat16, "fp16_pure": torch.float16}


def autocast(device_type: str, precision: str) -> AbstractContextManager:
    """Return the region in which matrix products run in `precision`.

    It does nothing where that is the dtype of the weights: for fp32 and tf32, which differ by
    `float32_products`, and for the pure precisions.
    """
    if precision not in _AUTOCAST_DTYPES:
        return nullcontext()
    return torch.autocast(device_type, dtype=_AUTOCAST_DTYPES[precision])


class MeanLoss:
    """Returns a model's mean loss over a batch, computed in the run's precision."""

    def __init__(
        self,
        device_type: str,
        precision: str,
        loss: Callable[[nn.Module, Tensor, Tensor], LossValue] | None = None,
    ) -> None:
        """Without `loss` the model itself returns the loss, given inputs and targets.

        A script's loss may be a sum with a weight (weighted.py) in place of a mean.
        """
        self._region = autocast(device_type, precision)
        self._loss = loss

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> LossValue:
        """Return the loss of a batch; one call at a time."""
        with self._region:
            if self._loss is None:
                return model(x, y)
            return self._loss(model, x, y)


def weight_type(precision: str) -> torch.dtype:
    """Return the dtype of the weights, and so of their gradients."""
    return _WEIGHT_DTYPES.get(precision, torch.float32)


def float32_products(precision: str) -> str:
    """Return torch's setting for float32 products on a GPU: "highest" (float32) or "high" (TF32).

    With bf16 and fp16 it applies to the few products that autocast leaves in float32.
    """
    return "highest" if precision == "fp32" else "high"


def step_unless(
    optimizer: torch.optim.Optimizer, leave_out: Tensor | None, scale: Tensor | None = None
) -> None:
    """Step an optimizer, unless `leave_out` is 1.

    `scale`: the factor that its gradients still have, if any.
    """
    # A fused optimizer reads both tensors on the device, by torch's protocol. Others refuse a
    # tensor here.
    fused = all(group.get("fused") for group in optimizer.param_groups)
    optimizer.found_inf = leave_out if fused else None  # type: ignore[attr-defined]
    optimizer.grad_scale = scale if fused else None  # type: ignore[attr-defined]
    # Optimizers that are not fused cannot leave out a step: the host waits and decides.
    if fused or leave_out is None or not leave_out.item():
        optimizer.step()


class ScaleState(NamedTuple):
    """The values of a loss scaler."""

    scale: float
    skipped: int  # steps, in total
    good: int  # steps in a row since the scale last changed, or reached its limit


class LossScaler:
    """Dynamic loss scaling (Micikevicius et al. 2018) on the device, so no step waits for the host.

    The scale halves when a gradient overflowed and doubles after GROWTH_INTERVAL good steps, up to
    2^24. The caller reduces `found_inf` over all ranks before `step`, so every rank skips the same
    steps.

    With `late`, for gradients in fp16, the gradients keep the scale until the optimizer has
    converted them to float32: dividing them in place would make the small ones zero again.
    """

    GROWTH_INTERVAL = 1000
    INITIAL = 2.0**16
    LARGEST = 2.0**24

    def __init__(self, device: torch.device, enabled: bool, late: bool = False) -> None:
        self.enabled = enabled
        self.late = enabled and late
        # The scale, good steps in a row, skipped steps
        first = [self.INITIAL, 0.0, 0.0]
        self._state = torch.tensor(first, dtype=torch.float32, device=device)
        self._flags = torch.zeros(2, dtype=torch.float32, device=device)

    def scale(self, loss: Tensor) -> Tensor:
        """Multiply the loss by the scale."""
        if not self.enabled:
            return loss
        return loss * self._state[0]

    def unscale(self, grads: list[Tensor]) -> None:
        """Divide the gradients by the scale, in place; with `late` nothing happens."""
        if self.enabled and not self.late:
            foreach_mul_(grads, 1.0 / self._state[0])

    def norm(self, norm: Tensor) -> Tensor:
        """Return the norm of the unscaled gradients, given the norm of the gradients in memory."""
        # With `late` the gradients in memory still have the scale.
        if not self.late:
            return norm
        return norm / self._state[0]

    def flag_nonfinite(self, grad_norm: Tensor, own_loss: Tensor) -> Tensor:
        """Return two flags, (2,): 1 if the gradients' norm, or this rank's own loss, is not finite.

        The caller reduces them with MAX, in place. A smaller scale may cure the first one. No scale
        cures the second one, because the loss is computed before it is scaled.
        """
        # One tensor of two flags, so that one collective reduces both.
        values = torch.stack([grad_norm.reshape(()).float(), own_loss.reshape(()).float()])
        self._flags = (~torch.isfinite(values)).to(self._state.dtype)
        return self._flags

    @property
    def found_inf(self) -> Tensor:
        """1 if the gradients of some rank overflow; valid after the flags were reduced."""
        return self._flags[0]

    @property
    def bad_loss(self) -> Tensor:
        """1 if the loss of some rank is not finite; valid after the flags were reduced."""
        return self._flags[1]

    def step(
        self, optimizers: Sequence[torch.optim.Optimizer], leave_out: Tensor | None = None
    ) -> Tensor | None:
        """Step optimizers, unless `found_inf` or `leave_out` is 1.

        Then update the scale. Both flags are tensors on the device; with a fused optimizer the host
        waits for neither. Returns the flag that applied: 1 if the step was skipped, None if no step
        can be.
        """
        skip = leave_out
        if self.enabled:
            skip = self.found_inf
            if leave_out is not None:
                skip = torch.maximum(self.found_inf, leave_out)
        scale_of_grads = self._state[0] if self.late else None
        for optimizer in optimizers:
            step_unless(optimizer, skip, scale_of_grads)

        if self.enabled:
            updated = self._updated_state()
            # A step that the guards leave out says nothing about the scale.
            if leave_out is not None:
                updated = torch.where(leave_out > 0, self._state, updated)
            self._state = updated
        return skip

    def _updated_state(self) -> Tensor:
        """Return the state after this step; without a branch, so the host need not wait."""
        scale, good, skipped = self._state.unbind()
        overflow = self.found_inf > 0
        grows = good + 1 >= self.GROWTH_INTERVAL
        grown = torch.where(grows, (scale * 2).clamp(max=self.LARGEST), scale)
        new_scale = torch.where(overflow, scale / 2, grown)
        new_good = torch.where(overflow | grows, torch.zeros_like(good), good + 1)
        return torch.stack([new_scale, new_good, skipped + self.found_inf])

    def read(self, step: int) -> ScaleState:
        """Return the scaler's state; waits for the device.

        Raises TrainingDiverged when the scale is exhausted.
        """
        # A scale below 1 means that unscaled gradients overflow, too.
        scale, good, skipped = self._state.tolist()
        if scale < 1.0:
            raise TrainingDiverged(
                f"fp16 loss scale fell to {scale:g} by step {step} ({int(skipped)} steps skipped): "
                "gradients overflow at any scale; lower lr, check the data for outliers, or use "
                "precision bf16"
            )
        return ScaleState(scale, int(skipped), int(good))

    def tensors(self) -> dict[str, Tensor]:
        """Return the state on the device, equal on all ranks; empty when disabled."""
        if not self.enabled:
            return {}
        return {"loss scale": self._state}

    def values(self) -> dict[str, float]:
        """Return the state as floats; empty when disabled."""
        if not self.enabled:
            return {}
        return dict(zip(("scale", "good_steps", "skipped"), self._state.tolist(), strict=True))

    def load_values(self, values: dict[str, float]) -> None:
        """Restore the result of `values`; an empty dict (another precision) changes nothing."""
        if self.enabled and values:
            state = [values["scale"], values["good_steps"], values["skipped"]]
            self._state = torch.tensor(state, dtype=torch.float32, device=self._state.device)

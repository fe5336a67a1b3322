"""Number formats of a run: the autocast region, and an fp16 loss scaler whose skip decision all
ranks share.

With bf16 and fp16, weights, gradients and optimizer state stay float32, so rounding loses no small
update; only matrix products and attention run in 16 bits. With bf16_pure and fp16_pure all of these
have 16 bits (optim16.py). Loss scaling keeps gradients from underflowing in fp16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nanoray.errors import TrainingDiverged

# fp8: outside of its products
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


def autocast(device_type: str, precision: str) -> AbstractContextManager:
    """Return the region in which matrix products run in `precision`; where that is the weights'
    type it does nothing.

    The products of fp32 and tf32 differ by `float32_products`, those of pure precisions have the
    type of the weights.
    """
    if precision not in _DTYPES:
        return nullcontext()
    return torch.autocast(device_type, dtype=_DTYPES[precision])


def mean_loss(
    device_type: str,
    precision: str,
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """Return a model's mean loss over a batch, computed in the run's precision.

    Without `loss` the model itself returns it, given inputs and targets.
    """
    with autocast(device_type, precision):
        if loss is None:
            return model(x, y)
        return loss(model, x, y)


def weight_type(precision: str) -> torch.dtype:
    """Return the type of the weights, and so of their gradients."""
    return (
        _DTYPES[precision.removesuffix("_pure")] if precision.endswith("_pure") else torch.float32
    )


def float32_products(precision: str) -> str:
    """Return torch's setting for products of float32 on a GPU: "highest" (float32), or "high"
    (TF32).

    With bf16 and fp16 it concerns the few products that autocast leaves in float32.
    """
    return "highest" if precision == "fp32" else "high"


def step_unless(
    optimizer: torch.optim.Optimizer, leave_out: Tensor | None, scale: Tensor | None = None
) -> None:
    """Step an optimizer, unless `leave_out` is 1. `scale`: the factor that its gradients still
    have, if any.
    """
    fused = all(group.get("fused") for group in optimizer.param_groups)
    # torch's protocol for fused optimizers; its others refuse a tensor here
    optimizer.found_inf = leave_out if fused else None  # type: ignore[attr-defined]
    optimizer.grad_scale = scale if fused else None  # type: ignore[attr-defined]
    # Others cannot leave out a step: the host waits and decides
    if fused or leave_out is None or not leave_out.item():
        optimizer.step()


class ScaleState(NamedTuple):
    """Where a loss scale is in its life."""

    scale: float
    skipped: int  # steps, so far
    good: int  # steps in a row since it last changed, or would have grown beyond its cap


class LossScaler:
    """Dynamic loss scaling (Micikevicius et al. 2018), kept on the device so that no step waits for
    the host.

    The scale halves when a gradient overflowed and doubles after `growth_interval` good steps, up
    to 2^24. The caller reduces `found_inf` over all ranks before `step`, so every rank skips the
    same steps.

    With `late`, for gradients in fp16, they keep the scale until the optimizer has them in float32:
    dividing them in place would make the small ones zero again.
    """

    GROWTH_INTERVAL = 1000
    INITIAL, LARGEST = 2.0**16, 2.0**24

    def __init__(self, device: torch.device, enabled: bool, late: bool = False) -> None:
        self.enabled, self.late = enabled, enabled and late
        # Scale, good steps in a row, skipped
        self._state = torch.tensor([self.INITIAL, 0.0, 0.0], device=device)
        self._flags = torch.zeros(2, device=device)

    def scale(self, loss: Tensor) -> Tensor:
        """Multiply the loss by the scale."""
        return loss * self._state[0] if self.enabled else loss

    def unscale(self, grads: list[Tensor]) -> None:
        """Divide the gradients by the scale, in place; with `late` nothing happens."""
        if self.enabled and not self.late:
            torch._foreach_mul_(grads, 1.0 / self._state[0])

    def norm(self, norm: Tensor) -> Tensor:
        """Return the norm of the gradients without the scale, given that of those in memory."""
        return norm / self._state[0] if self.late else norm

    def look(self, grad_norm: Tensor, own_loss: Tensor) -> Tensor:
        """Return two flags, (2,): the gradients' norm is not finite; this rank's own loss is not.
        Reduce them with MAX.

        The first one is the scaler's: another scale may cure it. No scale cures the second one,
        which was computed before the scale came in.
        """
        flags = ~torch.isfinite(
            torch.stack([grad_norm.reshape(()).float(), own_loss.reshape(()).float()])
        )
        self._flags = flags.to(self._state.dtype)
        return self._flags

    @property
    def found_inf(self) -> Tensor:
        """1 where the gradients of some rank overflow, after the reduction of what `look` returned."""
        return self._flags[0]

    @property
    def bad_loss(self) -> Tensor:
        """1 where the loss of some rank is not finite, after the reduction of what `look` returned."""
        return self._flags[1]

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        leave_out: Tensor | None = None,
        mirrors: Sequence[torch.optim.Optimizer] = (),
    ) -> Tensor | None:
        """Step an optimizer and its mirrors, unless `found_inf` or `leave_out` is 1; then update
        the scale.

        Both are tensors on the device; with a fused optimizer the host waits for neither. Returns
        what counted.
        """
        skip = leave_out
        if self.enabled:
            skip = self.found_inf if leave_out is None else torch.maximum(self.found_inf, leave_out)
        for each in (optimizer, *mirrors):
            step_unless(each, skip, self._state[0] if self.late else None)
        if not self.enabled:
            return skip
        before, (scale, good, skipped) = self._state, self._state.unbind()
        bad = self.found_inf > 0
        grown = torch.where(
            good + 1 >= self.GROWTH_INTERVAL, (scale * 2).clamp(max=self.LARGEST), scale
        )
        self._state = torch.stack(
            [
                torch.where(bad, scale / 2, grown),
                torch.where(
                    bad | (good + 1 >= self.GROWTH_INTERVAL), torch.zeros_like(good), good + 1
                ),
                skipped + self.found_inf,
            ]
        )
        if leave_out is not None:  # the guards' affair: it says nothing about the scale
            self._state = torch.where(leave_out > 0, before, self._state)
        return skip

    def read(self, step: int) -> ScaleState:
        """Return the scaler's state; raise TrainingDiverged when the scale is exhausted. Waits for
        the device.
        """
        scale, good, skipped = self._state.tolist()
        if scale < 1.0:
            raise TrainingDiverged(
                f"fp16 loss scale fell to {scale:g} by step {step} ({int(skipped)} steps skipped): "
                "gradients overflow "
                "at any scale; lower lr, check the data for outliers, or use precision bf16"
            )
        return ScaleState(scale, int(skipped), int(good))

    def tensors(self) -> dict[str, Tensor]:
        """Return the state on the device, equal on all ranks; empty when disabled."""
        return {"loss scale": self._state} if self.enabled else {}

    def values(self) -> dict[str, float]:
        """Return the state as floats; empty when disabled."""
        if not self.enabled:
            return {}
        return dict(zip(("scale", "good_steps", "skipped"), self._state.tolist(), strict=True))

    def load_values(self, values: dict[str, float]) -> None:
        """Restore what `values` returned; an empty dict (another precision) changes nothing."""
        if self.enabled and values:
            state = [values["scale"], values["good_steps"], values["skipped"]]
            self._state = torch.tensor(state, device=self._state.device)

"""Multiply 8-bit floats in the linear layers of a GPT's blocks, with a scale per tensor or per row.

    forward     y  = x·Wᵀ       x and W in e4m3: 3 bits of fraction, up to 448
    backward    dx = dy·W       dy in e5m2: 2 bits, up to 57344: gradients need range more than
                dW = dyᵀ·x      digits

Each operand is multiplied by the largest factor that keeps it in range, of the whole tensor or of
each row along the dimension that is not summed over; the result is divided by both. Sums are
float32. A GPU of compute capability 8.9 multiplies so in hardware (`scaled_mm`), where all
sizes are multiples of 16. Elsewhere it is an emulation: the operands are rounded to 8 bits, then
multiplied as float32, in which their products are exact. It shows the effect of fp8 on training,
and saves nothing. Source: Micikevicius et al. 2022, FP8 Formats for Deep Learning.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nanoray.machine.compat import scaled_mm

FORWARD = torch.float8_e4m3fn
BACKWARD = torch.float8_e5m2
MULTIPLE = 16  # of every size of a product in hardware
EMULATED = "emulated: operands are rounded to 8 bits and multiplied in float32"


def quantize(x: Tensor, dtype: torch.dtype, per_row: bool) -> tuple[Tensor, Tensor]:
    """Return x (M, K) in 8 bits, and its scale, float32: a scalar, or (M, 1).

    The 8-bit numbers times their scale are x again, rounded.
    """
    x = x.float()
    limit = torch.finfo(dtype).max
    if per_row:
        largest = x.abs().amax(1, keepdim=True)  # (M, 1)
    else:
        largest = x.abs().amax()  # ()
    scale = torch.where(largest > 0, largest / limit, 1.0).clamp(min=1e-30)
    # The division may round up to above the limit, which the cast would make NaN.
    return (x / scale).clamp(-limit, limit).to(dtype).contiguous(), scale


def scaled_product(
    a: Tensor, b: Tensor, dtypes: tuple[torch.dtype, torch.dtype], per_row: bool
) -> Tensor:
    """Return a·bᵀ, (M, N) bf16, of a (M, K) and b (N, K), each rounded to 8 bits."""
    # In hardware all sizes must be multiples of 16; other products are emulated.
    sizes = (*a.shape, *b.shape)
    hardware = in_hardware(a.device) and all(size % MULTIPLE == 0 for size in sizes)
    quantized_a = quantize(a, dtypes[0], per_row)
    quantized_b = quantize(b, dtypes[1], per_row)
    return product_of(quantized_a, quantized_b, hardware)


def product_of(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], hardware: bool) -> Tensor:
    """Return a·bᵀ, (M, N) bf16, of two results of `quantize`: in hardware, or by the emulation."""
    a8, scale_a = a
    b8, scale_b = b
    if hardware:
        return scaled_mm(a8, b8.t(), scale_a=scale_a, scale_b=scale_b.t(), out_dtype=torch.bfloat16)
    # Autocast would multiply in 16 bits, where the products are not exact.
    with torch.autocast(a8.device.type, enabled=False):
        product = a8.float() @ b8.float().t()  # (M, N)
        return (product * scale_a * scale_b.t()).bfloat16()


def in_hardware(device: torch.device) -> bool:
    """Whether the device multiplies 8-bit floats."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


class _Linear(torch.autograd.Function):
    """y = x·Wᵀ and its gradients, each product in 8 bits.

    Every product rounds its operands along its own rows.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, per_row: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.per_row = per_row
        return scaled_product(x, weight, (FORWARD, FORWARD), per_row)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        dx = scaled_product(dy, weight.t(), (BACKWARD, FORWARD), ctx.per_row)
        dw = scaled_product(dy.t(), x.t(), (BACKWARD, FORWARD), ctx.per_row)
        return dx.to(x.dtype), dw.to(weight.dtype), None


class Fp8Linear(nn.Linear):
    """A linear layer that multiplies 8-bit floats. Its weight keeps its own dtype."""

    per_row = False

    def forward(self, x: Tensor) -> Tensor:
        """Return x·Wᵀ + b for x (..., K), as (..., N) in bf16."""
        # Products take matrices: all leading dimensions become rows.
        flat = x.reshape(-1, x.shape[-1]).bfloat16()
        y = _Linear.apply(flat, self.weight, self.per_row).view(*x.shape[:-1], -1)
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)
        return y


def use_fp8(model: nn.Module, scaling: str) -> int:
    """Turn the linear layers of a model's blocks into Fp8Linear; return their number.

    `scaling`: tensor | row. Parameters and their names stay. Embeddings, norms, attention's
    products and lm_head do not change.
    """
    count = 0
    for block in getattr(model, "blocks", ()):
        for module in block.modules():
            if type(module) is nn.Linear:
                # The class only, so that parameters, names and hooks stay.
                module.__class__ = Fp8Linear
                module.per_row = scaling == "row"  # type: ignore[assignment]
                count += 1
    return count

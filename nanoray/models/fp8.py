"""Matrix products of 8-bit floats in the linear layers of a GPT's blocks, with a scale per tensor
or per row.

    forward     y  = x·Wᵀ       x and W in e4m3: 3 bits of fraction, up to 448
    backward    dx = dy·W       dy in e5m2: 2 bits, up to 57344, as gradients need range more than digits
                dW = dyᵀ·x

Each operand is multiplied by the largest factor that keeps it in range, of the whole tensor or of
each row along the dimension that is not summed over; the result is divided by both. Sums are
float32. A GPU of compute capability 8.9 multiplies so in hardware (torch._scaled_mm), where all
sizes are multiples of 16. Elsewhere it is an emulation: the operands are rounded to 8 bits, then
multiplied as float32, in which their products are exact; it shows what fp8 does to training, and
saves nothing. Source: Micikevicius et al. 2022, FP8 Formats for Deep Learning.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # of every size of a product in hardware
EMULATED = "emulated: operands are rounded to 8 bits and multiplied in float32"


def quantize(x: Tensor, dtype: torch.dtype, per_row: bool) -> tuple[Tensor, Tensor]:
    """Return x (M, K) in 8 bits, and what to multiply it by to get x back: a scalar, or (M, 1),
    float32.
    """
    x = x.float()
    most = torch.finfo(dtype).max
    largest = x.abs().amax(1, keepdim=True) if per_row else x.abs().amax()
    scale = torch.where(largest > 0, largest / most, 1.0).clamp(min=1e-30)
    return (x / scale).clamp(-most, most).to(dtype).contiguous(), scale


def scaled_product(
    a: Tensor, b: Tensor, dtypes: tuple[torch.dtype, torch.dtype], per_row: bool
) -> Tensor:
    """Return a·bᵀ, (M, N) bf16, of a (M, K) and b (N, K), each rounded to 8 bits."""
    hardware = in_hardware(a.device) and not any(size % MULTIPLE for size in (*a.shape, *b.shape))
    return product_of(quantize(a, dtypes[0], per_row), quantize(b, dtypes[1], per_row), hardware)


def product_of(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], hardware: bool) -> Tensor:
    """Return a·bᵀ, (M, N) bf16, of what `quantize` returned, by torch's product of 8-bit floats or
    its emulation.
    """
    (a8, of_a), (b8, of_b) = a, b
    if hardware:
        return torch._scaled_mm(
            a8, b8.t(), scale_a=of_a, scale_b=of_b.t(), out_dtype=torch.bfloat16
        )
    with torch.autocast(a8.device.type, enabled=False):
        return (a8.float() @ b8.float().t() * of_a * of_b.t()).bfloat16()


def in_hardware(device: torch.device) -> bool:
    """Whether the device multiplies 8-bit floats."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


class _Linear(torch.autograd.Function):
    """y = x·Wᵀ and its gradients, each product in 8 bits. Every product rounds its operands along
    its own rows.
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
    """A linear layer whose products are of 8-bit floats. Its weight keeps its own type."""

    per_row = False

    def forward(self, x: Tensor) -> Tensor:
        """Return x·Wᵀ + b for x (..., K), as (..., N) in bf16."""
        flat = x.reshape(-1, x.shape[-1]).bfloat16()
        y = _Linear.apply(flat, self.weight, self.per_row).view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias.to(y.dtype)


def use_fp8(model: nn.Module, scaling: str) -> int:
    """Turn the linear layers of a model's blocks into Fp8Linear; return how many. `scaling`: tensor
    | row.

    Parameters and their names stay. Embeddings, norms, attention's products and lm_head are as
    before.
    """
    layers = [
        m for block in getattr(model, "blocks", ()) for m in block.modules() if type(m) is nn.Linear
    ]
    for layer in layers:
        layer.__class__ = Fp8Linear
        layer.per_row = scaling == "row"  # type: ignore[assignment]
    return len(layers)

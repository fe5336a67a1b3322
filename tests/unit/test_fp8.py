"""Products of 8-bit floats against float64: the rounding of operands, the sums, the gradients, and
what is refused.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanoray.models.fp8 import (
    BACKWARD,
    FORWARD,
    Fp8Linear,
    product_of,
    quantize,
    scaled_product,
    use_fp8,
)
from nanoray.models.gpt import GPT, ModelShape

SCALINGS = (False, True)


def drawn(*shape: int, seed: int = 0, spread: float = 0.0) -> Tensor:
    """Normal numbers; with `spread`, rows of very different sizes."""
    source = torch.Generator().manual_seed(seed)
    rows = (spread * torch.randn(shape[0], generator=source)).exp()
    return torch.randn(shape, generator=source) * rows.view(-1, *[1] * (len(shape) - 1))


def rounded(x: Tensor, dtype: torch.dtype, per_row: bool) -> Tensor:
    """What 8 bits keep of x, by a search for the nearest number of the format, in float64."""
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    numbers = numbers[numbers.isfinite()].unique()
    most = numbers.max()
    largest = x.abs().amax(1, keepdim=True) if per_row else x.abs().amax()
    scale = (largest.float() / most.float()).double()
    scaled = (x.float() / scale.float()).double().clamp(-most, most)
    return numbers[(scaled[..., None] - numbers).abs().argmin(-1)] * scale


@pytest.mark.parametrize("per_row", SCALINGS)
@pytest.mark.parametrize("dtypes", [(FORWARD, FORWARD), (BACKWARD, FORWARD)])
def test_a_product_is_that_of_the_rounded_operands(dtypes: tuple[Any, Any], per_row: bool) -> None:
    """Ties between two numbers of a format do not occur in these; the sum is float32's, the result
    bf16's.
    """
    a, b = drawn(24, 40, spread=2.0), drawn(16, 40, seed=1, spread=2.0)
    exact = rounded(a, dtypes[0], per_row) @ rounded(b, dtypes[1], per_row).t()
    found = scaled_product(a, b, dtypes, per_row)
    assert found.dtype == torch.bfloat16
    scale = rounded(a, dtypes[0], per_row).abs() @ rounded(b, dtypes[1], per_row).abs().t()
    assert ((found.double() - exact).abs() <= 2.0**-8 * exact.abs() + 1e-5 * scale).all()


@pytest.mark.parametrize("per_row", SCALINGS)
@pytest.mark.parametrize("kind", [FORWARD, BACKWARD])
def test_the_emulation_is_torch_s_own_product(kind: Any, per_row: bool) -> None:
    """torch has the call that GPUs get also on CPUs."""
    operands = (
        quantize(drawn(32, 48, spread=2.0), kind, per_row),
        quantize(drawn(16, 48, seed=1), FORWARD, per_row),
    )
    emulated, own = (product_of(*operands, hardware=hardware) for hardware in (False, True))
    assert (emulated.double() - own.double()).abs().max() <= 2.0**-8 * own.double().abs().max()


def test_a_scale_per_row_keeps_small_rows_beside_a_large_one() -> None:
    x = drawn(8, 64)
    x[0] *= 1e6
    errors = []
    for per_row in SCALINGS:
        x8, scale = quantize(x, FORWARD, per_row)
        back = x8.float() * scale
        errors.append(((back - x).norm(dim=1) / x.norm(dim=1))[1:].max().item())
    assert errors[0] == 1.0, "all zero"
    assert errors[1] < 2.0**-4


def test_the_largest_number_of_a_tensor_uses_the_whole_range_and_zeros_stay() -> None:
    for dtype, most in ((FORWARD, 448.0), (BACKWARD, 57344.0)):
        x8, scale = quantize(torch.tensor([[3.0, -1.0]]), dtype, False)
        assert x8.float().max().item() == most
        assert scale.item() == pytest.approx(3.0 / most)
        zero, _ = quantize(torch.zeros(2, 2), dtype, True)
        assert torch.equal(zero.float(), torch.zeros(2, 2))


@pytest.mark.parametrize("per_row", SCALINGS)
def test_gradients_are_those_of_float64_to_what_8_bits_allow(per_row: bool) -> None:
    layer = nn.Linear(48, 32, bias=True)
    layer.weight.data, layer.bias.data = drawn(32, 48, seed=2), drawn(1, 32, seed=3)[0]
    plain = nn.Linear(48, 32, bias=True).double()
    plain.load_state_dict(layer.state_dict())
    block = nn.Module()
    block.blocks = nn.ModuleList([layer])
    assert use_fp8(block, "row" if per_row else "tensor") == 1
    assert isinstance(layer, Fp8Linear)
    x, dy = drawn(4, 8, 48, seed=4), drawn(4, 8, 32, seed=5)
    mine, theirs = x.clone().requires_grad_(), x.double().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(mine)
    y.backward(dy.bfloat16())
    z = plain(theirs)
    z.backward(dy.double())
    assert layer.weight.grad is not None
    for found, exact, off in (
        (y, z, 2.0**-4),
        (mine.grad, theirs.grad, 2.0**-3),
        (layer.weight.grad, plain.weight.grad, 2.0**-3),
        (layer.bias.grad, plain.bias.grad, 2.0**-6),
    ):
        assert (found.double() - exact).norm() / exact.norm() < off  # type: ignore[union-attr]
        assert (found.double() - exact).norm() > 0  # type: ignore[union-attr]


def test_only_linear_layers_of_blocks_change_and_names_stay() -> None:
    model = GPT(ModelShape(2, 2, 32, 16, False, 64))
    names = list(model.state_dict())
    assert use_fp8(model, "tensor") == 2 * 4
    assert list(model.state_dict()) == names
    assert model.lm_head.weight is model.tok_emb.weight
    assert not isinstance(model.lm_head, Fp8Linear)

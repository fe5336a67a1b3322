"""Updates of 16-bit weights against float64 and torch's AdamW; rounding at random; what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanoray.checkpoint.state.optimizers import kind_of, load_optimizer_tensors, optimizer_tensors
from nanoray.config import make_config
from nanoray.models.precision import LossScaler, weight_type
from nanoray.parallel.pieces import whole_shards
from nanoray.train.optim.groups import make_optimizer
from nanoray.train.optim.optim16 import Optim16, random_bits, round_at_random

CPU = torch.device("cpu")
BASE = {"micro_batch_size": 1, "weight_decay": 0.1, "lr": 1e-2}


class Two(nn.Module):
    """A matrix, which decays, and a vector, which does not."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(24, 16).to(dtype))
        self.vector = nn.Parameter(torch.randn(16).to(dtype))


def made(precision: str, **settings: Any) -> tuple[Two, Optim16]:
    config = make_config(BASE | {"precision": precision} | settings)
    model = Two(weight_type(precision))
    optimizer = make_optimizer(model, config)
    assert isinstance(optimizer, Optim16)
    return model, optimizer


def gradients(step: int, size: float = 1.0) -> list[Tensor]:
    source = torch.Generator().manual_seed(step)
    return [size * torch.randn(shape, generator=source) for shape in ((24, 16), (16,))]


def train(
    model: Two, optimizer: Optim16, steps: int, size: float = 1.0, scale: float | None = None
) -> None:
    optimizer.grad_scale = None if scale is None else torch.tensor(scale)
    for step in range(steps):
        for p, grad in zip(model.parameters(), gradients(step, size), strict=True):
            p.grad = (grad * (scale or 1.0)).to(p.dtype)
        optimizer.step()


@pytest.mark.parametrize("precision", ["bf16_pure", "fp16_pure"])
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_with_masters_it_is_torchs_own_optimizer_to_the_bit(precision: str, kind: str) -> None:
    """torch's gets float32 copies of the same 16-bit gradients; the weights are its own, rounded."""
    model, optimizer = made(precision, master_weights="fp32", optimizer=kind)
    theirs = [p.detach().float().requires_grad_() for p in model.parameters()]
    decays = [0.1, 0.0]
    groups = [{"params": [p], "weight_decay": d} for p, d in zip(theirs, decays, strict=True)]
    make = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[kind]
    if kind == "sgd":
        reference = make(theirs, lr=1e-2, foreach=False)
    else:
        reference = make(groups, lr=1e-2, betas=(0.9, 0.99), foreach=False)  # type: ignore[call-arg]
    train(model, optimizer, 7)
    for step in range(7):
        for p, grad in zip(theirs, gradients(step), strict=True):
            p.grad = grad.to(weight_type(precision)).float()
        reference.step()
    for p, expected in zip(model.parameters(), theirs, strict=True):
        assert torch.equal(optimizer.state[p]["master"], expected)
        assert torch.equal(p, expected.to(p.dtype))


@pytest.mark.parametrize(
    ("precision", "eps"), [("bf16_pure", 2.0**-7), ("fp16_pure", 2.0**-10)], ids=["bf16", "fp16"]
)
def test_one_update_is_that_of_float64_rounded_once(precision: str, eps: float) -> None:
    model, optimizer = made(precision)
    before = [p.detach().double() for p in model.parameters()]
    train(model, optimizer, 1)
    for p, old, grad, decay in zip(
        model.parameters(), before, gradients(0), (0.1, 0.0), strict=True
    ):
        g = grad.to(p.dtype).double()
        expected = old * (1 - 1e-2 * decay) - 1e-2 * g / (g.abs() + 1e-8)
        assert ((p.double() - expected).abs() <= eps / 2 * expected.abs() * 1.001).all()


def test_fp16_keeps_moments_of_gradients_whose_squares_it_cannot_hold() -> None:
    """Gradients near 1e-6: their squares are 0 in fp16. Ten steps stay near float64's."""
    model, optimizer = made("fp16_pure")
    exact = [p.detach().double().requires_grad_() for p in model.parameters()]
    groups = [{"params": [p], "weight_decay": d} for p, d in zip(exact, (0.1, 0.0), strict=True)]
    reference = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.99))
    train(model, optimizer, 10, size=1e-6, scale=2.0**14)
    for step in range(10):
        for p, grad in zip(exact, gradients(step, 1e-6), strict=True):
            p.grad = grad.double()
        reference.step()
    for p, q in zip(model.parameters(), exact, strict=True):
        assert (p.double() - q).abs().max() < 6e-3, (
            "weights to 4, rounded 10 times to 11 bits; updates sum to 0.05"
        )
    assert (torch.tensor(1e-6).half() ** 2).item() == 0.0


def test_a_small_update_is_lost_to_nearest_and_kept_on_average_at_random() -> None:
    """w = 1, lr·g = 2^-12: below 1 the next number of bf16 is 1 - 2^-8."""
    for rounding, moved in (("nearest", 0.0), ("stochastic", 256 * 2.0**-12)):
        config = make_config(
            BASE | {"precision": "bf16_pure", "rounding": rounding, "optimizer": "sgd"}
        )
        model = nn.Module()
        model.w = nn.Parameter(torch.ones(4000, dtype=torch.bfloat16))
        optimizer = make_optimizer(model, config)
        for group in optimizer.param_groups:
            group["lr"] = 2.0**-12
        for _ in range(256):
            model.w.grad = torch.ones_like(model.w)
            optimizer.step()
        mean = 1.0 - model.w.double().mean().item()
        # 4000 walks of 256 steps: a standard error below 3e-4
        assert mean == pytest.approx(moved, abs=2e-3), rounding


def test_rounding_at_random_has_the_right_mean_and_leaves_what_fits() -> None:
    values = torch.tensor(
        [1.0, -1.5, 1.0 + 2.0**-10, -(1.0 + 3 * 2.0**-10), 3e-39, math.inf, -math.inf, math.nan]
    )
    found = torch.stack(
        [
            round_at_random(values, torch.full((8,), bits, dtype=torch.int32))
            for bits in range(2**16)[::16]
        ]
    )
    assert torch.equal(found[:, :2].float().unique(dim=0), values[None, :2])
    assert found[:, 2:5].double().mean(0).numpy() == pytest.approx(
        values[2:5].double().numpy(), rel=1e-4
    )
    assert len(found[:, 2].unique()) == 2, "one of its two neighbours"
    assert found[0, 5:7].tolist() == [math.inf, -math.inf]
    assert found[:, 7].isnan().all()


def test_random_bits_are_a_function_of_seed_and_element_and_look_random() -> None:
    whole = random_bits(12345, 0, 1 << 16, CPU)
    assert torch.equal(whole[1000:3000], random_bits(12345, 1000, 2000, CPU)), (
        "however a tensor is cut"
    )
    other = random_bits(12346, 0, 1 << 16, CPU)
    each = [((whole >> k) & 1).double() for k in range(32)]
    assert all(abs(bit.mean() - 0.5) < 0.01 for bit in each)  # 5 standard errors
    differ = torch.stack([((whole ^ other) >> k) & 1 for k in range(32)]).double()
    assert (differ.mean(1) - 0.5).abs().max() < 0.01, "other seeds are unrelated"
    neighbours = torch.stack([((whole[1:] ^ whole[:-1]) >> k) & 1 for k in range(32)]).double()
    assert (neighbours.mean(1) - 0.5).abs().max() < 0.01
    assert len(whole.unique()) > 65500


def test_a_skipped_first_step_makes_state_and_moves_nothing() -> None:
    """So the checkpoint of a run whose first updates overflowed can be read."""
    model, optimizer = made("fp16_pure")
    scaler = LossScaler(CPU, enabled=True, late=True)
    before = [p.clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.full_like(p, math.inf)
    scaler.flag_nonfinite(scaler.norm(torch.tensor(math.inf)), torch.zeros(()))
    scaler.step([optimizer])
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    kept = optimizer_tensors(optimizer, whole_shards(model))
    keys = {name.partition(".")[0] for name in kept}
    assert keys == {"step", "exp_avg_x4096", "exp_avg_root_x4096"}
    assert optimizer.state[model.matrix]["step"].item() == 0
    assert scaler.read(1) == (2.0**15, 1, 0)


def test_gradients_in_fp16_keep_the_scale_until_they_are_float32() -> None:
    scaler = LossScaler(CPU, enabled=True, late=True)
    grad = torch.tensor([2.0**-10], dtype=torch.float16)  # 2^-26 without the scale: 0 in fp16
    scaler.unscale([grad])
    assert grad.item() == 2.0**-10
    assert scaler.norm(torch.tensor(2.0**-10)).item() == 2.0**-26
    plain = LossScaler(CPU, enabled=True)
    plain.unscale([grad])
    assert grad.item() == 0.0
    assert plain.norm(torch.tensor(3.0)).item() == 3.0


def test_state_of_another_precision_is_converted_where_it_is_of_one_kind() -> None:
    model, optimizer = made("bf16_pure")
    train(model, optimizer, 1)
    saved = {k: v.clone() for k, v in optimizer_tensors(optimizer, whole_shards(model)).items()}
    wide = Two(torch.float32)
    torchs = make_optimizer(wide, make_config(BASE))
    load_optimizer_tensors(torchs, whole_shards(wide), saved)
    assert torchs.state[wide.matrix]["exp_avg"].dtype == torch.float32
    for p in wide.parameters():
        p.grad = torch.ones_like(p)
    torchs.step()

    # TrainState.load refuses a state of another kind.
    _, other = made("bf16_pure", master_weights="fp32")
    assert kind_of(optimizer) == kind_of(torchs) == "AdamW"
    assert kind_of(other) == "Optim16 with exp_avg, exp_avg_sq, master"

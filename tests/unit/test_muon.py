"""Muon: orthogonal updates against known singular values, AdamW for the rest, state that resumes to
the bit.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nanoray.checkpoint.state.optimizers import load_optimizer_tensors, optimizer_tensors
from nanoray.config import Config, load_config
from nanoray.models.gpt import GPT, ModelShape
from nanoray.models.precision import step_unless
from nanoray.parallel.pieces import whole_shards
from nanoray.train.optim.groups import make_optimizer, set_lr
from nanoray.train.optim.muon import MOMENTUM, orthogonal

SHAPE = ModelShape(2, 2, 16, 8, True, 65)


def config(**values: Any) -> Config:
    return load_config(
        preset="tiny", overrides={"optimizer": "muon", "lr": 0.004, "muon_lr": 0.02} | values
    )


def model() -> GPT:
    torch.manual_seed(0)
    return GPT(SHAPE)


def give_gradients(gpt: GPT, step: int) -> None:
    source = torch.Generator().manual_seed(step)
    for p in gpt.parameters():
        p.grad = torch.randn(p.shape, generator=source)


@pytest.mark.parametrize("size", [(16, 16), (16, 64)])
def test_all_singular_values_come_near_one_and_no_direction_changes(size: tuple[int, int]) -> None:
    rows, columns = size
    source = torch.Generator().manual_seed(0)
    U, _ = torch.linalg.qr(torch.randn(3, rows, rows, generator=source))
    V, _ = torch.linalg.qr(torch.randn(3, columns, rows, generator=source))
    S = torch.logspace(0, -2, rows)  # of values from 1 to 0.01
    for scale in (1.0, 1e-6, 1e6):
        made = U.mT @ orthogonal(scale * U @ torch.diag(S) @ V.mT) @ V  # (3, rows, rows)
        found = made.diagonal(dim1=1, dim2=2)
        assert found.min() > 0.65, "0.01 of the largest, and less of the norm"
        assert found.max() < 1.2
        assert (made - torch.diag_embed(found)).abs().max() < 1e-4
    assert torch.isfinite(orthogonal(torch.zeros(1, 4, 4))).all()


def test_it_is_the_formula() -> None:
    """Every matrix by itself, queries, keys and values apart; embeddings, norms and biases as AdamW
    does them.
    """
    ours, theirs = model(), model()
    settings = config(weight_decay=0.1)
    optimizer = make_optimizer(ours, settings)
    adamw = make_optimizer(theirs, settings.model_copy(update={"optimizer": "adamw"}))
    sums: dict[str, Tensor] = {}
    weights = {n: p.detach().clone() for n, p in ours.named_parameters()}
    for step in range(3):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        rate = 0.004 / (step + 1)
        set_lr([optimizer, adamw], rate)
        optimizer.step()
        adamw.step()
        for name, p in ours.named_parameters():
            if not (name.startswith("blocks.") and p.dim() == 2):
                continue
            g = torch.randn(0) if p.grad is None else p.grad
            sums[name] = MOMENTUM * sums.get(name, torch.zeros_like(g)) + g
            parts = (g + MOMENTUM * sums[name]).chunk(3 if "qkv" in name else 1)
            rows, columns = parts[0].shape
            made = torch.cat(
                [
                    orthogonal(u[None])[0] if rows <= columns else orthogonal(u.T[None])[0].T
                    for u in parts
                ]
            )
            lr = rate * 5  # muon_lr / lr
            weights[name] = (
                weights[name] * (1 - lr * 0.1) - lr * max(1.0, rows / columns) ** 0.5 * made
            )
    others = dict(theirs.named_parameters())
    for name, p in ours.named_parameters():
        if name in sums:
            torch.testing.assert_close(p.detach(), weights[name], rtol=1e-4, atol=1e-5, msg=name)
        else:
            assert torch.equal(p, others[name]), name
    assert len(sums) == 2 * 4


def test_the_state_goes_out_and_comes_back_to_the_bit() -> None:
    first = model()
    optimizer, shards = make_optimizer(first, config()), whole_shards(first)
    saved: dict[str, Tensor] = {}
    weights: dict[str, Tensor] = {}
    for step in range(4):
        if step == 2:
            saved = {name: t.clone() for name, t in optimizer_tensors(optimizer, shards).items()}
            weights = {name: t.clone() for name, t in first.state_dict().items()}
        give_gradients(first, step)
        optimizer.step()
    kinds = {name.split(".")[0] for name in saved}
    assert kinds == {"momentum_buffer", "exp_avg", "exp_avg_sq", "step"}
    assert "momentum_buffer.blocks.0.attn.qkv.weight" in saved
    assert "exp_avg.blocks.0.attn.qkv.weight" not in saved
    assert "exp_avg.blocks.0.attn.qkv.bias" in saved
    assert "exp_avg.tok_emb.weight" in saved
    second = model()
    again = make_optimizer(second, config())
    second.load_state_dict(weights)
    load_optimizer_tensors(again, whole_shards(second), saved)
    for step in (2, 3):
        give_gradients(second, step)
        again.step()
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True)
    )


def test_a_step_that_is_left_out_changes_nothing_and_others_have_the_same_bits() -> None:
    """The guards and fp16 tell by a tensor on the device, for which the host does not wait."""
    one, two = model(), model()
    first, second = (make_optimizer(gpt, config(weight_decay=0.1)) for gpt in (one, two))
    assert all(group["fused"] for group in second.param_groups), (
        "so step_unless does not ask the device"
    )
    for step in range(3):
        give_gradients(one, step)
        give_gradients(two, step)
        step_unless(first, None)
        step_unless(second, torch.zeros(()))
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), two.parameters(), strict=True))
    for p in two.parameters():
        p.grad = torch.full_like(p, float("nan"))
    step_unless(second, torch.ones(()))
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), two.parameters(), strict=True))
    ours, theirs = (
        optimizer_tensors(o, whole_shards(gpt)) for o, gpt in ((second, two), (first, one))
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)

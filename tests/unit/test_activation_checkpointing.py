"""Activation checkpointing: the same bits with less memory, with dropout and without, eager and
compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nanoray.models.dropout import seed_generators
from nanoray.models.gpt import GPT, MLP, ModelShape

HOW = ("none", "selective", "block")
SHAPE = ModelShape(n_layer=3, n_head=4, n_embd=64, block_size=32, bias=False, vocab_size=128)


def batch(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(
        torch.randint(SHAPE.vocab_size, (rows, SHAPE.block_size), generator=generator)
        for _ in range(2)
    )  # type: ignore[return-value]


def trained(
    how: str, dropout: float, prepare: Callable[[GPT], Any] = lambda gpt: None
) -> tuple[Tensor, list[Tensor]]:
    """Return the loss and the gradients of one batch."""
    torch.manual_seed(0)
    gpt = GPT(SHAPE, dropout, how)
    prepare(gpt)
    seed_generators(7, torch.device("cpu"))
    loss = gpt(*batch(2))
    torch.rand(3)  # backward must not depend on where the generator is by then
    loss.backward()
    return loss.detach(), [p.grad for p in gpt.parameters() if p.grad is not None]


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("bf16", [False, True])
def test_loss_and_gradients_have_the_same_bits(dropout: float, bf16: bool) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        loss, gradients = trained("none", dropout)
        for how in HOW[1:]:
            own_loss, own_gradients = trained(how, dropout)
            assert torch.equal(own_loss, loss), how
            assert all(torch.equal(a, b) for a, b in zip(own_gradients, gradients, strict=True)), (
                how
            )


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.full), 0.2])
def test_a_compiled_block_contains_it(dropout: float) -> None:
    """Without the last step of the compiler, which needs minutes; that one sees plain graphs."""

    def compile(gpt: GPT) -> None:
        for block in gpt.blocks:
            block.compile(backend="aot_eager_decomp_partition")

    # What earlier tests of this process have compiled counts against the limit on versions of a
    # function. Beyond it a block runs as it is, and its dropout draws other masks.
    torch._dynamo.reset()
    loss, gradients = trained("none", dropout, compile)
    for how in HOW[1:]:
        torch._dynamo.reset()
        own_loss, own_gradients = trained(how, dropout, compile)
        assert torch.equal(own_loss, loss), how
        assert all(torch.equal(a, b) for a, b in zip(own_gradients, gradients, strict=True)), how


def test_what_is_computed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block runs a second time in backward; a plain run does not, and an evaluation does not."""
    calls: list[str] = []
    original = MLP.forward
    monkeypatch.setattr(MLP, "forward", lambda self, x: calls.append("mlp") or original(self, x))
    for how, times in (("none", 1), ("selective", 2), ("block", 2)):
        calls.clear()
        trained(how, 0.0)
        assert len(calls) == times * SHAPE.n_layer, how
    with torch.no_grad():
        calls.clear()
        GPT(SHAPE, 0.0, "block")(*batch(2))
    assert len(calls) == SHAPE.n_layer, "an evaluation has no backward"

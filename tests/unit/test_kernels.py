"""Attention, loss and positions computed in other ways: equal to the first way, in forward and
backward.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nanoray.config import load_config, recipe_of
from nanoray.models.build import gpt_of, kernels_of
from nanoray.models.costs import count_parameters, flops_per_token
from nanoray.models.gpt import GPT, KVCache, ModelShape
from nanoray.models.kernels import (
    Kernels,
    chunked_cross_entropy,
    plain_attention,
    rotate,
)
from nanoray.models.moe import RouterTraining
from nanoray.models.sampling import generate
from nanoray.parallel.compile import compile_layers

PLAIN, CHUNKED = Kernels("plain"), Kernels(loss_chunk=7)


def made(
    kernels: Kernels = Kernels(),  # noqa: B008
    vocab_size: int = 65,
    rotary: bool = False,
    dropout: float = 0.0,
) -> GPT:
    """A float64 model with large weights everywhere; equal arguments but for the kernels give equal
    weights.
    """
    torch.manual_seed(0)
    shape = ModelShape(2, 4, 32, 8, True, vocab_size, rotary=rotary)
    model = GPT(shape, dropout, "none", RouterTraining(), kernels).double()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.4)
    return model


def tokens(vocab_size: int = 65, T: int = 8, seed: int = 1) -> Tensor:
    return torch.randint(vocab_size, (3, T), generator=torch.Generator().manual_seed(seed))


def learned(model: GPT) -> tuple[Tensor, list[Tensor]]:
    """The loss, and the gradient of every parameter."""
    loss = model(tokens(model.shape.vocab_size), tokens(model.shape.vocab_size, seed=2))
    return loss, list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("T", [1, 2, 8])
@pytest.mark.parametrize("S", [8, 11])
def test_plain_attention_is_attention(T: int, S: int) -> None:
    """Against torch's, with a mask that lets the last query see all keys; outputs and gradients."""
    source = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, n, 16, generator=source, dtype=torch.float64) for n in (T, S, S))
    seen = torch.ones(T, S, dtype=torch.bool).tril(S - T)
    weight = torch.randn(2, 4, T, 16, generator=source, dtype=torch.float64)
    found = []
    for attend in (plain_attention, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, seen)):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        y = attend(*inputs)
        found.append([y, *torch.autograd.grad((y * weight).sum(), inputs)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("vocab_size", [65, 60])
def test_a_compiled_loss_is_the_loss(vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced with the graphs of autograd, without generated code: that takes half a minute here."""
    compiled: list[str] = []

    def trace(function: Any, **settings: Any) -> Any:
        compiled.append(function.__name__)
        return whole(function, backend="aot_eager", **settings)

    whole = torch.compile
    monkeypatch.setattr(torch, "compile", trace)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda *_, **__: None)
    expected = learned(made(vocab_size=vocab_size))
    model = made(vocab_size=vocab_size)
    compile_layers(model, load_config(preset="tiny", overrides={"compile": True}))
    calls: list[tuple[Any, ...]] = []
    head: Any = model.lm_head
    inner = head.compiled_loss
    head.compiled_loss = lambda *given: calls.append(given) or inner(*given)
    loss, grads = learned(model)
    assert (compiled, len(calls)) == (["cross_entropy"], 1)
    torch.testing.assert_close((loss, grads), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("chunk", [7, 100])
def test_padded_columns_of_a_chunked_loss_have_no_part_in_it(chunk: int) -> None:
    """As on a GPU, where all rows of the embedding are multiplied."""
    source = torch.Generator().manual_seed(0)
    x = torch.randn(24, 16, generator=source, dtype=torch.float64)
    w = torch.randn(64, 16, generator=source, dtype=torch.float64)
    targets = torch.randint(60, (24,), generator=source)
    found = []
    for columns in (60, 64):
        inputs = [x.clone().requires_grad_(), w.clone().requires_grad_()]
        loss = chunked_cross_entropy(*inputs, targets, 60, chunk, columns)
        found.append([loss, *torch.autograd.grad(loss, inputs)])
    torch.testing.assert_close(found[0], found[1], rtol=1e-7, atol=1e-12)
    assert not found[1][2][60:].any()


@pytest.mark.parametrize("kernels", [PLAIN, CHUNKED], ids=["plain", "chunked"])
@pytest.mark.parametrize("vocab_size", [65, 60])
def test_a_model_learns_the_same(kernels: Kernels, vocab_size: int) -> None:
    """65 tokens: lm_head cuts the padding away. 60: it masks 4 rows. 24 tokens are chunks of 7, 7,
    7 and 3.
    """
    (loss, grads), (other, others) = (
        learned(made(vocab_size=vocab_size)),
        learned(made(kernels, vocab_size)),
    )
    torch.testing.assert_close(other, loss, rtol=1e-6, atol=0)
    for mine, its in zip(others, grads, strict=True):
        # The whole loss passes through a float32 softmax
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("chunk", [1, 5, 24, 1000])
def test_the_chunked_loss_at_every_size(chunk: int) -> None:
    source = torch.Generator().manual_seed(0)
    x, w = (
        torch.randn(*size, generator=source, dtype=torch.float64) for size in ((24, 16), (64, 16))
    )
    targets, found = tokens(60).flatten(), []
    for how in ("chunked", "whole"):
        inputs = [x.clone().requires_grad_(), w.clone().requires_grad_()]
        if how == "chunked":
            loss = chunked_cross_entropy(*inputs, targets, 60, chunk)
        else:
            loss = F.cross_entropy(inputs[0] @ inputs[1][:60].T, targets)
        found.append([loss.double(), *torch.autograd.grad(3 * loss, inputs)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)
    with torch.no_grad():
        assert chunked_cross_entropy(x, w, targets, 60, chunk).item() == pytest.approx(
            found[1][0].item(), rel=1e-6
        )


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_the_chunked_loss_in_16_bits_and_under_a_loss_scale(kind: torch.dtype) -> None:
    """fp16's gradients of single tokens are above its smallest numbers: 1/N and the scale come in
    afterwards.
    """
    source = torch.Generator().manual_seed(0)
    x, w = torch.randn(512, 64, generator=source), torch.randn(128, 64, generator=source) / 8
    targets = torch.randint(100, (512,), generator=source)
    grads = []
    for chunk in (0, 100):
        inputs = [x.clone().requires_grad_(), w.clone().requires_grad_()]
        with torch.autocast("cpu", dtype=kind):
            if chunk:
                loss = chunked_cross_entropy(*inputs, targets, 100, chunk)
            else:
                loss = F.cross_entropy(F.linear(inputs[0], inputs[1][:100]).float(), targets)
        grads.append([g / 1024 for g in torch.autograd.grad(1024 * loss, inputs)])
    for ours, theirs in zip(*grads, strict=True):
        assert (ours - theirs).norm() < 0.02 * theirs.norm()
        assert ours.dtype == torch.float32


def test_plain_attention_drops_weights_while_training_only() -> None:
    model, sober = made(PLAIN, dropout=0.5), made(PLAIN)
    idx, targets = tokens(), tokens(seed=2)
    assert model(idx, targets) != model(idx, targets)
    assert torch.equal(model.eval()(idx, targets), sober(idx, targets))
    torch.manual_seed(0)
    ones = torch.ones(1, 1, 64, 1)
    shares = plain_attention(
        torch.zeros(1, 1, 64, 16), torch.zeros(1, 1, 64, 16), ones.expand(1, 1, 64, 16), 0.5
    )
    assert shares[0, 0, 0, 0].item() in (0.0, 2.0), "one weight, dropped or doubled"
    assert shares[0, 0, 32:].mean().item() == pytest.approx(1.0, abs=0.2)


@torch.no_grad()
@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("kernels", [Kernels(), PLAIN], ids=["flash", "plain"])
def test_a_cache_may_be_filled_in_pieces_of_any_length(kernels: Kernels, rotary: bool) -> None:
    model = made(kernels, rotary=rotary)
    idx = tokens()
    cache = [KVCache(8) for _ in model.blocks]
    for start, end in [(0, 1), (1, 4), (4, 5), (5, 8)]:
        logits = model(idx[:, start:end], kv_cache=cache)
        torch.testing.assert_close(logits, model(idx[:, :end]), rtol=1e-6, atol=1e-6)
    sampled = [
        generate(made(how, rotary=rotary), idx, 20, temperature=0) for how in (Kernels(), PLAIN)
    ]
    assert torch.equal(*sampled)


# --- rotary positions -------------------------------------------------------------------------------------------------


def test_rotate_is_a_turn_in_the_complex_plane() -> None:
    x = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(0))
    pairs = torch.complex(x[..., :4].double(), x[..., 4:].double())
    for start in (0, 7):
        angle = torch.arange(start, start + 5).double()[:, None] * 10000.0 ** (
            -torch.arange(4).double() / 4
        )
        turned = pairs * torch.polar(torch.ones_like(angle), angle)
        expected = torch.cat([turned.real, turned.imag], -1)
        torch.testing.assert_close(rotate(x, start).double(), expected, rtol=1e-5, atol=1e-5)


def test_only_distances_count() -> None:
    """A rotary model's logits do not change when all positions move: a cache that begins later
    gives the same.
    """
    q, k = (torch.randn(1, 1, 6, 16, generator=torch.Generator().manual_seed(n)) for n in (0, 1))
    here, there = (rotate(q, start) @ rotate(k, start).mT for start in (0, 40))
    torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-4)
    assert (here - q @ k.mT).abs().max() > 1


def test_a_rotary_model_has_no_position_embedding_and_knows_positions() -> None:
    model = made(rotary=True)
    shape = model.shape
    assert not [name for name, _ in model.named_parameters() if name.startswith("pos_emb")]
    assert sum(p.numel() for p in model.parameters()) == count_parameters(shape)
    whole = ModelShape(2, 4, 32, 8, True, 65)
    assert count_parameters(whole) - count_parameters(shape) == 8 * 32
    assert flops_per_token(whole) == flops_per_token(shape)
    idx = tokens()
    swapped = idx[:, [1, 0, *range(2, 8)]]
    assert (model(idx) - model(swapped)).abs().max() > 1e-3
    assert shape.to_dict()["rotary"] is True
    assert whole.to_dict()["rotary"] is False
    assert ModelShape(**shape.to_dict()) == shape  # type: ignore[arg-type]


# --- options ----------------------------------------------------------------------------------------------------------


def test_options_reach_the_model() -> None:
    config = load_config(
        preset="tiny", overrides={"attention": "plain", "loss_chunk": 5, "positions": "rotary"}
    )
    model = gpt_of(ModelShape.of(config, 65), config)
    assert kernels_of(config) == Kernels("plain", 5)
    assert (model.blocks[0].attn.kernel, model.lm_head.loss_chunk, model.shape.rotary) == (
        "plain",
        5,
        True,
    )
    other = load_config(preset="tiny", overrides={"attention": "flash"})
    assert recipe_of(other) == recipe_of(load_config(preset="tiny")), "the same experiment"
    assert recipe_of(config) != recipe_of(other), "other positions make another one"

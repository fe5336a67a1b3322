"""The GPT against an independent one in float64, its sampler against plain forward passes, its
costs against torch.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from nanoray.errors import ConfigError
from nanoray.models.costs import (
    activation_memory,
    count_parameters,
    flops_per_token,
    matrix_parameters,
)
from nanoray.models.fp8 import use_fp8
from nanoray.models.gpt import GPT, ModelShape
from nanoray.models.precision import weight_type
from nanoray.models.sampling import _sample, generate

# 65 tokens: lm_head cuts the padding away. 60: it masks 4 rows. 64: there is no padding.
VOCABULARIES = pytest.mark.parametrize("vocab_size", [65, 60, 64])


def shape_of(
    vocab_size: int = 65, *, bias: bool = True, block_size: int = 8, n_layer: int = 2
) -> ModelShape:
    return ModelShape(n_layer, 4, 32, block_size, bias, vocab_size)


def rough(shape: ModelShape, dropout: float = 0.0) -> GPT:
    """A float64 model with large weights everywhere, biases and norms too: nothing is small, zero
    or one by luck.
    """
    torch.manual_seed(0)
    model = GPT(shape, dropout).double()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.4)
    for p in (model.pos_emb.weight, model.norm.weight):  # else it would repeat one token for ever
        torch.nn.init.normal_(p, std=2.0)
    return model


def tokens_of(shape: ModelShape, B: int = 3, T: int | None = None, seed: int = 1) -> Tensor:
    return torch.randint(
        shape.vocab_size, (B, T or shape.block_size), generator=torch.Generator().manual_seed(seed)
    )


def reference_logits(model: GPT, idx: Tensor) -> Tensor:
    """Logits (B, T, V) by the textbook: no fused kernel, head by head, query by query."""
    p, shape = dict(model.named_parameters()), model.shape
    D = shape.n_embd // shape.n_head

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        x = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * p[name + ".weight"]
        return x + p[name + ".bias"] if shape.bias else x

    def linear(x: Tensor, name: str) -> Tensor:
        y = x @ p[name + ".weight"].T
        return y + p[name + ".bias"] if shape.bias else y

    def attend(x: Tensor, name: str) -> Tensor:
        qkv, heads = linear(x, name + ".qkv"), []
        for h in range(shape.n_head):
            q, k, v = (qkv[:, :, c * shape.n_embd + h * D :][:, :, :D] for c in range(3))
            rows = []
            for t in range(x.shape[1]):
                # (B, t + 1)
                weights = torch.softmax(
                    (q[:, t, None] * k[:, : t + 1]).sum(-1) / math.sqrt(D), dim=-1
                )
                rows.append((weights[:, :, None] * v[:, : t + 1]).sum(1))
            heads.append(torch.stack(rows, dim=1))
        return linear(torch.cat(heads, dim=-1), name + ".proj")

    x = p["tok_emb.weight"][idx] + p["pos_emb.weight"][: idx.shape[1]]
    for n in range(shape.n_layer):
        x = x + attend(norm(x, f"blocks.{n}.norm1"), f"blocks.{n}.attn")
        up = linear(norm(x, f"blocks.{n}.norm2"), f"blocks.{n}.mlp.up")
        x = x + linear(up * (1 + torch.erf(up / math.sqrt(2))) / 2, f"blocks.{n}.mlp.down")
    return norm(x, "norm") @ p["tok_emb.weight"][: shape.vocab_size].T


# --- the forward pass -------------------------------------------------------------------------------------------------


@VOCABULARIES
@pytest.mark.parametrize("bias", [True, False])
def test_loss_and_every_gradient_equal_the_reference(vocab_size: int, bias: bool) -> None:
    model = rough(shape_of(vocab_size, bias=bias))
    idx, targets = tokens_of(model.shape), tokens_of(model.shape, seed=2)
    logits = reference_logits(model, idx)
    probs = torch.softmax(logits, dim=-1)
    expected = -torch.log(probs.gather(-1, targets[:, :, None])).mean()
    wanted = torch.autograd.grad(expected, list(model.parameters()))

    loss = model(idx, targets)
    loss.backward()

    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    for (name, p), grad in zip(model.named_parameters(), wanted, strict=True):
        # The loss is float32 by design, so the gradient passes through one float32 softmax.
        torch.testing.assert_close(
            p.grad, grad, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
    torch.testing.assert_close(model(idx), logits[:, -1], rtol=1e-10, atol=1e-10)


def test_the_embedding_is_tied_and_collects_both_gradients() -> None:
    model = rough(shape_of())
    assert model.lm_head.weight is model.tok_emb.weight
    assert "lm_head.weight" not in dict(model.named_parameters())
    assert not list(model.buffers())
    model(torch.zeros(1, 2, dtype=torch.long), torch.ones(1, 2, dtype=torch.long)).backward()
    grad = model.tok_emb.weight.grad
    assert grad is not None
    assert grad[5].abs().sum() > 0, "token 5 was neither read nor wanted: only lm_head moves it"


def test_a_future_token_changes_no_past_loss() -> None:
    model = rough(shape_of())
    idx, targets = tokens_of(model.shape), tokens_of(model.shape, seed=2)
    changed = idx.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % model.shape.vocab_size

    def stream(tokens: Tensor) -> Tensor:
        x = model.embed(tokens)
        for block in model.blocks:
            x = block(x)
        return model.lm_head(model.norm(x))

    before, after = stream(idx), stream(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5], rtol=0, atol=0)
    assert (before[:, 5:] - after[:, 5:]).abs().amax(-1).min() > 1e-3
    loss = F.cross_entropy(before[..., : model.shape.vocab_size].transpose(1, 2), targets)
    torch.testing.assert_close(loss, model(idx, targets).double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("vocab_size", [65, 60])
def test_the_padded_vocabulary_has_no_probability_and_is_never_sampled(vocab_size: int) -> None:
    model = rough(shape_of(vocab_size))
    idx, targets = tokens_of(model.shape), tokens_of(model.shape, seed=2)
    loss = model(idx, targets)
    loss.backward()
    assert model.tok_emb.weight.grad is not None
    assert torch.count_nonzero(model.tok_emb.weight.grad[vocab_size:]) == 0
    with torch.no_grad():
        # Would win every softmax
        model.tok_emb.weight[vocab_size:] = 1e3 * model.tok_emb.weight[:1]
    assert torch.equal(model(idx, targets), loss)
    assert model(idx).shape == (3, vocab_size)
    hot = generate(
        model, idx.repeat(20, 1), 10, temperature=1e6, generator=torch.Generator().manual_seed(0)
    )
    assert hot.max() == vocab_size - 1
    assert generate(model, idx, 10, temperature=0).max() < vocab_size


def test_the_loss_is_float32_under_bf16_autocast() -> None:
    torch.manual_seed(0)
    model = GPT(shape_of())
    idx, targets = tokens_of(model.shape), tokens_of(model.shape, seed=2)
    full = model(idx, targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = model(idx, targets)
        assert model(idx).dtype == torch.bfloat16
    assert half.dtype == full.dtype == torch.float32
    assert half.item() == pytest.approx(full.item(), rel=0.01)
    assert half.item() != full.item()
    assert model.bfloat16()(idx, targets).dtype == torch.float32  # and without autocast's help


# --- weights and dropout ----------------------------------------------------------------------------------------------


def test_initial_weights_follow_gpt2() -> None:
    torch.manual_seed(0)
    model = GPT(ModelShape(8, 4, 128, 64, True, 250))
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            assert torch.count_nonzero(p) == 0, name
        elif "norm" in name:
            assert torch.equal(p, torch.ones_like(p)), name
        else:
            # sqrt(2 * 8 layers) = 4
            std = 0.02 / 4 if "attn.proj" in name or "mlp.down" in name else 0.02
            assert p.std().item() == pytest.approx(std, rel=0.03), name
            assert abs(p.mean().item()) < std / 20, name


def test_the_same_seed_gives_the_same_weights_also_by_way_of_the_meta_device() -> None:
    def drawn(model: GPT) -> GPT:
        torch.manual_seed(3)
        model.init_weights()
        return model

    plain = drawn(GPT(shape_of()))
    with torch.device("meta"):
        late = GPT(shape_of())
    late = drawn(late.to_empty(device="cpu"))
    assert late.lm_head.weight is late.tok_emb.weight
    for a, b in zip(plain.parameters(), late.parameters(), strict=True):
        assert torch.equal(a, b)


def test_dropout_works_in_training_and_only_there(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sober = rough(shape_of(), dropout=0.5), rough(shape_of())
    idx, targets = tokens_of(model.shape), tokens_of(model.shape, seed=2)
    assert model(idx, targets) != model(idx, targets)
    assert torch.equal(model.eval()(idx, targets), sober(idx, targets))
    model.train()

    zeros = (model.embed(idx) == 0).double().mean().item()
    assert 0.4 < zeros < 0.6
    assert [m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)] == [0.5] * (1 + 2 * 2)
    seen, attention = [], F.scaled_dot_product_attention
    monkeypatch.setattr(
        F,
        "scaled_dot_product_attention",
        lambda q, k, v, m, p, c: seen.append(p) or attention(q, k, v, m, p, c),
    )
    model(idx)
    model.eval()(idx)
    assert seen == [0.5, 0.5, 0.0, 0.0]


# --- sampling ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("temperature", [0.0, 5.0])
@pytest.mark.parametrize("block_size", [1, 2, 5, 8])
@pytest.mark.parametrize("prompt", [1, 5, 8, 20])
def test_cached_sampling_equals_uncached_sampling_also_past_the_block(
    temperature: float, block_size: int, prompt: int
) -> None:
    model = rough(shape_of(block_size=block_size))
    idx, rng = tokens_of(model.shape, T=prompt), torch.Generator().manual_seed(0)
    expected, start = idx, max(0, prompt - block_size)
    for _ in range(25):
        if expected.shape[1] - start > block_size:
            start = expected.shape[1] - max(1, block_size // 2)
        token = _sample(model(expected[:, start:]).float(), temperature, None, rng)
        expected = torch.cat([expected, token[:, None]], dim=1)
    got = generate(model, idx, 25, temperature, generator=torch.Generator().manual_seed(0))
    assert torch.equal(got, expected)
    assert temperature == 0 or len(got[:, prompt:].unique()) > 20, (
        "a constant text would hide a wrong window"
    )


@pytest.mark.parametrize("rotary", [False, True])
def test_more_tokens_than_a_block_are_refused(rotary: bool) -> None:
    """A slice of one position would be added to all tokens, and rotary positions have no end."""
    model = GPT(replace(shape_of(block_size=1), rotary=rotary))
    with pytest.raises(ConfigError, match="5 tokens, but block_size = 1"):
        model(tokens_of(model.shape, T=5))


def test_sampling_follows_the_softmax_at_its_temperature() -> None:
    model = rough(shape_of(n_layer=1))
    idx = tokens_of(model.shape, B=1, T=4)
    logits = model(idx)[0].detach()
    temperature = (logits.max() - logits.median()).item() / 2
    expected = torch.softmax(logits / temperature, dim=-1)
    new = generate(
        model, idx.repeat(10_000, 1), 1, temperature, generator=torch.Generator().manual_seed(0)
    )[:, -1]
    observed = torch.bincount(new, minlength=65) / len(new)
    assert (observed - expected).abs().max() < 0.02  # four standard deviations of a share of a half

    top = generate(model, idx.repeat(500, 1), 1, temperature, top_k=3)[:, -1]
    assert set(top.tolist()) == set(logits.topk(3).indices.tolist())
    assert torch.equal(
        generate(model, idx, 5, 1.0, top_k=1), generate(model, idx, 5, temperature=0)
    )
    assert torch.equal(generate(model, idx, 5, 1e-300), generate(model, idx, 5, temperature=0))
    assert generate(model, idx, 2, 1.0, top_k=1000).shape == (1, 6)


# --- what it costs ----------------------------------------------------------------------------------------------------

shapes = st.builds(
    lambda n_layer, n_head, width, block_size, bias, vocab_size: ModelShape(
        n_layer, n_head, n_head * width, block_size, bias, vocab_size
    ),
    st.integers(1, 3), st.integers(1, 4), st.integers(1, 16), st.integers(1, 40), st.booleans(), st.integers(1, 300),
)  # fmt: skip


@settings(max_examples=25)
@given(shapes)
def test_count_parameters_is_what_torch_counts(shape: ModelShape) -> None:
    with torch.device("meta"):
        model = GPT(shape)
    matrices = sum(p.numel() for name, p in model.blocks.named_parameters() if p.dim() == 2)
    assert count_parameters(shape) == sum(p.numel() for p in model.parameters())
    assert matrix_parameters(shape) == matrices + model.lm_head.weight.numel()
    assert shape.padded_vocab % 64 == 0
    assert shape.vocab_size <= shape.logit_columns <= shape.padded_vocab < shape.vocab_size + 64


def test_flops_are_what_torch_counts_in_the_matrix_products() -> None:
    shape = ModelShape(3, 4, 64, 32, False, 64)
    model, idx = GPT(shape), tokens_of(shape, B=5)
    with (
        FlopCounterMode(display=False) as counter,
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    ):
        model(idx, idx).backward()
    # Norms: counted by PaLM's 6N, no product
    vectors = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    assert counter.get_total_flops() == idx.numel() * (flops_per_token(shape) - 6 * vectors)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_pure", "fp8"])
@pytest.mark.parametrize("vocab_size", [128, 125])
def test_activations_are_what_torch_keeps_for_backward(precision: str, vocab_size: int) -> None:
    shape = ModelShape(3, 4, 64, 32, False, vocab_size)
    model, idx, targets = GPT(shape), tokens_of(shape, B=5), tokens_of(shape, B=5, seed=2)
    model.to(weight_type(precision))
    if precision == "fp8":
        use_fp8(model, "tensor")
    own, kept = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision in ("bf16", "fp8")),
    ):
        loss = model(idx, targets)
    estimate = activation_memory(shape, 5, precision)
    log_softmax, weight_of_loss = 4 * 5 * 32 * 128, 4
    assert (
        sum(kept.values())
        == estimate["activations"] + estimate["copies"] + log_softmax + weight_of_loss
    )
    copied = {"bf16": matrix_parameters(shape), "fp8": 128 * 64}  # fp8: lm_head alone
    assert estimate["copies"] == 2 * copied.get(precision, 0)
    assert estimate["logits"] == 5 * 32 * 128 * (8 if precision == "fp32" else 10)
    assert loss.isfinite()


# --- shapes and refusals ----------------------------------------------------------------------------------------------

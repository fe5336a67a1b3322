"""Kernels of a GPT: several ways to compute the same, with different costs in time and memory.

    attention   flash    torch's fused kernel: no (T, S) matrix in memory
                cudnn    the same by cuDNN: on GPUs torch has both, and prefers one by the card and
                         its own version
                plain    two batched products and a softmax: the matrix is kept for backward. On
                         CPUs that multiply bf16 it is faster, because there torch's fused kernel
                         spends most of its time in its backward
    loss        whole    all logits at once, (B·T, V) float32, twice
                chunked  the logits of some tokens at a time, and their gradients in the forward
                         pass, so that no logits wait for the backward. As many products as the
                         whole loss

Letters as in gpt.py.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from nanoray.models.dropout import dropout

ROTARY_BASE = 10000.0


class Kernels(NamedTuple):
    """The kernels of a GPT. They do not change the shape of any parameter."""

    attention: str = "flash"  # or cudnn, plain
    loss_chunk: int = 0  # tokens whose logits are in memory at a time; 0: all


def fused_attention(q: Tensor, k: Tensor, v: Tensor, p: float = 0.0, cudnn: bool = False) -> Tensor:
    """Return the same as `plain_attention`, by one of torch's fused kernels.

    `cudnn`: by cuDNN's and no other one. Raises RuntimeError if cuDNN has no kernel for these
    shapes on this device.
    """
    T = q.shape[2]
    S = k.shape[2]
    # is_causal aligns query 0 with key 0, which is right for T = S. A single query attends to all
    # keys. Between the two, as when a prompt continues a cache, only a mask is right.
    is_causal = T == S
    mask = None
    if 1 < T < S:
        mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)  # (T, S)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if cudnn else nullcontext():
        return F.scaled_dot_product_attention(q, k, v, mask, p, is_causal)  # (B, H, T, D)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, p: float = 0.0) -> Tensor:
    """Return causal attention (B, H, T, D) of queries (B, H, T, D) to keys and values (B, H, S, D).

    The last query attends to all keys. `p` is the probability with which a weight is left out.
    """
    T = q.shape[2]
    S = k.shape[2]
    D = q.shape[-1]
    scaled = q * D**-0.5  # less work than scaling the scores
    scores = scaled @ k.transpose(-2, -1)  # (B, H, T, S)

    # A query does not attend to later keys.
    if T > 1:
        later = torch.ones(T, S, dtype=torch.bool, device=q.device).triu(S - T + 1)
        mask = torch.zeros(T, S, dtype=scores.dtype, device=q.device)
        scores = scores + mask.masked_fill_(later, -math.inf)

    # Autocast would compute the softmax in float32. That of 16-bit scores has float32 sums anyway.
    with torch.autocast(q.device.type, enabled=False):
        weights = scores.softmax(-1)  # (B, H, T, S)
    if p > 0:
        weights = dropout(weights, p)
    return weights.to(v.dtype) @ v  # (B, H, T, D)


def rotate(x: Tensor, start: int = 0) -> Tensor:
    """Rotate queries or keys x (B, H, T, D) by their positions start, start + 1, ...

    Number d of a head and number d + D/2 are one pair; pair i turns by position · 10000^(-2i/D)
    radians. So the product of a query and a key depends on their distance (Su et al. 2021,
    RoFormer).
    """
    T, D = x.shape[-2:]
    # Positions and angles stay float32: a bf16 position is wrong from 257 on.
    exponents = torch.arange(0, D, 2, dtype=torch.float32, device=x.device) / D  # (D/2,)
    speeds = ROTARY_BASE**-exponents  # (D/2,)
    positions = torch.arange(start, start + T, dtype=torch.float32, device=x.device)  # (T,)
    angles = torch.outer(positions, speeds)  # (T, D/2)

    # A pair (a, b) becomes (a·cos - b·sin, b·cos + a·sin).
    cos = angles.cos()
    sin = angles.sin()
    own = torch.cat([cos, cos], -1).to(x.dtype)  # (T, D)
    partner = torch.cat([-sin, sin], -1).to(x.dtype)  # (T, D)
    return torch.addcmul(x * own, x.roll(D // 2, -1), partner)  # (B, H, T, D)


def padded_logits(x: Tensor, weight: Tensor, vocab_size: int, columns: int) -> Tensor:
    """Return x (..., C) times the first `columns` rows of weight, as (..., columns).

    Those from vocab_size on are padding, and become -inf: no probability, and no gradient.
    """
    if columns == vocab_size:
        return F.linear(x, weight[:vocab_size])
    # A bias of -inf costs nothing inside the product; slicing the logits would copy gigabytes on a
    # GPU.
    no_bias = x.new_zeros(vocab_size)
    bias = F.pad(no_bias, (0, columns - vocab_size), value=-math.inf)
    return F.linear(x, weight, bias)


def cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, columns: int
) -> Tensor:
    """Return the mean cross entropy (float32 scalar) of x (N, C), given targets (N,).

    The logits are those of `padded_logits`. It is meant to be compiled (parallel/compile.py). Run
    operation by operation, it writes the logits in 16 bits, in float32, and their log softmax, and
    reads these again in backward. Compiled, only the first copy exists.
    """
    logits = padded_logits(x, weight, vocab_size, columns)  # (N, columns)
    # In float32, because 16-bit probabilities would round away small differences.
    return F.cross_entropy(logits.float(), targets)


def chunked_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, chunk: int, columns: int = 0
) -> Tensor:
    """Return the mean cross entropy (float32 scalar) of x (N, C), given targets (N,).

    Logits are x times the first `columns` rows of weight (V, C), by default vocab_size; rows from
    vocab_size on are padding. They are computed `chunk` tokens at a time, so at most
    (chunk, columns) of them exist.
    """
    device = x.device.type
    dtype = x.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    settings = (vocab_size, columns or vocab_size, chunk, dtype, torch.is_grad_enabled())
    loss: Tensor = _ChunkedCrossEntropy.apply(x, weight, targets, settings)
    return loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Compute gradients with the loss, so (N, C) and (V, C) wait for backward, not (N, V)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        settings: tuple[int, int, int, torch.dtype, bool],
    ) -> Tensor:
        vocab_size, columns, chunk, dtype, with_gradients = settings
        N = len(x)
        sum_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        with torch.autocast(x.device.type, enabled=False):
            # With its padding: 50257 columns of 16 bits do not begin at multiples of 16 bytes, which
            # a GPU's tensor cores need.
            w = weight[:columns].to(dtype)  # (columns, C)
            total = torch.zeros((), dtype=sum_dtype, device=x.device)
            # Gradients of the sum, not of the mean: 16-bit gradients of single tokens are at most 1
            # here. 1/N follows in backward, in the precision of the sums.
            dx = torch.empty_like(x) if with_gradients else None
            dw = torch.zeros_like(weight) if with_gradients else None

            for start in range(0, N, chunk):
                x_chunk = x[start : start + chunk].to(dtype)  # (chunk, C)
                target = targets[start : start + chunk, None]  # (chunk, 1)

                # -log softmax of the target, with the largest logit subtracted against overflow.
                logits = (x_chunk @ w.T).to(sum_dtype)  # (chunk, columns)
                logits[:, vocab_size:] = -math.inf
                target_logit = logits.gather(1, target)  # (chunk, 1)
                largest = logits.amax(1, keepdim=True)  # (chunk, 1)
                target_logit = target_logit - largest
                exps = logits.sub_(largest).exp_()  # (chunk, columns), in place of the logits
                sums = exps.sum(1, keepdim=True)  # (chunk, 1)
                total += (sums.log() - target_logit).sum()
                if dx is None or dw is None:
                    continue

                # d loss / d logits = softmax - one_hot(target), in place of the exponentials.
                minus_one = exps.new_full((len(target), 1), -1.0)
                exps.div_(sums).scatter_add_(1, target, minus_one)
                d_logits = exps.to(dtype)  # (chunk, columns)
                dx[start : start + chunk] = d_logits @ w
                dw[:columns] += d_logits.T @ x_chunk

        if dx is not None and dw is not None:
            ctx.save_for_backward(dx, dw)
            ctx.tokens = N
        return total.to(torch.float32) / N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        dx, dw = ctx.saved_tensors
        # The loss' own gradient has the factors of a mean over micro batches, and of fp16.
        share = grads[0] / ctx.tokens
        return (dx * share).to(dx.dtype), dw * share, None, None

"""Attention of queries to one block of keys, forward and backward, for the ring of cp.py.

    scores  S = q·kᵀ / √D                         (B, H, T, S)
    sums    l = log Σ exp(S)                      (B, H, T), over this block's keys
    result  y = exp(S - l)·v                      (B, H, T, D)

Blocks are put together by their sums. With l of two blocks, L = log(exp(l₁) + exp(l₂)) is that of
both, and the result of both is exp(l₁ - L)·y₁ + exp(l₂ - L)·y₂. The backward of a block needs only
the L of all blocks, and g·y of the whole result y and its gradient g:

    P  = exp(S - L)              the block's part of the whole softmax
    dv = Pᵀ·g
    dS = P∘(g·vᵀ - Σ g∘y)
    dq = dS·k / √D               dk = dSᵀ·q / √D

So a forward keeps q, k, v, y and L, never a matrix of scores. `plain` computes these lines; `flash`
leaves them to torch's fused kernels, which take L and return l.

Sources: Milakov and Gimelshein 2018, Online normalizer calculation for softmax; Dao et al. 2022,
FlashAttention; Liu et al. 2023, Ring Attention.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoray.machine.compat import (
    CPU_ATTENTION,
    CPU_ATTENTION_BACKWARD,
    EFFICIENT_ATTENTION,
    EFFICIENT_ATTENTION_BACKWARD,
    FLASH_ATTENTION,
    FLASH_ATTENTION_BACKWARD,
)

# The tensors that the backward of torch's efficient attention computes: of q, k, v, and of a bias
_ALL_BUT_BIAS = (True, True, True, False)


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, kernel: str) -> tuple[Tensor, Tensor]:
    """Return y (B, H, T, D) and l (B, H, T), at least float32, of queries and one block of keys.

    causal: query t attends to the keys up to t, of as many keys; else to all.
    """
    if kernel == "flash" and _has_fused(q):
        return _fused_forward(q, k, v, causal)

    scores = _scores(q, k, causal)  # (B, H, T, S)
    sums = scores.logsumexp(-1)  # (B, H, T)
    weights = (scores - sums.unsqueeze(-1)).exp_()
    return (weights.to(v.dtype) @ v).to(sums.dtype), sums


def combine(y: Tensor, sums: Tensor, more: Tensor, more_sums: Tensor) -> tuple[Tensor, Tensor]:
    """Return result and sums of two blocks of keys, given those of each."""
    total = torch.logaddexp(sums, more_sums)  # (B, H, T)
    share = (sums - total).exp().unsqueeze(-1)
    more_share = (more_sums - total).exp().unsqueeze(-1)
    return y * share + more * more_share, total


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    sums: Tensor,
    causal: bool,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return one block's parts of dq (B, H, T, D), dk and dv (B, H, S, D), at least float32.

    `grad` and `y` are those of the whole result, in the dtype of q; `sums` are those of all keys.
    """
    if kernel == "flash" and _has_fused(q):
        gradients = _fused_backward(grad, q, k, v, y, sums, causal)
        dq, dk, dv = (gradient.to(sums.dtype) for gradient in gradients)
        return dq, dk, dv

    weights = (_scores(q, k, causal) - sums.unsqueeze(-1)).exp_()  # (B, H, T, S)
    d_weights = (grad @ v.transpose(-2, -1)).to(sums.dtype)
    dv = weights.to(grad.dtype).transpose(-2, -1) @ grad

    # Through the softmax: what all weights of a query have in common is taken away.
    common = (grad.to(sums.dtype) * y).sum(-1, keepdim=True)  # (B, H, T, 1)
    scale = q.shape[-1] ** -0.5
    d_scores = (weights * (d_weights - common) * scale).to(q.dtype)
    dq = d_scores @ k
    dk = d_scores.transpose(-2, -1) @ q
    return dq.to(sums.dtype), dk.to(sums.dtype), dv.to(sums.dtype)


def _scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """Return the scores (B, H, T, S), at least float32; of keys that are not seen -inf."""
    scaled = q * q.shape[-1] ** -0.5
    scores = scaled @ k.transpose(-2, -1)
    scores = scores.to(torch.promote_types(q.dtype, torch.float32))
    if not causal:
        return scores
    T = q.shape[2]
    later = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    # Not in place: activation checkpointing may have kept the product.
    return scores.masked_fill(later, -math.inf)


def _has_fused(q: Tensor) -> bool:
    """Return whether torch has a fused kernel for these queries. On a GPU it reads 8 numbers at a
    time."""
    return q.device.type == "cpu" or (q.shape[-1] % 8 == 0 and q.dtype != torch.float64)


def _fused_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Return the same by torch's kernel for this device and dtype."""
    if q.device.type == "cpu":
        y, sums = CPU_ATTENTION(q, k, v, 0.0, causal)
    elif q.dtype in (torch.bfloat16, torch.float16):
        y, sums, *_ = FLASH_ATTENTION(q, k, v, 0.0, causal)
    else:
        # The fused kernel for float32. It pads the number of queries.
        y, sums, *_ = EFFICIENT_ATTENTION(q, k, v, None, True, 0.0, causal)
        sums = sums[..., : q.shape[2]]
    return y.to(sums.dtype), sums


def _fused_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, sums: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv by torch's kernel for this device and dtype."""
    T = q.shape[2]
    S = k.shape[2]
    if q.device.type == "cpu":
        dq, dk, dv = CPU_ATTENTION_BACKWARD(grad, q, k, v, y, sums, 0.0, causal)
        return dq, dk, dv

    # Without dropout the kernels do not read the state of the generator.
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
    offset = torch.zeros((), dtype=torch.uint64, device=q.device)
    if q.dtype in (torch.bfloat16, torch.float16):
        lengths = (None, None, T, S)  # all sequences of a batch have the same
        dq, dk, dv = FLASH_ATTENTION_BACKWARD(
            grad, q, k, v, y, sums, *lengths, 0.0, causal, seed, offset
        )
        return dq, dk, dv
    # This kernel reads the sums in groups of 32 queries.
    padded = F.pad(sums, (0, -T % 32))
    dq, dk, dv, _ = EFFICIENT_ATTENTION_BACKWARD(
        grad, q, k, v, None, y, padded, seed, offset, 0.0, _ALL_BUT_BIAS, causal
    )
    return dq, dk, dv

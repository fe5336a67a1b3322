"""Other ways to compute parts of a GPT: the same mathematics, with other costs in time and memory.

    attention   flash   torch's fused kernel: no (T, S) matrix in memory
                cudnn   the same by cuDNN: torch has both on GPUs, and prefers one by the card and its own version
                plain   two batched products and a softmax: the matrix is kept for backward. On CPUs that multiply bf16
                        it is faster, because there torch's fused kernel spends most of its time in its backward
    loss        whole   all logits at once, (B·T, V) float32, twice
                chunked the logits of some tokens at a time; their gradients at once, in the forward, so that no logits
                        wait for the backward. As many products as the whole loss

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
    """How a GPT computes what has several ways: it fixes no parameter's shape."""

    attention: str = "flash"  # or cudnn, plain
    loss_chunk: int = 0  # tokens whose logits are there at a time; 0: all


def fused_attention(q: Tensor, k: Tensor, v: Tensor, p: float = 0.0, cudnn: bool = False) -> Tensor:
    """Return what `plain_attention` does, by one of torch's fused kernels, or by cuDNN's and no
    other one.

    Raises RuntimeError if cuDNN has no kernel for these shapes on this device.
    """
    T, S = q.shape[2], k.shape[2]
    # is_causal aligns query 0 with key 0, which is right for T = S. One query sees all keys; else
    # pass a mask.
    mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T) if 1 < T < S else None
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if cudnn else nullcontext():
        return F.scaled_dot_product_attention(q, k, v, mask, p, T == S)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, p: float = 0.0) -> Tensor:
    """Return causal attention (B, H, T, D) of queries (B, H, T, D) to keys and values (B, H, S, D).

    The last query sees all keys. `p` is the probability with which a weight is left out.
    """
    T, S = q.shape[2], k.shape[2]
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)  # (B, H, T, S); scaling q is less work
    if T > 1:
        later = torch.ones(T, S, dtype=torch.bool, device=q.device).triu(S - T + 1)
        scores = scores + torch.zeros(T, S, dtype=scores.dtype, device=q.device).masked_fill_(
            later, -math.inf
        )
    # The softmax of 16-bit scores has float32 sums by itself
    with torch.autocast(q.device.type, enabled=False):
        weights = scores.softmax(-1)
    if p > 0:
        weights = dropout(weights, p)
    return weights.to(v.dtype) @ v


def rotate(x: Tensor, start: int = 0) -> Tensor:
    """Turn queries or keys x (B, H, T, D) by their positions start, start + 1, ... (Su et al. 2021,
    RoFormer).

    Number d of a head and number d + D/2 are one pair; pair i turns by position · 10000^(-2i/D)
    radians. So the product of a query and a key depends on how far apart they are.
    """
    T, D = x.shape[-2:]
    # Positions and angles stay float32: a bf16 position is wrong from 257 on.
    # (D/2,)
    speed = ROTARY_BASE ** (-torch.arange(0, D, 2, dtype=torch.float32, device=x.device) / D)
    # (T, D/2)
    angle = torch.outer(torch.arange(start, start + T, dtype=torch.float32, device=x.device), speed)
    cos, sin = angle.cos(), angle.sin()
    # (T, D)
    same, crossed = torch.cat([cos, cos], -1).to(x.dtype), torch.cat([-sin, sin], -1).to(x.dtype)
    return torch.addcmul(x * same, x.roll(D // 2, -1), crossed)


def chunked_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, chunk: int
) -> Tensor:
    """Return the mean cross entropy (float32 scalar) of x (N, C), given targets (N,), `chunk`
    tokens at a time.

    Logits are x times the first vocab_size rows of weight (V, C); no more of them exist than
    (chunk, vocab_size).
    """
    device = x.device.type
    kind = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    loss: Tensor = _ChunkedCrossEntropy.apply(
        x, weight, targets, (vocab_size, chunk, kind, torch.is_grad_enabled())
    )
    return loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Gradients are computed with the loss. They wait for the backward in (N, C) and (V, C), and
    not in (N, V).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        how: tuple[int, int, torch.dtype, bool],
    ) -> Tensor:
        vocab_size, chunk, kind, with_gradients = how
        N = len(x)
        with torch.autocast(x.device.type, enabled=False):
            w = weight[:vocab_size].to(kind)  # (V, C)
            # 16-bit gradients of single tokens are at most 1 here; 1/N comes in later, in the
            # precision of the sums.
            dx = torch.empty_like(x) if with_gradients else None
            dw = torch.zeros_like(weight) if with_gradients else None
            total = torch.zeros(
                (), dtype=torch.float64 if kind == torch.float64 else torch.float32, device=x.device
            )
            for part, own, out in _chunks(x, targets, dx, chunk):
                inputs = part.to(kind)
                logits = (inputs @ w.T).to(total.dtype)  # (chunk, V)
                picked = logits.gather(1, own[:, None])
                largest = logits.amax(1, keepdim=True)
                picked = picked - largest
                exps = logits.sub_(largest).exp_()
                sums = exps.sum(1, keepdim=True)
                total += (sums.log() - picked).sum()
                if out is None or dw is None:
                    continue
                exps.div_(sums).scatter_add_(1, own[:, None], exps.new_full((len(own), 1), -1.0))
                d = exps.to(kind)  # of the loss over the logits, times N
                out.copy_(d @ w)
                dw[:vocab_size] += d.T @ inputs
        if dx is not None and dw is not None:
            ctx.save_for_backward(dx, dw)
            ctx.tokens = N
        return total.to(torch.float32) / N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        dx, dw = ctx.saved_tensors
        share = grads[0] / ctx.tokens
        return (dx * share).to(dx.dtype), dw * share, None, None


def _chunks(
    x: Tensor, targets: Tensor, dx: Tensor | None, chunk: int
) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    outs = [None] * -(-len(x) // chunk) if dx is None else dx.split(chunk)
    return [*zip(x.split(chunk), targets.split(chunk), outs, strict=True)]

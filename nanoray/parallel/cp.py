"""Context parallelism by hand: each rank of an axis has some positions of every sequence.

Norms, MLPs and the loss work on single positions, so a rank does its own and needs no other. Only
attention mixes positions: a query needs the keys and values of all earlier ones. With cp = 3 a
sequence is six chunks, of which rank c has c and 5-c (data/sequence_part.py):

    queries of     keys of chunk
                   0  1  2  3  4  5
    rank 0   0     ◣                        ◣ causal: keys up to the query's own position
             5     █  █  █  █  █  ◣         █ all keys of the chunk are earlier
    rank 1   1     █  ◣                     (blank) none is
             4     █  █  █  █  ◣
    rank 2   2     █  █  ◣                  Each rank has as many █ and ◣ as any other.
             3     █  █  █  ◣

The ring: blocks of keys and values pass from rank to rank. While a rank computes with one, the next
is on its way. What each rank has in each pass, and which part of its work that is:

    pass           0                     1                      2
    rank 0         kv 0 5                kv 2 3                 kv 1 4
    rank 1         kv 1 4                kv 0 5                 kv 2 3
    rank 2         kv 2 3                kv 1 4                 kv 0 5
                   own block: causal     rank j's, j < c: all own queries, the early half of the keys
                                         rank j's, j > c: the late half of the queries, all keys

    forward    a running softmax puts the results of the blocks together (cp_blocks.py)
    backward   a second ring: dk and dv follow their block, and each rank adds its part; after the
               last pass they are at home. Only q, k, v, the result and the sums of the own positions
               are kept, so the keys travel again

    bytes that a rank sends, of B sequences of T positions, per layer: (cp-1) · 2·B·T/cp·C numbers in
    forward; in backward as many again, and cp · 2·B·T/cp·C of float32

Weights are equal on all ranks of the axis, and each computes a part of their gradient: the sum over
data replicas is one over parts of sequences as well, so every dp_mode shares weights over both.
Every rank's loss is the mean over as many tokens, so the mean of these means is that of all tokens.

Learned and rotary positions are those of the whole sequence. There is no dropout: to draw the masks of
one process, a rank would need those of whole sequences.

Source: Liu et al. 2023, Ring Attention; Brandon et al. 2023, Striped Attention, and the zigzag order
of Llama 3 (2024) for the balance; the running softmax in cp_blocks.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nanoray.data.sequence_part import SequencePart
from nanoray.models.gpt import GPT, Attention, KVCache, Positions
from nanoray.models.kernels import rotate
from nanoray.parallel import cp_blocks
from nanoray.parallel.axis import Axis
from nanoray.parallel.tp import CutPositions, SplitAttention

FORWARD = "keys_values"  # what travels, as a trace calls it
BACKWARD = "keys_values_grad"


def part_of(axis: Axis) -> SequencePart | None:
    """Return which part of every sequence this rank has; None: all of it."""
    if axis.size == 1:
        return None
    return SequencePart(axis.index, axis.size)


def cut(model: nn.Module, axis: Axis) -> None:
    """Let a GPT work on this rank's part of sequences, in place. Nothing is sent.

    Parameters stay as they are. A model that another group of ranks has cut so gets this axis. The
    cut over tp comes first.
    """
    assert isinstance(model, GPT), "the table of conflicts refuses other models"
    part = part_of(axis)
    assert part is not None
    for module in model.modules():
        kind = _KINDS.get(type(module))
        if kind is not None:
            module.__class__ = kind
        if isinstance(module, ContextAttention):
            module.context = axis
        if isinstance(module, ContextAttention | ContextPositions):
            module.part = part


def release(model: nn.Module) -> None:
    """Forget the axis of a group of ranks that is left; the next group cuts the model again."""
    for module in model.modules():
        if isinstance(module, ContextAttention):
            module.context = None


# The layers. Each was one of models/gpt.py, or of a model that tp has cut; none has parameters of its
# own.


class ContextAttention(Attention):
    """Attention of own queries to the keys of all positions."""

    context: Axis | None
    part: SequencePart

    def heads(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        """Return the heads' results for own positions x (B, T/cp, C), as Attention does."""
        assert cache is None, "text is sampled with a whole model"
        assert self.context is not None, "the group of ranks was left"
        qkv = self.qkv(x)  # (B, T/cp, 3C)
        B, T, _ = qkv.shape
        q, k, v = (
            each.view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, H, T/cp, D)
            for each in qkv.chunk(3, -1)
        )
        if self.rotary:
            q = rotate_own(q, self.part)
            k = rotate_own(k, self.part)

        y = ring_attention(q, k, v, self.context, self.kernel)  # (B, H, T/cp, D)
        return y.transpose(1, 2).flatten(2)  # (B, T/cp, C)


class SplitContextAttention(SplitAttention, ContextAttention):
    """The same over this rank's heads, where tp has cut them as well."""


class ContextPositions(Positions):
    """The learned positions of the rank's part of a sequence."""

    part: SequencePart

    def forward(self, start: int, end: int) -> Tensor:  # type: ignore[override]
        """Return the vectors (T/cp, C) of the own positions, of which there are end - start."""
        whole = self.weight[: (end - start) * self.part.ranks]  # (T, C)
        return self.part.own(whole, 0)


class CutContextPositions(ContextPositions):
    """The same, where the ranks of tp share the own positions."""

    axis: Axis

    def forward(self, start: int, end: int) -> Tensor:  # type: ignore[override]
        own = super().forward(start, end)  # (T/cp, C)
        return own.chunk(self.axis.size)[self.axis.index]  # (T/cp/tp, C)


_KINDS = {
    Attention: ContextAttention,
    SplitAttention: SplitContextAttention,
    Positions: ContextPositions,
    CutPositions: CutContextPositions,
}


def rotate_own(x: Tensor, part: SequencePart) -> Tensor:
    """Rotate queries or keys x (B, H, T/cp, D) by their positions in the whole sequence."""
    size = x.shape[2] // 2
    early, late = part.chunks
    return torch.cat([rotate(x[:, :, :size], early * size), rotate(x[:, :, size:], late * size)], 2)


# The ring.


class _Work(NamedTuple):
    """What a rank computes with one block: some of its queries, some of the block's keys."""

    queries: slice
    keys: slice
    causal: bool


def work_with(own: int, other: int, positions: int) -> _Work:
    """Return which part of the own queries attends to which part of the block of rank `other`.

    Both have `positions`, an early and a late chunk.
    """
    half = positions // 2
    everything = slice(0, positions)
    if other == own:  # the order within a rank is that of the sequence
        return _Work(everything, everything, causal=True)
    if other < own:  # its early chunk is before both of ours, its late one after both
        return _Work(everything, slice(0, half), causal=False)
    # Both of its chunks are between ours.
    return _Work(slice(half, positions), everything, causal=False)


@torch.compiler.disable
def ring_attention(q: Tensor, k: Tensor, v: Tensor, axis: Axis, kernel: str = "plain") -> Tensor:
    """Return causal attention of own queries (B, H, T/cp, D) to the keys and values of all ranks.

    (all ranks of the axis)
    """
    result: Tensor = _Ring.apply(q, k, v, axis, kernel)
    return result


class _Ring(torch.autograd.Function):
    """Blocks of keys and values pass from rank to rank, in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, axis: Axis, kernel: str) -> Tensor:
        # Autocast has chosen the type of q, k and v; sums are of float32 at least.
        with torch.autocast(q.device.type, enabled=False):
            own_block = torch.stack([k, v])  # (2, B, H, T/cp, D)
            y, sums = _ring_forward(q, own_block, axis, kernel)
            y = y.to(q.dtype)
        # Views of what the projection returned: a kept block would be a second copy.
        ctx.save_for_backward(q, k, v, y, sums)
        ctx.axis = axis
        ctx.kernel = kernel
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, y, sums = ctx.saved_tensors
        own_block = torch.stack([k, v])  # (2, B, H, T/cp, D)
        with torch.autocast(q.device.type, enabled=False):
            result = _Result(grads[0].to(q.dtype), y, sums)
            dq, d_block = _ring_backward(q, own_block, result, ctx.axis, ctx.kernel)
            dk, dv = d_block.to(q.dtype)
        return dq.to(q.dtype), dk, dv, None, None


def _ring_forward(q: Tensor, block: Tensor, axis: Axis, kernel: str) -> tuple[Tensor, Tensor]:
    """Return result (B, H, T/cp, D) and sums (B, H, T/cp) over the keys of all ranks."""
    y = torch.empty(0)
    sums = torch.empty(0)
    for turn in range(axis.size):
        # The next block is on its way while this one's scores are computed.
        next_block = _start_next(block, axis, turn)
        other = (axis.index - turn) % axis.size
        work = work_with(axis.index, other, q.shape[2])
        k, v = block[:, :, :, work.keys]
        more, more_sums = cp_blocks.forward(q[:, :, work.queries], k, v, work.causal, kernel)

        # The first block is the own one: all queries have a result from it. Copies, because
        # activation checkpointing may have kept what a kernel returned. In memory the heads of a
        # position are side by side, so that the next layer's input is no copy of the result.
        if turn == 0:
            by_position = more.transpose(1, 2).clone(memory_format=torch.contiguous_format)
            y = by_position.transpose(1, 2)
            sums = more_sums.clone()
        else:
            rows = work.queries
            y[:, :, rows], sums[:, :, rows] = cp_blocks.combine(
                y[:, :, rows], sums[:, :, rows], more, more_sums
            )
        if next_block is not None:
            block = next_block()
    return y, sums


class _Result(NamedTuple):
    """The result of a forward, with its gradient."""

    grad: Tensor  # (B, H, T/cp, D)
    y: Tensor  # (B, H, T/cp, D)
    sums: Tensor  # (B, H, T/cp)


def _ring_backward(
    q: Tensor, block: Tensor, result: _Result, axis: Axis, kernel: str
) -> tuple[Tensor, Tensor]:
    """Return dq of own queries, and dk and dv of the own block, (2, B, H, T/cp, D)."""
    dq = torch.zeros_like(q, dtype=result.sums.dtype)
    arriving = None
    for turn in range(axis.size):
        next_block = _start_next(block, axis, turn)
        other = (axis.index - turn) % axis.size
        work = work_with(axis.index, other, q.shape[2])
        rows = work.queries
        k, v = block[:, :, :, work.keys]
        d_queries, d_keys, d_values = cp_blocks.backward(
            result.grad[:, :, rows],
            q[:, :, rows],
            k,
            v,
            result.y[:, :, rows],
            result.sums[:, :, rows],
            work.causal,
            kernel,
        )
        dq[:, :, rows] += d_queries

        # dk and dv of this block come from the rank before, which has computed with it before.
        if arriving is None:
            total = torch.stack([d_keys, d_values])  # of the own block: all keys
        else:
            total = arriving()
            total[0, :, :, work.keys] += d_keys
            total[1, :, :, work.keys] += d_values
        # They follow the block, one pass behind, beside the next computation.
        arriving = axis.start_pass_on(total, 1, BACKWARD)
        if next_block is not None:
            block = next_block()

    # The last pass brings those of the own block home.
    assert arriving is not None
    return dq, arriving()


def _start_next(block: Tensor, axis: Axis, turn: int) -> Any:
    """Start to pass a block on; return the wait for the next one, None in the last turn."""
    if turn == axis.size - 1:
        return None
    return axis.start_pass_on(block, 1, FORWARD)

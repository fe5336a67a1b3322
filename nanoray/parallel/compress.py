"""Compressed gradients: what data-parallel ranks send of a bucket in place of its float32 sum.

    bf16, fp16   rank i ─► each other rank j: slice j in 16 bits ─► j adds in float32, sends the sum in 16 bits to all
    int8         the same exchange; a block of 1024 numbers is 1024 × 8 bits and one float32 scale
    powersgd     P = sum of M·Q ─► orthonormal P ─► Q = sum of Mᵀ·P ─► every rank computes P·Qᵀ; vectors go along whole

Gradients are divided by the number of ranks before anything is rounded, so no sum can exceed what
one rank may hold: summed first, n values of 65504 / 2 would overflow fp16. 8-bit numbers are never
added: a rank adds what it has decoded in float32, in the order of the ranks, and rounds the sum
once more for the way back. All ranks decode the same bytes, its sender too, so all end with the
same bits.

**Error feedback** (int8, powersgd): what a rank could not send is added to its next gradient, so
the running sum of what is sent follows that of the true gradients. The owner of a slice keeps there
what the second rounding lost: its own share never travels, and so has no error of its own. This
memory belongs to the state of a run, as the next Q does, and changes with the weights only: a step
that breaks, or is left out, is repeated from the memory that it began with.

Source: Seide et al. 2014 (error feedback); Vogels, Karimireddy and Jaggi 2019, PowerSGD, algorithms
1 and 2; Tang et al. 2021, 1-bit Adam (two roundings, both with feedback).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nanoray.config import Config
from nanoray.mesh.axis import Axis

# Numbers that share a scale: 0.4 % more bytes, and one outlier costs no more than its block
BLOCK = 1024
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SPANNED = 1e-5  # of a column's length: less is left over by rounding when those before it span it
_TINY = torch.finfo(torch.float32).tiny


class Sent(NamedTuple):
    """One bucket on its way: its gradients, (m,), and where those of each parameter begin in it."""

    flat: Tensor
    params: Sequence[Tensor]
    starts: Sequence[int]
    bucket: int
    last: bool  # of a backward pass


class Compressor:
    """Sums the buckets of one group of ranks, and keeps what this rank could not send yet."""

    def __init__(
        self,
        model: nn.Module,
        axis: Axis,
        config: Config,
        scale: Callable[[Tensor], Tensor] = lambda loss: loss,
    ) -> None:
        """Begin with an empty memory. (all ranks of the axis) `scale` multiplies a loss by fp16's
        loss scale.

        The memory is in units of gradients without that scale, which may change from step to step.
        """
        self._axis, self.kind = axis, config.grad_compress
        self.bucket_names: dict[int, list[str]] = {}
        self._flight: deque[Iterator[None]] = deque()
        # Of the memory, by the step in progress: place, new value
        self._changes: list[tuple[Tensor, Tensor]] = []
        trained: dict[Tensor, str] = {
            p: name for name, p in model.named_parameters() if p.requires_grad
        }
        self._names = trained
        device = next(iter(trained)).device
        one = torch.ones((), device=device)
        self._scale = None if scale(one) is one else lambda: scale(one)
        low = {p: rank for p in trained if (rank := _rank_of(p, config.powersgd_rank))}
        low = low if self.kind == "powersgd" else {}
        # What goes whole leaves nothing over
        rounded = [*low] if low else [*trained] if self.kind == "int8" else []
        sizes = [p.numel() for p in rounded] + [
            p.numel() // p.shape[0] * rank for p, rank in low.items()
        ]
        self.memory: Tensor | None = torch.empty(sum(sizes), device=device) if sizes else None
        parts = iter(self.memory.split(sizes) if self.memory is not None else ())
        self._error = {p: next(parts) for p in rounded}
        self._q = {p: next(parts).view(-1, rank) for p, rank in low.items()}
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget what was left over. Each Q begins with the same numbers on all ranks: from zeros
        it would not move.
        """
        if self.memory is not None:
            self.memory.zero_()
        draws = torch.Generator().manual_seed(0)
        for q in self._q.values():
            q.copy_(torch.randn(q.shape, generator=draws))

    def send(self, sent: Sent) -> None:
        """Start to sum a bucket over the ranks; its gradients are divided by their number. (all
        ranks, in one order)

        Earlier buckets take their next step meanwhile, so that all ranks start all collectives in
        the same order.
        """
        if sent.bucket == 0:  # DDP lays its buckets out anew after the first backward
            self.bucket_names.clear()
        self.bucket_names[sent.bucket] = [self._names[p] for p in sent.params]
        flow = self._low_rank(sent) if self.kind == "powersgd" else self._rounded(sent)
        next(flow)
        self._advance()
        self._flight.append(flow)

    def drain(self) -> None:
        """Wait until every bucket has arrived, and is the sum. (all ranks)"""
        while self._flight:
            self._advance()

    def _advance(self) -> None:
        for flow in [*self._flight]:
            if next(flow, "done") == "done":
                self._flight.remove(flow)

    def commit(self, left_out: Tensor | None) -> None:
        """Keep what this step's buckets left over, unless the update was `left_out`: 1 on the
        device, or None.
        """
        for place, new in self._changes:
            place.copy_(new if left_out is None else torch.where(left_out > 0, place, new))
        self.drop()

    def drop(self) -> None:
        """Forget a step that changed nothing: a warm-up, a rollback."""
        self._changes.clear()
        self._flight.clear()

    def _loaded(self, sent: Sent, size: int) -> Tensor:
        """Return a bucket's gradients in float32 with what earlier steps could not send, (size,),
        padded with zeros.
        """
        work = torch.zeros(size, device=sent.flat.device)
        work[: sent.flat.numel()] = sent.flat
        scale = self._scale() if self._scale and self._error else None
        for p, at in zip(sent.params, sent.starts, strict=True):
            if p in self._error:
                error = self._error[p]
                work[at : at + p.numel()] += error if scale is None else error * scale
        return work

    def _keep(self, sent: Sent, left: Tensor) -> None:
        """Note what a bucket leaves over; it becomes the memory with the update."""
        left = left / self._scale() if self._scale else left
        for p, at in zip(sent.params, sent.starts, strict=True):
            if p in self._error:
                self._changes.append((self._error[p], left[at : at + p.numel()]))

    def _rounded(self, sent: Sent) -> Iterator[None]:
        """Sum a bucket in two exchanges of rounded numbers: slices to their owners, sums to all."""
        n, own, m = self._axis.size, self._axis.index, sent.flat.numel()
        encode, decode = (_to_int8, _from_int8) if self.kind == "int8" else _codec(TYPES[self.kind])
        share = -(-m // (n * BLOCK)) * BLOCK
        work = self._loaded(sent, n * share).view(n, share)  # row i goes to rank i
        rows = encode(work)  # (n, bytes)
        arrived = self._axis.start_exchange(rows.view(-1), "gradients", sent.bucket, sent.last)
        left = work - decode(rows) if self._error else work
        yield
        got = decode(arrived().view(n, -1))
        got[own] = work[own]
        total = got[0]
        for other in got[1:]:
            total = total + other
        rows[own] = encode(total.unsqueeze(0))[0]
        gathered = self._axis.start_all_gather(rows.view(-1), "gradients", sent.bucket)
        if self._error:
            left[own] = total - decode(rows[own : own + 1])[0]
            self._keep(sent, left.view(-1))
        yield
        gathered()
        sent.flat.copy_(decode(rows).view(-1)[:m])

    def _low_rank(self, sent: Sent) -> Iterator[None]:
        """Sum a bucket's matrices as products P·Qᵀ of rank r, and its other parameters as they are."""
        work = self._loaded(sent, sent.flat.numel())
        spans = {
            p: slice(at, at + p.numel()) for p, at in zip(sent.params, sent.starts, strict=True)
        }
        matrices = {p: work[spans[p]].view(p.shape[0], -1) for p in sent.params if p in self._q}
        whole = [work[spans[p]] for p in sent.params if p not in self._q]
        ps = [m @ self._q[p] for p, m in matrices.items()]
        flat = torch.cat([part.reshape(-1) for part in (*ps, *whole)])
        arrived = self._axis.start_sum(flat, "gradients", sent.bucket, sent.last)
        yield
        arrived()
        parts = iter(flat.split([part.numel() for part in (*ps, *whole)]))
        ps = [orthonormal(next(parts).view_as(p)) for p in ps]
        for kept, summed in zip(whole, parts, strict=True):
            kept.copy_(summed)
        qs = [m.mT @ p for m, p in zip(matrices.values(), ps, strict=True)]
        left = torch.zeros_like(work)
        for (param, m), p, q in zip(matrices.items(), ps, qs, strict=True):
            left[spans[param]] = (m - p @ q.mT).view(-1)
        self._keep(sent, left)
        flat = torch.cat([q.reshape(-1) for q in qs]) if qs else flat[:0]
        arrived = self._axis.start_sum(flat, "gradients", sent.bucket) if qs else lambda: None
        yield
        arrived()
        for param, p, q in zip(matrices, ps, flat.split([q.numel() for q in qs]), strict=True):
            q = q.view_as(self._q[param])
            work[spans[param]] = (p @ q.mT).view(-1)
            # A column without a length would stay without one; its old direction may serve later
            size = q.norm(dim=0)
            self._changes.append((self._q[param], torch.where(size > 0, q / size, self._q[param])))
        sent.flat.copy_(work)


def _rank_of(p: Tensor, rank: int) -> int:
    """Return the rank of a parameter's products, 0 where it goes whole: a vector, or a matrix of no
    more numbers.
    """
    if p.dim() < 2:
        return 0
    a, b = p.shape[0], p.numel() // p.shape[0]
    return rank if (a + b) * rank < a * b else 0


def orthonormal(p: Tensor) -> Tensor:
    """Return (a, r) with orthonormal columns that span those of `p`: Gram and Schmidt, each column
    twice.

    A column that those before it span becomes zero: what rounding leaves of it would point
    anywhere. Without a wait for the device. Numbers that are not finite stay so.
    """
    done = torch.zeros_like(p)
    for j in range(p.shape[1]):
        column = p[:, j]
        size = column.norm()
        for _ in range(2):  # once leaves the rounding errors of a long projection
            column = column - done[:, :j] @ (done[:, :j].mT @ column)
        rest = column.norm()
        done[:, j] = torch.where(
            (rest <= SPANNED * size) & torch.isfinite(size), 0.0, column / rest
        )
    return done


def _codec(kind: torch.dtype) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Return the functions from float32, (n, s), to the bytes of a type of 16 bits, (n, 2s), and
    back.
    """
    return lambda x: x.to(kind).view(torch.uint8), lambda rows: rows.view(kind).float()


def _to_int8(x: Tensor) -> Tensor:
    """Return float32 numbers, (n, s), as bytes, (n, 4b + s): the scales of the b blocks of each
    row, then its numbers.

    A number that is not finite makes its block's scale so, and all of the block when it is decoded.
    """
    blocks = x.view(x.shape[0], -1, BLOCK)
    scale = (blocks.abs().amax(-1, keepdim=True) / 127).clamp_min(_TINY)  # (n, b, 1)
    numbers = (blocks / scale).round().to(torch.int8)
    return torch.cat(
        [part.reshape(x.shape[0], -1).view(torch.uint8) for part in (scale, numbers)], dim=1
    )


def _from_int8(rows: Tensor) -> Tensor:
    """Return what `_to_int8` took, (n, s), rounded."""
    b = rows.shape[1] // (BLOCK + 4)
    scale = rows[:, : 4 * b].contiguous().view(torch.float32)  # (n, b)
    numbers = rows[:, 4 * b :].contiguous().view(torch.int8).view(len(rows), b, BLOCK)
    return (numbers.float() * scale.unsqueeze(-1)).view(len(rows), -1)

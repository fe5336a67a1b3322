"""Compressed gradients: what data-parallel ranks send of a bucket in place of its float32 sum.

    bf16, fp16   rank i ─► each other rank j: slice j in 16 bits ─► j adds in float32, sends the sum in 16 bits to all
    int8         the same exchange; a block of 1024 numbers is 1024 × 8 bits and one float32 scale
    powersgd     P = sum of M·Q ─► orthonormal P ─► Q = sum of Mᵀ·P ─► every rank computes P·Qᵀ; vectors go along whole

Gradients are divided by the number of ranks before anything is rounded, so no sum can exceed what
one rank may hold: summed first, n values of 65504 / 2 would overflow fp16. 8-bit numbers are never
added: a rank adds what it has decoded in float32, in the order of the ranks, and rounds the sum
once more for the way back. All ranks decode the same bytes, the sender too, so all end with the
same bits.

**Error feedback** (int8, powersgd): the rounding error of a gradient is added to the next one, so
the running sum of what is sent follows that of the true gradients. The owner of a slice keeps the
error of the second rounding there: its own share never travels, and so has no error. This memory
belongs to the state of a run, as the next Q does, and changes with the weights only: a step that
breaks, or is left out, is repeated from the memory that it began with.

Source: Seide et al. 2014 (error feedback); Vogels, Karimireddy and Jaggi 2019, PowerSGD, algorithms
1 and 2; Tang et al. 2021, 1-bit Adam (two roundings, both with feedback).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nanoray.config import Config
from nanoray.mesh.axis import Axis
from nanoray.parallel.hooks import StepHook

# Numbers that share a scale: 0.4 % more bytes, and one outlier costs no more than its block
BLOCK = 1024
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SPANNED = 1e-5  # of a column's length: less is a rounding error when earlier columns span it
_TINY = torch.finfo(torch.float32).tiny


class SendingBucket(NamedTuple):
    """One bucket on its way: its gradients, (m,), and where those of each parameter begin in it."""

    flat: Tensor
    params: Sequence[Tensor]
    starts: Sequence[int]
    bucket: int
    last: bool  # of a backward pass


class Compressor(StepHook):
    """Sums the buckets of one group of ranks, and keeps the rounding errors of this rank."""

    def __init__(
        self,
        model: nn.Module,
        axis: Axis,
        config: Config,
        scale: Callable[[Tensor], Tensor] = lambda loss: loss,
    ) -> None:
        """Start with an empty memory. (all ranks of the axis)

        `scale` multiplies a loss by fp16's loss scale. The memory is in units of gradients without
        that scale, which may change from step to step.
        """
        self._axis = axis
        self.kind = config.grad_compress
        self.bucket_names: dict[int, list[str]] = {}
        self._flight: deque[Iterator[None]] = deque()
        # The new values of the step in progress: the parameter, the place in the memory, the value
        self._changes: list[tuple[Tensor, Tensor, Tensor]] = []

        self._names: dict[Tensor, str] = {}
        for name, param in model.named_parameters():
            if param.requires_grad:
                self._names[param] = name
        device = next(iter(self._names)).device
        one = torch.ones((), dtype=torch.float32, device=device)
        self._scale = None if scale(one) is one else lambda: scale(one)
        # A factor that the gradients of this step still have (weighted_flow.py); None: 1
        self.unit: Tensor | None = None

        # Which parameters leave an error: with int8 all, with powersgd the matrices of low rank. In
        # 16 bits a gradient is rounded once and its error is forgotten.
        ranks: dict[Tensor, int] = {}
        rounded: list[Tensor] = []
        if self.kind == "int8":
            rounded = list(self._names)
        elif self.kind == "powersgd":
            for p in self._names:
                rank = _rank_of(p, config.powersgd_rank)
                if rank > 0:
                    ranks[p] = rank
            # Where no matrix is worth it, all parameters go whole.
            rounded = list(ranks)

        # One flat tensor holds all errors, then all Q: so a checkpoint has one tensor per rank.
        sizes = [p.numel() for p in rounded]
        for p, rank in ranks.items():
            sizes.append(p.numel() // p.shape[0] * rank)
        self.memory: Tensor | None = None
        if sizes:
            self.memory = torch.empty(sum(sizes), dtype=torch.float32, device=device)
        parts = iter(() if self.memory is None else self.memory.split(sizes))
        self._error = {p: next(parts) for p in rounded}
        self._q = {p: next(parts).view(-1, rank) for p, rank in ranks.items()}
        self.begin_anew()

    def begin_anew(self) -> None:
        """Reset the memory: no errors, and each Q with the same random numbers on all ranks.

        A Q of zeros would stay zero.
        """
        if self.memory is not None:
            self.memory.zero_()
        draws = torch.Generator().manual_seed(0)
        for q in self._q.values():
            q.copy_(torch.randn(q.shape, dtype=torch.float32, generator=draws))

    def send(self, sent: SendingBucket) -> None:
        """Start to sum a bucket over the ranks; its gradients are divided by their number. (all
        ranks, in one order)

        Earlier buckets take their next step meanwhile, so that all ranks start all collectives in
        the same order.
        """
        if sent.bucket == 0:  # DDP lays its buckets out anew after the first backward
            self.bucket_names.clear()
        self.bucket_names[sent.bucket] = [self._names[p] for p in sent.params]

        # A flow is a generator: it starts an exchange and yields, and is resumed to wait for it.
        flow = self._low_rank(sent) if self.kind == "powersgd" else self._rounded(sent)
        next(flow)
        self._advance()
        self._flight.append(flow)

    def drain(self) -> None:
        """Wait until every bucket has arrived, and is the sum. (all ranks)"""
        while self._flight:
            self._advance()

    def _advance(self) -> None:
        """Let each bucket in flight go on to its next exchange."""
        for flow in list(self._flight):
            if next(flow, "done") == "done":
                self._flight.remove(flow)

    def commit(self, left_out: Tensor | None = None) -> None:
        """Keep the errors of this step's buckets, unless the update was left out.

        left_out: 1 on the device then. The device decides, so the host does not wait.
        """
        for _, place, new in self._changes:
            place.copy_(new if left_out is None else torch.where(left_out > 0, place, new))
        self.drop()

    def leave_out(self, absent: Collection[str]) -> None:
        """Keep the old errors of these parameters: no rank has computed a gradient of them.

        What was sent of their errors is left out of the update, as if it had not been sent.
        """
        kept = []
        for param, place, new in self._changes:
            if self._names[param] not in absent:
                kept.append((param, place, new))
        self._changes = kept

    def drop(self) -> None:
        """Forget a step that changed nothing: a warm-up, a rollback."""
        self._changes.clear()
        self._flight.clear()

    def _loaded(self, sent: SendingBucket, size: int) -> Tensor:
        """Return a bucket's gradients plus the errors of earlier steps, (size,), in float32.

        Padded with zeros.
        """
        work = torch.zeros(size, dtype=torch.float32, device=sent.flat.device)
        work[: sent.flat.numel()] = sent.flat
        scale = self._factor() if self._error else None
        for p, start in zip(sent.params, sent.starts, strict=True):
            if p in self._error:
                error = self._error[p]
                work[start : start + p.numel()] += error if scale is None else error * scale
        return work

    def _factor(self) -> Tensor | None:
        """Return the factor between the memory and the gradients in memory; None for 1."""
        scale = self._scale() if self._scale else None
        if self.unit is None:
            return scale
        return self.unit if scale is None else self.unit * scale

    def _keep(self, sent: SendingBucket, left: Tensor) -> None:
        """Note the errors of a bucket, (size,); they enter the memory with the update."""
        factor = self._factor()
        if factor is not None:
            left = left / factor
        for p, start in zip(sent.params, sent.starts, strict=True):
            if p in self._error:
                self._changes.append((p, self._error[p], left[start : start + p.numel()]))

    def _rounded(self, sent: SendingBucket) -> Iterator[None]:
        """Sum a bucket in two exchanges of rounded numbers. Each `yield` is a wait for one."""
        n = self._axis.size
        own = self._axis.index
        m = sent.flat.numel()
        encode, decode = _codec(self.kind)

        # Send slice i to rank i. Whole blocks only, so each slice has its own scales.
        share = -(-m // (n * BLOCK)) * BLOCK
        work = self._loaded(sent, n * share).view(n, share)  # row i goes to rank i
        rows = encode(work)  # (n, bytes)
        arrived = self._axis.start_exchange(rows.view(-1), "gradients", sent.bucket, sent.last)
        left = work - decode(rows) if self._error else work
        yield

        # Add the slices of all ranks, in their order. The own one is not rounded: it has not
        # travelled.
        slices = decode(arrived().view(n, -1))  # (n, share)
        slices[own] = work[own]
        total = slices[0]
        for other in slices[1:]:
            total = total + other

        # Send the sum to all, rounded once more; this rank keeps the error of that, too.
        rows[own] = encode(total.unsqueeze(0))[0]
        gathered = self._axis.start_all_gather(rows.view(-1), "gradients", sent.bucket)
        if self._error:
            left[own] = total - decode(rows[own : own + 1])[0]
            self._keep(sent, left.view(-1))
        yield

        gathered()
        sent.flat.copy_(decode(rows).view(-1)[:m])

    def _low_rank(self, sent: SendingBucket) -> Iterator[None]:
        """Sum a bucket's matrices as products P·Qᵀ of rank r, and its other parameters as they are.

        Each `yield` is a wait for an exchange.
        """
        work = self._loaded(sent, sent.flat.numel())
        spans = {
            p: slice(start, start + p.numel())
            for p, start in zip(sent.params, sent.starts, strict=True)
        }
        matrices: dict[Tensor, Tensor] = {}  # (a, b), as views of `work`
        whole: list[Tensor] = []
        for p in sent.params:
            if p in self._q:
                matrices[p] = work[spans[p]].view(p.shape[0], -1)
            else:
                whole.append(work[spans[p]])

        # P = M·Q, (a, r), is summed; vectors go along in the same message.
        ps = [m @ self._q[p] for p, m in matrices.items()]
        flat = torch.cat([part.reshape(-1) for part in ps + whole])
        arrived = self._axis.start_sum(flat, "gradients", sent.bucket, sent.last)
        yield

        arrived()
        parts = iter(flat.split([part.numel() for part in ps + whole]))
        ps = [orthonormal(next(parts).view_as(p)) for p in ps]
        for vector, summed in zip(whole, parts, strict=True):
            vector.copy_(summed)

        # Q = Mᵀ·P, (b, r), before the sum: M - P·Qᵀ is what this rank does not send.
        qs = [m.mT @ p for m, p in zip(matrices.values(), ps, strict=True)]
        left = torch.zeros_like(work)
        for (param, m), p, q in zip(matrices.items(), ps, qs, strict=True):
            left[spans[param]] = (m - p @ q.mT).view(-1)
        self._keep(sent, left)

        # A bucket without matrices is done, but takes the same number of steps.
        flat = flat[:0]
        if qs:
            flat = torch.cat([q.reshape(-1) for q in qs])
            arrived = self._axis.start_sum(flat, "gradients", sent.bucket)
        yield

        if qs:
            arrived()
        summed_qs = flat.split([q.numel() for q in qs])
        for param, p, q in zip(matrices, ps, summed_qs, strict=True):
            q = q.view_as(self._q[param])
            work[spans[param]] = (p @ q.mT).view(-1)
            # The next Q. A column without a length keeps its old direction, which may serve later.
            size = q.norm(dim=0)
            new = torch.where(size > 0, q / size, self._q[param])
            self._changes.append((param, self._q[param], new))
        sent.flat.copy_(work)


def _rank_of(p: Tensor, rank: int) -> int:
    """Return the rank of a parameter's products; 0: it goes whole.

    Vectors do, and matrices whose products would have no fewer numbers.
    """
    if p.dim() < 2:
        return 0
    a = p.shape[0]
    b = p.numel() // a
    return rank if (a + b) * rank < a * b else 0


def orthonormal(p: Tensor) -> Tensor:
    """Return (a, r) with orthonormal columns that span those of `p`: Gram and Schmidt, each column
    twice.

    A column that earlier columns span becomes zero: what rounding leaves of it would point
    anywhere. Without a wait for the device. Numbers that are not finite stay so.
    """
    done = torch.zeros_like(p)
    for j in range(p.shape[1]):
        column = p[:, j]
        size = column.norm()
        for _ in range(2):  # once leaves the rounding errors of a long projection
            column = column - done[:, :j] @ (done[:, :j].mT @ column)
        rest = column.norm()
        is_spanned = (rest <= SPANNED * size) & torch.isfinite(size)
        done[:, j] = torch.where(is_spanned, 0.0, column / rest)
    return done


def _codec(kind: str) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Return the functions from float32, (n, s), to bytes, (n, 2s) in 16 bits, and back."""
    if kind == "int8":
        return to_int8, from_int8
    dtype = TYPES[kind]
    return lambda x: x.to(dtype).view(torch.uint8), lambda rows: rows.view(dtype).float()


def to_int8(x: Tensor) -> Tensor:
    """Return float32 numbers, (n, s), as bytes, (n, 4b + s).

    Each row has the scales of its b blocks, then its numbers. A number that is not finite makes its
    block's scale so, and all of the block when it is decoded.
    """
    n = x.shape[0]
    blocks = x.view(n, -1, BLOCK)  # (n, b, 1024)
    scale = (blocks.abs().amax(-1, keepdim=True) / 127).clamp_min(_TINY)  # (n, b, 1)
    numbers = (blocks / scale).round().to(torch.int8)  # (n, b, 1024)
    scale_bytes = scale.reshape(n, -1).view(torch.uint8)
    number_bytes = numbers.reshape(n, -1).view(torch.uint8)
    return torch.cat([scale_bytes, number_bytes], dim=1)


def from_int8(rows: Tensor) -> Tensor:
    """Return the numbers, (n, s), that `to_int8` has encoded, rounded."""
    n = rows.shape[0]
    b = rows.shape[1] // (BLOCK + 4)
    scale = rows[:, : 4 * b].contiguous().view(torch.float32)  # (n, b)
    numbers = rows[:, 4 * b :].contiguous().view(torch.int8).view(n, b, BLOCK)
    return (numbers.float() * scale.unsqueeze(-1)).view(n, -1)

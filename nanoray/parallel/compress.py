"""Gradients in 16 bits: what data-parallel ranks send of a bucket in place of its float32 sum.

    rank i ─► each other rank j: slice j in 16 bits ─► j adds in float32, sends the sum in 16 bits to all

Gradients are divided by the number of ranks before anything is rounded, so no sum can exceed what
one rank may hold: summed first, n values of 65504 / 2 would overflow fp16. All ranks decode the same
bytes, the sender too, so all end with the same bits. A gradient is rounded twice, and what the
rounding loses is forgotten.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from nanoray.parallel.axis import Axis
from nanoray.parallel.hooks import StepHook

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Compressor(StepHook):
    """Sums the buckets of one group of ranks."""

    def __init__(self, axis: Axis, kind: str) -> None:
        """Sum over the ranks of `axis`, in numbers of this kind."""
        self._axis = axis
        self._dtype = TYPES[kind]
        self._flight: deque[Iterator[None]] = deque()

    def send(self, flat: Tensor, bucket: int, last: bool) -> None:
        """Start to sum a bucket (m,) over the ranks, in place. (all ranks, in one order)

        Its gradients are divided by the number of ranks. Earlier buckets take their next step
        meanwhile, so that all ranks start all collectives in the same order. last: of a backward.
        """
        # A flow is a generator: it starts an exchange and yields, and is resumed to wait for it.
        flow = self._sum(flat, bucket, last)
        next(flow)
        self._advance()
        self._flight.append(flow)

    def drain(self) -> None:
        """Wait until every bucket has arrived, and is the sum. (all ranks)"""
        while self._flight:
            self._advance()

    def drop(self) -> None:
        """Forget the buckets of a step that broke."""
        self._flight.clear()

    def _advance(self) -> None:
        """Let each bucket in flight go on to its next exchange."""
        for flow in list(self._flight):
            if next(flow, "done") == "done":
                self._flight.remove(flow)

    def _sum(self, flat: Tensor, bucket: int, last: bool) -> Iterator[None]:
        """Sum a bucket in two exchanges of rounded numbers. Each `yield` is a wait for one."""
        n = self._axis.size
        own = self._axis.index
        m = flat.numel()

        # Send slice i to rank i. Slices are padded with zeros to one length.
        share = -(-m // n)
        work = torch.zeros(n * share, dtype=torch.float32, device=flat.device)
        work[:m] = flat
        work = work.view(n, share)  # row i goes to rank i
        rows = self._encode(work)  # (n, bytes)
        arrived = self._axis.start_exchange(rows.view(-1), "gradients", bucket, last)
        yield

        # Add the slices of all ranks, in their order. The own one is not rounded: it has not
        # travelled.
        slices = self._decode(arrived().view(n, -1))  # (n, share)
        slices[own] = work[own]
        total = slices[0]
        for other in slices[1:]:
            total = total + other

        # Send the sum to all, rounded once more.
        rows[own] = self._encode(total)
        gathered = self._axis.start_all_gather(rows.view(-1), "gradients", bucket)
        yield

        gathered()
        flat.copy_(self._decode(rows).view(-1)[:m])

    def _encode(self, numbers: Tensor) -> Tensor:
        """Return float32 numbers, (..., s), as bytes, (..., 2s)."""
        return numbers.to(self._dtype).view(torch.uint8)

    def _decode(self, rows: Tensor) -> Tensor:
        """Return the numbers of `_encode`, rounded."""
        return rows.view(self._dtype).float()

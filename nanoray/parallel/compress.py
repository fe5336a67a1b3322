"""Gradients in 16 bits: what data-parallel ranks send of a bucket in place of its float32 sum.

    rank i ─► each other rank j: slice j in 16 bits ─► j adds in float32, sends the sum in 16 bits to all

Gradients are divided by the number of ranks before anything is rounded, so no sum can exceed what
one rank may hold: summed first, n values of 65504 / 2 would overflow fp16. All ranks decode the same
bytes, the sender too, so all end with the same bits. A gradient is rounded twice, and what the
rounding loses is forgotten.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nanoray.config import Config
from nanoray.parallel.axis import Axis
from nanoray.parallel.hooks import StepHook

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class SendingBucket(NamedTuple):
    """One bucket on its way: its gradients, (m,), and the parameters that they belong to."""

    flat: Tensor
    params: Sequence[Tensor]
    bucket: int
    last: bool  # of a backward pass


class Compressor(StepHook):
    """Sums the buckets of one group of ranks."""

    def __init__(self, model: nn.Module, axis: Axis, config: Config) -> None:
        """Take the data ranks, and the names of the parameters that have gradients."""
        self._axis = axis
        self._dtype = TYPES[config.grad_compress]
        self._names: dict[Tensor, str] = {}
        for name, param in model.named_parameters():
            if param.requires_grad:
                self._names[param] = name
        self.bucket_names: dict[int, list[str]] = {}
        self._flight: deque[Iterator[None]] = deque()

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
        flow = self._sum(sent)
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

    def _sum(self, sent: SendingBucket) -> Iterator[None]:
        """Sum a bucket in two exchanges of rounded numbers. Each `yield` is a wait for one."""
        n = self._axis.size
        own = self._axis.index
        m = sent.flat.numel()

        # Send slice i to rank i. Slices are padded with zeros to one length.
        share = -(-m // n)
        work = torch.zeros(n * share, dtype=torch.float32, device=sent.flat.device)
        work[:m] = sent.flat
        work = work.view(n, share)  # row i goes to rank i
        rows = self._encode(work)  # (n, bytes)
        arrived = self._axis.start_exchange(rows.view(-1), "gradients", sent.bucket, sent.last)
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
        gathered = self._axis.start_all_gather(rows.view(-1), "gradients", sent.bucket)
        yield

        gathered()
        sent.flat.copy_(self._decode(rows).view(-1)[:m])

    def _encode(self, numbers: Tensor) -> Tensor:
        """Return float32 numbers, (..., s), as bytes, (..., 2s)."""
        return numbers.to(self._dtype).view(torch.uint8)

    def _decode(self, rows: Tensor) -> Tensor:
        """Return the numbers of `_encode`, rounded."""
        return rows.view(self._dtype).float()

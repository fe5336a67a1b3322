"""Replicas that rarely communicate: each takes H steps alone, then all average how far they moved.

    anchor  ●───────────────────────────●───────────────────────────●
    replica 0 └─ step ─ step ─ ... step ┤└─ step ─ step ─ ... step ┤     H steps, each with its own
    replica 1 └─ step ─ step ─ ... step ┤└─ step ─ step ─ ... step ┤     share of the batch
                                        │
            mean of (anchor - weights) over the replicas ─► outer SGD with Nesterov momentum ─► anchor

The mean is taken in the order of the ranks, so all replicas get the same bits:

    rank 0   a0 a1 ─┐ exchange   a0 b0 ─► (a0 + b0) / n ─┐ gather   m0 m1
    rank 1   b0 b1 ─┘            a1 b1 ─► (a1 + b1) / n ─┘          m0 m1

Beside each slice goes a number: 1 from a replica that has done the whole round, 0 from one that
has joined in its middle, whose difference is left out. Their sum is n.

With 8 bits, a slice travels as int8 numbers with a scale for every 1024 of them, and so does its
mean on the way back; sums are taken in float32.

With fragments, fragment p of the model is sent at the steps p·H/P of each round, and travels while
two steps are computed: its slices beside the first one, the means beside the second one.

    step       s          s+1            s+2
    fragment   send ──►   sum, gather ─► outer SGD; weights += new anchor - weights that were sent

Sources: Stich 2018, Local SGD; Douillard et al. 2023, DiLoCo; Douillard et al. 2025, Streaming
DiLoCo.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nanoray.config import Config
from nanoray.config.optim import FRAGMENT_DELAY
from nanoray.mesh.axis import Axis
from nanoray.parallel.compress import BLOCK, from_int8, to_int8
from nanoray.parallel.ddp import default_bucket_mb
from nanoray.state.train_state import TrainState

FLAG = 4  # bytes at the end of a row: a float32, 1 or 0


class Arrived(NamedTuple):
    """The mean difference of a fragment."""

    fragment: int
    step: int  # whose weights were averaged
    means: list[Tensor]  # of its shards, in their order


class Rounds:
    """When and how the replicas of one group of ranks average their weights."""

    def __init__(self, axis: Axis, config: Config) -> None:
        """`axis` has the ranks that hold the same part of each replica."""
        self._axis = axis
        self._every = config.sync_every
        self._fragments = config.sync_fragments
        self._bucket_mb = config.bucket_mb
        self._bits = config.sync_bits
        self._last = config.max_steps
        self._closed_at = 0  # the step of a round that has ended early
        self._flight: dict[int, Exchange] = {}  # by fragment

    @property
    def replica(self) -> int:
        """The number of this rank's replica."""
        return self._axis.index

    @property
    def replicas(self) -> int:
        return self._axis.size

    def end(self, step: int) -> bool:
        """Return whether a round ends after `step`; so one does after the last step of all."""
        return step % self._every == 0 or step == self._last

    def first_end(self, every: int, step: int) -> bool:
        """Return whether the first round that reaches a multiple of `every` steps ends after `step`."""
        if not every or not self.end(step):
            return False
        end_before = (step - 1) // self._every * self._every
        return step // every > end_before // every

    def close(self, step: int) -> None:
        """Let the rounds of all fragments end after this step; `meet` then averages them."""
        self._closed_at = step

    def _ends_all(self, step: int) -> bool:
        """Return whether everything is averaged after a step, while training waits."""
        return step in (self._last, self._closed_at)

    def meet(self, state: TrainState) -> Iterator[Arrived]:
        """Send the fragments that are due after the newest step; yield those that are to be applied.

        (all ranks) After a fault it can be called again: what was on its way is sent again.
        """
        assert state.outer
        step = state.step
        state.outer.apply_later(step)
        for fragment in range(self._fragments):
            # What was sent some steps ago must have arrived now.
            sent_at = self._newest_due(fragment, step - 1)
            waits = sent_at > state.outer.synced[fragment]
            if waits and (step - sent_at >= FRAGMENT_DELAY or self._ends_all(step)):
                yield self._receive(state, fragment, sent_at)
            elif waits and fragment in self._flight:
                self._flight[fragment].gather()
            elif waits:
                self._send(state, fragment)

            # What is due now. Without fragments, and at the end, training waits for it.
            if self._newest_due(fragment, step) == step > state.outer.synced[fragment]:
                self.keep(state)
                self._send(state, fragment)
                if not self._travels_at(step):
                    yield self._receive(state, fragment, step)

    def keep(self, state: TrainState) -> None:
        """Keep the weights of the fragments that are due after the newest step; nothing is sent.

        What another replica has finished is applied, where it is due after this step.
        """
        assert state.outer
        state.outer.apply_later(state.step)
        for fragment in range(self._fragments):
            is_due = self._newest_due(fragment, state.step) == state.step
            if is_due and self._travels_at(state.step):
                state.outer.put_aside(fragment)

    def _travels_at(self, step: int) -> bool:
        """Return whether what is sent after `step` travels beside the next steps."""
        return self._fragments > 1 and not self._ends_all(step)

    def _newest_due(self, fragment: int, step: int) -> int:
        """Return the newest step up to `step` after which a fragment is averaged; 0: none."""
        if self._ends_all(step):
            return step
        offset = fragment * self._every // self._fragments
        return max(0, (step - offset) // self._every * self._every + offset)

    def _send(self, state: TrainState, fragment: int) -> None:
        assert state.outer
        moved = state.outer.moved(fragment)
        counts = state.outer.counts(fragment)
        self._flight[fragment] = Exchange(self._axis, moved, counts, self._bucket_mb, self._bits)

    def _receive(self, state: TrainState, fragment: int, step: int) -> Arrived:
        # After a fault nothing is on its way any more.
        if fragment not in self._flight:
            self._send(state, fragment)
        return Arrived(fragment, step, self._flight.pop(fragment).result())


class Exchange:
    """One average of some tensors over the replicas, in buckets, in two halves.

    With 8 bits each tensor begins with a block of its own. So ranks of one replica that hold the
    same tensor, beside others, round it in the same way.
    """

    def __init__(
        self, axis: Axis, moved: Sequence[Tensor], counts: bool, bucket_mb: float, bits: int
    ) -> None:
        """Start to send each rank its slices. (all ranks of the axis)

        counts: whether this replica's differences, `moved`, are a part of the mean.
        """
        self._axis = axis
        self._shapes = [tensor.shape for tensor in moved]
        self._encode, self._decode = _codec(bits)
        self._unit = BLOCK if bits == 8 else 1
        padded = []
        for tensor in moved:
            padded += [tensor.view(-1), tensor.new_zeros(-tensor.numel() % self._unit)]
        # Becomes the mean. A slice of ZeRO, or a stage, may have nothing of a fragment: then its twins
        # in the other replicas have nothing either, and nothing is sent.
        self._flat = torch.cat(padded) if padded else torch.empty(0)
        # By bucket: where its mean belongs, and what waits for its slices
        self._arrives: list[tuple[Tensor, Callable[[], Tensor]]] = []
        self._gathers: list[tuple[Tensor, Tensor, Callable[[], None]]] | None = None

        # Whole blocks in each bucket; 2^18 numbers of 4 bytes are 1 MB.
        numbers = int((bucket_mb or default_bucket_mb(self._flat.device)) * 2**18)
        bucket = max(1, numbers // self._unit) * self._unit
        parts = self._flat.split(bucket) if padded else ()
        for part in parts:
            # A row for each rank: its slice in whole blocks, and whether this replica counts.
            share = -(-part.numel() // (axis.size * self._unit)) * self._unit
            slices = part.new_zeros(axis.size, share)
            flags = part.new_zeros(axis.size, 1)
            if counts:
                slices.view(-1)[: part.numel()] = part
                flags.fill_(1.0)
            rows = torch.cat([self._encode(slices), flags.view(torch.uint8)], dim=1)
            self._arrives.append((part, self._start(rows)))

    def _start(self, rows: Tensor) -> Callable[[], Tensor]:
        """Start to send row i to rank i; the function that is returned waits for this rank's rows."""
        if self._axis.size == 1:
            return lambda: rows
        arrives = self._axis.start_exchange(rows.view(-1), "rounds")

        def finish() -> Tensor:
            # A trace sees what is left of the wait, and the bytes.
            with self._axis.noted("all_to_all", "rounds", rows):
                return arrives().view(rows.shape)

        return finish

    def gather(self) -> None:
        """Wait for the slices, and start to send their means to all ranks. (all ranks of the axis)

        A second call does nothing.
        """
        if self._gathers is not None:
            return
        self._gathers = []
        # What a bucket needs is let go of bucket by bucket. The functions refer to this object, too,
        # and would keep all of it alive until Python looks for cycles.
        while self._arrives:
            part, arrives = self._arrives.pop(0)
            rows = arrives()
            slices = self._decode(rows[:, :-FLAG])  # (ranks, share)
            flags = rows[:, -FLAG:].contiguous().view(torch.float32)  # (ranks, 1)

            # In the order of the ranks: those that do not count have sent zeros.
            total = slices[0]
            for other in slices[1:]:
                total = total + other
            mean = (total / flags.sum()).unsqueeze(0)  # (1, share)

            # The mean is rounded once more, and all decode the same bytes.
            own = self._encode(mean)
            means = own.new_empty(self._axis.size, own.shape[1])
            means[self._axis.index] = own[0]
            gathered = self._axis.start_all_gather(means.view(-1), "rounds")
            self._gathers.append((part, means, gathered))

    def result(self) -> list[Tensor]:
        """Wait for all means; return those of the tensors. (all ranks of the axis)"""
        self.gather()
        while self._gathers:
            part, means, gathered = self._gathers.pop(0)
            gathered()
            part.copy_(self._decode(means).view(-1)[: part.numel()])

        tensors = []
        start = 0
        for shape in self._shapes:
            numbers = shape.numel()
            tensors.append(self._flat[start : start + numbers].view(shape))
            start += numbers + -numbers % self._unit
        return tensors


def _codec(bits: int) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Return the functions from float32 numbers, (n, s), to bytes, a row each, and back."""
    if bits == 8:
        return to_int8, from_int8
    return lambda x: x.view(torch.uint8), lambda rows: rows.contiguous().view(torch.float32)

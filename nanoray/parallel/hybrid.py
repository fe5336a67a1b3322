"""Hybrid sharding: ranks of one group shard the state, groups hold the same. Torch calls it HSDP.

dp 4, replicas 2, and the gradients of one bucket; a0 .. d1 are the slices of ranks 0 to 3:

             group 0 (a node)                group 1 (a node)
        rank 0        rank 1            rank 2        rank 3
        a0 a1         b0 b1             c0 c1         d0 d1             after backward
          └─────────────┘                 └─────────────┘               reduce-scatter within a group: near
        a0+b0         a1+b1             c0+d0         c1+d1
          └─────────────│─────────────────┘             │               sum across groups: far, 1/S of the bytes
                        └───────────────────────────────┘
     a0+b0+c0+d0    a1+b1+c1+d1      a0+b0+c0+d0    a1+b1+c1+d1
     update slice 0 update slice 1   update slice 0 update slice 1
          └─────────────┘                 └─────────────┘               all-gather of weights within a group

With S ranks in each of R groups, a rank keeps 1/S of what dp_mode shards. Of P elements it sends
(S-1)/S·P twice within its group, and 2(R-1)/R·P/S across groups. Plain sharding sends (n-1)/n·P
twice over whatever link joins the n = S·R ranks, and each rank keeps 1/n.

The sum across groups is taken in the order of the groups, so all have the same bits. Each part of a
slice is added on one rank of the axis, which sends it to the others: a reduce-scatter and an
all-gather, beside backward. zero2 sums each micro batch within the group, and across groups once.

Every rank has a twin in each other group, with the same share of weights, gradients and optimizer
state. So a lost rank's share comes from its twin, and no copy is kept for that: the norm, which all
data ranks add up, is the commit point (train/mirror.py).

Source: Zhao et al. 2023, PyTorch FSDP (hybrid sharding); Zhang et al. 2022, MiCS.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nanoray.machine.fault_points import reached
from nanoray.parallel.axis import Axis
from nanoray.parallel.pieces import Shard


class Groups:
    """Sums this rank's slices over its twins, which have the same slices in the other groups."""

    def __init__(self, data: Axis, replica: Axis) -> None:
        """data: the ranks of all groups. replica: this rank and its twins."""
        self.data = data
        self._replica = replica
        # Slices that are being summed, and those whose parts are being gathered: one of each kind
        # travels while backward fills the next bucket.
        self._summed: deque[tuple[Sum, Callable[[Tensor], Tensor]]] = deque()
        self._gathered: deque[tuple[Sum, Callable[[], None]]] = deque()

    @property
    def count(self) -> int:
        """The groups, R."""
        return self._replica.size

    @property
    def is_first(self) -> bool:
        """Whether this is a rank of the first group, which counts in the norm and saves."""
        return self._replica.index == 0

    def start(self, own: Tensor, bucket: int) -> None:
        """Start to sum `own`, (s,), over the groups, in place. (all data ranks)

        They start the slices of their buckets in one order. Until `finish` returns, `own` must not
        change. Moves the slices that were started before a stage on.
        """
        reached("across_groups")
        crossing = Sum.of(own, self._replica, bucket)
        arrived = self._replica.start_reduce_scatter(crossing.parts, "gradients", bucket)
        self._summed.append((crossing, arrived))
        self._advance(1)

    def finish(self) -> None:
        """Wait until all slices are summed. (all data ranks)"""
        self._advance(0)

    def _advance(self, left: int) -> None:
        """Move the oldest slices on until only `left` are in each of the two stages."""
        while len(self._summed) > left:
            crossing, arrived = self._summed.popleft()
            arrived(crossing.own_part)
            gathered = self._replica.start_all_gather(crossing.parts, "gradients", crossing.bucket)
            self._gathered.append((crossing, gathered))
        while len(self._gathered) > left:
            crossing, gathered = self._gathered.popleft()
            gathered()
            crossing.put_back()

    def sum(self, own: Tensor) -> None:
        """Sum `own`, (s,), over the groups, in place, and wait for it. (all data ranks)"""
        reached("across_groups")
        crossing = Sum.of(own, self._replica)
        with self._replica.noted("reduce_scatter", "gradients", crossing.parts):
            self._replica.start_reduce_scatter(crossing.parts, "gradients")(crossing.own_part)
        self._replica.start_all_gather(crossing.parts, "gradients")()
        crossing.put_back()

    def clear(self) -> None:
        """Forget the slices of a step that broke."""
        self._summed.clear()
        self._gathered.clear()


@dataclass(frozen=True)
class Sum:
    """A slice that is summed over R groups, in R equal parts."""

    own: Tensor  # (s,), overwritten with the sum
    parts: Tensor  # (R·ceil(s/R),): `own` itself where R divides s
    own_part: Tensor  # (ceil(s/R),): the part that this rank adds up, a view of `parts`
    bucket: int | None  # its number for the trace

    @classmethod
    def of(cls, own: Tensor, replica: Axis, bucket: int | None = None) -> Sum:
        """Return the parts of a slice; a copy with zeros at the end where they are not equal."""
        groups = replica.size
        rest = -own.numel() % groups
        parts = own
        if rest:
            parts = torch.cat([own, own.new_zeros(rest)])
        return cls(own, parts, parts.view(groups, -1)[replica.index], bucket)

    def put_back(self) -> None:
        """Copy the sum into `own`, if `parts` is a copy."""
        if self.parts is not self.own:
            self.own.copy_(self.parts[: self.own.numel()])


def with_owners(shards: Sequence[Shard], groups: Groups) -> list[Shard]:
    """Return shards that every group holds: the first group's ranks own them."""
    marked = []
    for shard in shards:
        holders = shard.holders * groups.count
        owner = shard.owner and groups.is_first
        marked.append(replace(shard, holders=holders, owner=owner))
    return marked

"""Which rank stands where on the axes of a run: plain arithmetic, without torch.

    rank = (p·dp + d)·tp + t        dp data replicas, tp tensor shards, pp pipeline stages

    dp 2, tp 2:   t=0  t=1          ranks of one row share a replica's layers: they send most, so they are neighbours
          d=0      0    1
          d=1      2    3           ranks of one column hold the same shard of different replicas

Expert parallelism (ep) divides the data axis: rank d holds the experts of d mod ep. Ranks with the
same d mod ep, the axis edp, hold the same experts; without ep it is the data axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from nanoray.config import Config
from nanoray.errors import ConfigError


class Coords(NamedTuple):
    """A rank's place: data replica, tensor shard, pipeline stage, and which share of the experts."""

    dp: int
    tp: int
    pp: int
    ep: int


@dataclass(frozen=True)
class Layout:
    """The sizes of the axes."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for axis in Coords._fields:
            size = getattr(self, axis)
            if size < 1:
                raise ConfigError(
                    f"{axis} = {size}, but an axis has at least one rank; raise {axis}"
                )
        if self.dp % self.ep:
            ranks = ""
            if self.tp * self.pp > 1:  # else dp is the number of ranks
                product = f"{self.dp}*{self.tp}*{self.pp}"
                ranks = f" of dp*tp*pp = {product} = {self.world_size} ranks"
            raise ConfigError(
                f"ep = {self.ep} does not divide dp = {self.dp}{ranks}; choose a divisor of dp "
                "for ep"
            )

    @classmethod
    def of(cls, config: Config, ranks: int) -> Layout:
        """Return the layout of a run on `ranks` ranks: each data replica takes tp*pp of them.

        Raises ConfigError when they cannot be shared so.
        """
        # A replica takes one rank for each tensor shard of each stage; the rest are data replicas.
        sizes = _sizes_above_one(config)
        share = prod(sizes.values())
        if ranks % share:
            axes = "*".join(sizes)
            value = "*".join(str(size) for size in sizes.values())
            if len(sizes) > 1:
                value += f" = {share}"
            more = -(-ranks // share) * share
            raise ConfigError(
                f"ranks = dp*{axes}, but {axes} = {value} does not divide {ranks} rank(s); use "
                f"{more} workers (--workers {more}, or torchrun --nproc-per-node {more}), or a "
                f"{axes} that divides {ranks}"
            )
        if ranks > share and config.pp > 1 and config.dp_mode == "ddp":
            raise ConfigError(
                f"dp_mode = ddp with pp = {config.pp} and dp = {ranks // share}: torch's DDP "
                "expects the backward of a micro batch right after its forward, which no schedule "
                "keeps, and would average wrong gradients without an error; use dp_mode "
                "ddp_by_hand, zero1 or zero2"
            )
        return cls(dp=ranks // share, tp=config.tp, pp=config.pp, ep=config.ep)

    def __str__(self) -> str:
        experts = f" (ep {self.ep})" if self.ep > 1 else ""
        parts = [f"dp {self.dp}{experts}"]
        for axis, size in _sizes_above_one(self).items():
            parts.append(f"{axis} {size}")
        return " × ".join(parts)

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.pp

    def require(self, world_size: int) -> None:
        """Raise ConfigError when this layout is not one of `world_size` ranks."""
        if self.world_size != world_size:
            raise ConfigError(
                f"dp*tp*pp = {self.dp}*{self.tp}*{self.pp} = {self.world_size}, but there are "
                f"{world_size} ranks; set workers to {self.world_size}, or change one of the axes"
            )

    def coords(self, rank: int) -> Coords:
        """Return the place of a rank."""
        # rank = (p·dp + d)·tp + t, from the right.
        rest, t = divmod(rank, self.tp)
        p, d = divmod(rest, self.dp)
        return Coords(d, t, p, d % self.ep)

    def rank(self, dp: int = 0, tp: int = 0, pp: int = 0) -> int:
        """Return the rank at a place."""
        return (pp * self.dp + dp) * self.tp + tp

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """Return all groups of ranks along an axis, each in the order of its coordinate.

        Ranks of one group differ in this coordinate only. Along ep, they differ in d within one
        block of ep replicas; along edp, in d by multiples of ep.
        """
        # Ranks with the same key are one group.
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            place = self.coords(rank)
            if axis == "ep":
                key = (place.dp // self.ep, place.tp, place.pp)
            elif axis == "edp":
                key = (place.ep, place.tp, place.pp)
            else:
                key = tuple(getattr(place, other) for other in ("dp", "tp", "pp") if other != axis)
            groups.setdefault(key, []).append(rank)
        return [tuple(ranks) for ranks in groups.values()]


def _sizes_above_one(sizes: Config | Layout) -> dict[str, int]:
    """Return tp and pp by name, where a replica has several of their ranks."""
    return {axis: getattr(sizes, axis) for axis in ("tp", "pp") if getattr(sizes, axis) > 1}


def mirror_distance(local_ranks: Sequence[int]) -> int:
    """Return d: of n ranks, rank (r + d) mod n mirrors the share of rank r; 0 for one rank.

    `local_ranks`: each rank's number on its node. With equal nodes the mirror is on another one, if
    there are several.
    """
    ranks = len(local_ranks)
    ranks_per_node = len(set(local_ranks))
    if ranks_per_node < ranks:
        return ranks_per_node
    return min(1, ranks - 1)  # one node: the neighbour


def mirrored(layout: Layout, rank: int, local_ranks: Sequence[int]) -> tuple[int, int]:
    """Return `mirror_distance` along the data axis, and the rank whose share `rank` mirrors there.

    At distance 0 that is its own. With ep both have the same experts, if several ranks do: then the
    distance is a multiple of ep.
    """
    (peers,) = (group for group in layout.groups("dp") if rank in group)

    # Ranks with the same experts are every unit-th one. All of them need one distance: the largest.
    unit = layout.ep if layout.dp > layout.ep else 1
    distances = []
    for i in range(unit):
        distances.append(mirror_distance([local_ranks[peer] for peer in peers[i::unit]]))
    distance = unit * max(distances)
    return distance, peers[(peers.index(rank) - distance) % len(peers)]

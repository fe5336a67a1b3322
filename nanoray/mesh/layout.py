"""Which rank stands where on the axes of a run: plain arithmetic, without torch.

    rank = (p·dp + d)·tp + t        dp data replicas, tp tensor shards, pp pipeline stages

    dp 2, tp 2:   t=0  t=1          ranks of one row share a replica's layers: they talk most, so they are neighbours
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
            if getattr(self, axis) < 1:
                raise ConfigError(
                    f"{axis} = {getattr(self, axis)}, but an axis has at least one rank; raise "
                    f"{axis}"
                )
        if self.dp % self.ep:
            ranks = f" of dp*tp*pp = {self.dp}*{self.tp}*{self.pp} = {self.world_size} ranks" * (
                self.tp * self.pp > 1
            )
            raise ConfigError(
                f"ep = {self.ep} does not divide dp = {self.dp}{ranks}; choose a divisor of dp for "
                "ep"
            )

    @classmethod
    def of(cls, config: Config, ranks: int) -> Layout:
        """Return the layout of a run on so many ranks: each data replica takes tp*pp of them.
        Raises ConfigError.
        """
        sizes = {axis: size for axis in ("tp", "pp") if (size := getattr(config, axis)) > 1}
        share, axes = prod(sizes.values()), "*".join(sizes)
        if ranks % share:
            more = -(-ranks // share) * share
            value = "*".join(map(str, sizes.values())) + (f" = {share}" if len(sizes) > 1 else "")
            raise ConfigError(
                f"ranks = dp*{axes}, but {axes} = {value} does not divide {ranks} rank(s); use "
                f"{more} workers "
                f"(--workers {more}, or torchrun --nproc-per-node {more}), or a {axes} that "
                f"divides {ranks}"
            )
        if ranks > share and config.pp > 1 and config.dp_mode == "ddp":
            raise ConfigError(
                f"dp_mode = ddp with pp = {config.pp} and dp = {ranks // share}: torch's DDP "
                "expects the backward of "
                "a micro batch right after its forward, which no schedule keeps, and would average "
                "wrong gradients "
                "without an error; use dp_mode ddp_by_hand, zero1 or zero2"
            )
        return cls(dp=ranks // share, tp=config.tp, pp=config.pp, ep=config.ep)

    def __str__(self) -> str:
        sizes = [f"{axis} {size}" for axis in ("tp", "pp") if (size := getattr(self, axis)) > 1]
        experts = f" (ep {self.ep})" if self.ep > 1 else ""
        return " × ".join([f"dp {self.dp}{experts}", *sizes])

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.pp

    def require(self, world_size: int) -> None:
        """Raise ConfigError when this layout is not one of `world_size` ranks."""
        if self.world_size != world_size:
            raise ConfigError(
                f"dp*tp*pp = {self.dp}*{self.tp}*{self.pp} = {self.world_size}, but there are "
                f"{world_size} ranks; "
                f"set workers to {self.world_size}, or change one of the axes"
            )

    def coords(self, rank: int) -> Coords:
        """Return the place of a rank."""
        rest, t = divmod(rank, self.tp)
        p, d = divmod(rest, self.dp)
        return Coords(d, t, p, d % self.ep)

    def rank(self, dp: int = 0, tp: int = 0, pp: int = 0) -> int:
        """Return the rank at a place."""
        return (pp * self.dp + dp) * self.tp + tp

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """Return the ranks that talk to each other along an axis: every group, each in the order of
        its coordinate.

        Ranks of one group differ in this coordinate only. Along ep, they differ in d within one
        block of ep replicas; along edp, in d by multiples of ep.
        """
        together: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            place = self.coords(rank)
            if axis == "ep":
                same = (place.dp // self.ep, place.tp, place.pp)
            elif axis == "edp":
                same = (place.ep, place.tp, place.pp)
            else:
                same = tuple(getattr(place, other) for other in ("dp", "tp", "pp") if other != axis)
            together.setdefault(same, []).append(rank)
        return [tuple(ranks) for ranks in together.values()]


def mirror_distance(local_ranks: Sequence[int]) -> int:
    """Return d: of n ranks, rank (r + d) mod n mirrors the share of rank r. 0 for one rank, which
    has no neighbour.

    `local_ranks`: each rank's number on its node. With equal nodes the mirror is on another one, if
    there are several.
    """
    most = len({*local_ranks})
    return most if most < len(local_ranks) else min(1, len(local_ranks) - 1)


def mirrored(layout: Layout, rank: int, local_ranks: Sequence[int]) -> tuple[int, int]:
    """Return `mirror_distance` along the data axis, and whose share `rank` mirrors there: its own
    at distance 0.

    With ep they have the same experts, if several ranks do: then the distance is a multiple of ep.
    """
    (peers,) = (group for group in layout.groups("dp") if rank in group)
    unit = layout.ep if layout.dp > layout.ep else 1
    distance = unit * max(
        mirror_distance([local_ranks[p] for p in peers[i::unit]]) for i in range(unit)
    )
    return distance, peers[(peers.index(rank) - distance) % len(peers)]

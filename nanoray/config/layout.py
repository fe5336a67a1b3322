"""Which rank stands where on the axes of a run: plain arithmetic, without torch.

    rank = ((p·dp + d)·cp + c)·tp + t     dp data replicas, cp parts of a sequence, tp tensor shards, pp stages

    dp 2, tp 2:   t=0  t=1          ranks of one row share a replica's layers: they send most, so they are neighbours
          d=0      0    1
          d=1      2    3           ranks of one column hold the same shard of different replicas

Expert parallelism (ep) divides the data axis: rank d holds the experts of d mod ep. Ranks with the
same d mod ep, the axis edp, hold the same experts; without ep it is the data axis.

Context parallelism (cp) cuts sequences, not the model: gradients are summed over data replicas and
over parts of sequences, the axis dp_cp. Without cp it is the data axis.

Replicas divide the data axis into groups of neighbours. Ranks of one group, the axis shard, share
the work by dp_mode; ranks with the same place in their groups, the axis replica, hold the same.

    dp 4, replicas 2:    group 0     group 1
                         0     1     2     3       shard: 0 1 and 2 3      replica: 0 2 and 1 3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from nanoray.config import Config
from nanoray.config.conflicts import refuse_sharing
from nanoray.config.mesh import AXES, CUTS_MODEL, IN_REPLICA
from nanoray.errors import ConfigError


class Coords(NamedTuple):
    """A rank's place: data replica, tensor shard, pipeline stage, share of the experts, part of the
    sequences, and group of data replicas."""

    dp: int = 0
    tp: int = 0
    pp: int = 0
    ep: int = 0
    cp: int = 0
    replicas: int = 0


# How a run's ranks are divided, besides the number of data replicas: keys of the configuration
DIVISIONS = tuple(axis for axis in Coords._fields if axis != "dp")


class Steps(NamedTuple):
    """An axis: the distance between neighbouring ranks of it, and their number."""

    stride: int
    size: int


@dataclass(frozen=True)
class Layout:
    """The sizes of the axes."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    cp: int = 1
    replicas: int = 1

    def __post_init__(self) -> None:
        if self.dp % self.ep:
            raise ConfigError(
                f"ep = {self.ep} does not divide dp = {self.dp} data ranks; choose a divisor of "
                f"{self.dp}"
            )
        if self.dp % self.replicas:
            raise ConfigError(
                f"replicas = {self.replicas} does not divide dp = {self.dp} data ranks; choose a "
                f"divisor of {self.dp}"
            )

    @classmethod
    def of(cls, config: Config, ranks: int, slots: int = 0) -> Layout:
        """Return the layout of a run on `ranks` ranks: each data replica takes cp*tp*pp of them.

        slots: the ranks that the run was started with, if it goes on with fewer (0: as many). Raises
        ConfigError when the ranks cannot be shared so.
        """
        refuse_sharing(config, slots or ranks)
        # A replica takes one rank for each part of a sequence, tensor shard and stage; the rest are
        # data replicas.
        share = config.replica_ranks
        if ranks % share:
            refuse_sharing(config, ranks)
        return cls(
            dp=ranks // share,
            replicas=_replicas_of(config, ranks // share, (slots or ranks) // share),
            **{axis.key: getattr(config, axis.key) for axis in AXES},
        )

    def __str__(self) -> str:
        experts = f" (ep {self.ep})" if self.ep > 1 else ""
        groups = f" ({self.replicas} replicas)" if self.replicas > 1 else ""
        parts = [f"dp {self.dp}{experts}{groups}"]
        for axis in IN_REPLICA:
            size = getattr(self, axis)
            if size > 1:
                parts.append(f"{axis} {size}")
        return " × ".join(parts)

    def sizes(self) -> dict[str, int]:
        """Return every size by its key: the data replicas, the axes, and the groups of replicas."""
        return {axis: getattr(self, axis) for axis in Coords._fields}

    @property
    def world_size(self) -> int:
        return self.dp * self.replica_ranks

    @property
    def replica_ranks(self) -> int:
        """The ranks that read the same samples."""
        return prod(getattr(self, axis) for axis in IN_REPLICA)

    @property
    def model_parts(self) -> int:
        """The parts into which the axes cut the weights."""
        return prod(getattr(self, axis) for axis in CUTS_MODEL)

    @property
    def shard_size(self) -> int:
        """The ranks of one group, which share the work by dp_mode."""
        return self.dp // self.replicas * self.cp

    @property
    def gradient_axes(self) -> tuple[str, ...]:
        """The axes along which gradients are summed, one after the other."""
        if self.replicas > 1:
            return "shard", "replica"
        if self.cp > 1:
            return ("dp_cp",)
        return ("dp",)

    @property
    def copies_axis(self) -> str:
        """The axis whose ranks have the same weights, whatever samples or positions they read."""
        return "edp" if self.ep > 1 else "dp_cp"

    @property
    def least_ranks(self) -> int:
        """The ranks that a run which shrinks keeps or drops together.

        That is a replica of the model, and with several groups of replicas one such group.
        """
        if self.replicas > 1:
            return self.world_size // self.replicas
        return self.replica_ranks * self.ep

    @cached_property
    def steps(self) -> dict[str, Steps]:
        """Every axis: a new one is a line here.

        Ranks of an axis are `stride` apart, in each group of it. rank = ((p·dp + d)·cp + c)·tp + t.
        """
        group = self.shard_size
        return {
            "tp": Steps(1, self.tp),
            "cp": Steps(self.tp, self.cp),
            "dp": Steps(self.tp * self.cp, self.dp),
            "pp": Steps(self.tp * self.cp * self.dp, self.pp),
            # Of the data ranks: those that share experts, and those that hold the same ones.
            "ep": Steps(self.tp * self.cp, self.ep),
            "edp": Steps(self.tp * self.cp * self.ep, self.dp // self.ep),
            # Data ranks with all parts of their sequences, and their division into groups.
            "dp_cp": Steps(self.tp, self.dp * self.cp),
            "shard": Steps(self.tp, group),
            "replica": Steps(self.tp * group, self.replicas),
        }

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of this layout, without those that repeat another one."""
        names = [axis for axis in Coords._fields if axis != "replicas"]
        if self.ep > 1:
            names.append("edp")
        if self.cp > 1:
            names.append("dp_cp")
        if self.replicas > 1:
            names += ["shard", "replica"]
        return tuple(names)

    def size_of(self, axis: str) -> int:
        """Return the ranks of a group along an axis."""
        return self.steps[axis].size

    def coords(self, rank: int) -> Coords:
        """Return the place of a rank."""
        places = {axis: rank // stride % size for axis, (stride, size) in self.steps.items()}
        places["replicas"] = places["replica"]
        return Coords(**{axis: places[axis] for axis in Coords._fields})

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """Return all groups of ranks along an axis, each in the order of its coordinate.

        Ranks of one group differ in this coordinate only. Along ep, they differ in d within one
        block of ep replicas; along edp, in d by multiples of ep. Along dp_cp they differ in d or c;
        along shard, too, within one group of replicas; along replica, in the group only.
        """
        groups: list[tuple[int, ...]] = []
        stride, size = self.steps[axis]
        for rank in range(self.world_size):
            is_first = rank // stride % size == 0
            if is_first:
                groups.append(tuple(range(rank, rank + size * stride, stride)))
        return groups


def _replicas_of(config: Config, dp: int, dp_of_all: int) -> int:
    """Return the groups that `dp` data ranks make, in a run that was started with `dp_of_all`.

    A group keeps its size: its ranks have no room for more than their shares. Raises ConfigError
    when the ranks do not make whole groups.
    """
    replicas = config.replicas
    if replicas == 1 or dp_of_all % replicas:
        return replicas  # what does not divide is refused with the other axes

    group = dp_of_all // replicas
    if dp % group:
        raise ConfigError(
            f"{dp} data rank(s) are no whole number of groups of {group}: the run was started with "
            f"replicas = {replicas} on {dp_of_all} data ranks"
        )
    return dp // group


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
    (peers,) = (group for group in layout.groups("dp_cp") if rank in group)

    # Ranks with the same experts are every unit-th one. All of them need one distance: the largest.
    unit = layout.ep if layout.dp > layout.ep else 1
    distances = []
    for i in range(unit):
        distances.append(mirror_distance([local_ranks[peer] for peer in peers[i::unit]]))
    distance = unit * max(distances)
    return distance, peers[(peers.index(rank) - distance) % len(peers)]

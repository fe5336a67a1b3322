"""Topologies (YAML files of link speeds), and the seconds of collectives on them.

    load_topology()     equal nodes of equal ranks    -> a link inside a node, one between nodes
    all_reduce() ...    topology, ranks, bytes        -> seconds
    placed()            layout, axis, topology        -> which link an axis uses, and its share of it

Pure arithmetic, for any number of ranks.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nanoray.config import refuse_unknown
from nanoray.config.layout import Layout
from nanoray.config.strict_yaml import read_file
from nanoray.errors import ConfigError
from nanoray.parallel.algorithms import cost

TOPOLOGY_DIR = Path(__file__).resolve().parents[2] / "config" / "topologies"
# Recursive doubling and flat send whole buffers at every step: at the size of gradient buckets they
# never win.
FLAT = ("ring", "tree", "double_tree", "halving_doubling")
MODELS = (*FLAT, "two_level")


def coefficients(algorithm: str, ranks: int, nbytes: int) -> tuple[float, float]:
    """Return the number of messages that follow each other, and the bytes on the busiest link.

    An all-reduce takes alpha · the first + beta · the second. `backend` counts as ring: gloo has
    only that, and NCCL chooses it inside a node.
    """
    # The cost is linear in alpha and beta: one at 1 and the other at 0 gives a coefficient.
    form = "ring" if algorithm == "backend" else algorithm
    return cost(form, ranks, nbytes, 1.0, 0.0), cost(form, ranks, nbytes, 0.0, 1.0)


class _Strict(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, coerce_numbers_to_str=True
    )


class Link(_Strict):
    """The latency of a message and the bandwidth of its bytes."""

    alpha_us: Annotated[float, Field(ge=0)]
    bandwidth_gb_per_s: Annotated[float, Field(gt=0)]

    def costs(self) -> tuple[float, float]:
        """Return alpha, seconds a message, and beta, seconds a byte."""
        return 1e-6 * self.alpha_us, 1e-9 / self.bandwidth_gb_per_s


class Topology(_Strict):
    """Equal nodes of equal ranks."""

    note: str = ""  # where the numbers come from
    ranks_per_node: Annotated[int, Field(ge=1)]
    intra: Link  # between two ranks of a node, while all of them talk
    inter: Link  # between two nodes: all network cards of a node together
    # Of a rank; without one there is no prediction of its compute
    peak_tflops: Annotated[float, Field(gt=0)] | None = None
    mfu: Annotated[float, Field(gt=0, le=1)] = 0.4  # share of the peak that a rank alone reaches
    memory_gb: Annotated[float, Field(gt=0)] | None = None  # of a rank's device, in 1e9 bytes


def topology_names() -> list[str]:
    """Return the names of the presets in nanoray/config/topologies."""
    return sorted(path.stem for path in TOPOLOGY_DIR.glob("*.yaml"))


def load_topology(name: str) -> Topology:
    """Read a preset of nanoray/config/topologies, or a YAML file by its path. Raises ConfigError."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else TOPOLOGY_DIR / f"{name}.yaml"
    # A name without a file is a typo of a preset; a path without a file fails below.
    if path.parent == TOPOLOGY_DIR and not path.is_file():
        refuse_unknown(name, topology_names(), "topology")
    try:
        return Topology.model_validate(read_file(path))
    except ValidationError as error:
        problems = []
        for item in error.errors():
            problems.append(f"{'.'.join(map(str, item['loc']))}: {item['msg']}")
        raise ConfigError(f"topology {path}: {'; '.join(problems)}") from None


def complete_topology(name: str) -> Topology:
    """Read a topology that has all numbers of a prediction. Raises ConfigError."""
    topology = load_topology(name)
    if not topology.peak_tflops:
        raise ConfigError(
            f"topology {name} has no peak_tflops, from which a step's compute follows; add it"
        )
    return topology


# The seconds of one collective.


def all_reduce(topology: Topology, algorithm: str, ranks: int, nbytes: int) -> float:
    """Return the seconds of an all-reduce over `ranks` that fill node after node; no switch blocks.

    flat       Of the messages that follow each other, as many cross nodes as the algorithm needs among the nodes
               alone; the bytes flow at the pace of the slowest link.
    two_level  Ring reduce-scatter inside each node, the fastest flat all-reduce among the nodes (every rank its part,
               so all network cards work), ring all-gather inside: three phases, one after the other.
    best       The fastest of them, as a tuner would choose.
    """
    if ranks == 1:
        return 0.0
    if algorithm == "best":
        algorithm = best(topology, ranks, nbytes)
    local = min(ranks, topology.ranks_per_node)
    nodes = math.ceil(ranks / local)
    intra, inter = topology.intra.costs(), topology.inter.costs()
    if algorithm == "two_level":
        among_s = min(cost(name, nodes, nbytes, *inter) for name in FLAT)
        return cost("ring", local, nbytes, *intra) + among_s

    # Flat: some messages cross nodes, and the slowest link in use sets the pace of all bytes.
    messages, moved = coefficients(algorithm, ranks, nbytes)
    crossing = 0.0
    slowest = 0.0
    if nodes > 1:
        crossing = coefficients(algorithm, nodes, nbytes)[0]
        slowest = inter[1]
    if local > 1:
        slowest = max(slowest, intra[1])
    return crossing * inter[0] + (messages - crossing) * intra[0] + moved * slowest


def best(topology: Topology, ranks: int, nbytes: int) -> str:
    """Return the fastest algorithm for these ranks and bytes."""
    return min(MODELS, key=lambda name: all_reduce(topology, name, ranks, nbytes))


# The other collectives. `nbytes` is the whole tensor: the result of an all-gather, or all that a
# rank sends in an all-to-all.


def all_gather(topology: Topology, ranks: int, nbytes: int) -> float:
    """Return the seconds of half a ring, flat or on two levels, whichever is faster."""
    local = min(ranks, topology.ranks_per_node)
    inside_s = cost("ring", local, nbytes, *topology.intra.costs())
    among_s = cost("ring", math.ceil(ranks / local), nbytes, *topology.inter.costs())
    return min(inside_s + among_s, all_reduce(topology, "ring", ranks, nbytes)) / 2


def all_to_all(topology: Topology, ranks: int, nbytes: int) -> float:
    """Return the seconds to send each rank its part: both links at once, one message per rank."""
    local = min(ranks, topology.ranks_per_node)
    intra, inter = topology.intra.costs(), topology.inter.costs()
    part = nbytes / ranks
    inside_s = (local - 1) * part * intra[1]
    outside_s = local * (ranks - local) * part * inter[1]  # all ranks of a node share its link
    latency_s = (local - 1) * intra[0] + (ranks - local) * inter[0]
    return latency_s + max(inside_s, outside_s)


def send(topology: Topology, ranks: int, nbytes: int) -> float:
    """Return the seconds of a message to the next rank; between nodes if `ranks` fill several."""
    if ranks == 1:
        return 0.0
    link = topology.inter if ranks > topology.ranks_per_node else topology.intra
    alpha_s, beta_s_per_byte = link.costs()
    return alpha_s + nbytes * beta_s_per_byte


# The groups of an axis on the nodes.


class GroupPlace(NamedTuple):
    """The place of a group of an axis on the nodes; where groups differ, of the slowest group."""

    ranks: int
    local: int  # of them on one node
    sharing: int  # groups whose bytes leave a node at the same time


def placed(layout: Layout, axis: str, ranks_per_node: int) -> GroupPlace:
    """Return the place of the groups of an axis. Rank r is on node r // ranks_per_node.

    `axis`: one of those that a layout has groups of.
    """
    stride, size = layout.steps[axis]
    on_node = min(ranks_per_node, layout.world_size)
    if layout.world_size <= ranks_per_node or ranks_per_node % (stride * size) == 0:
        return GroupPlace(size, size, on_node // size)

    # A group takes every `stride`-th rank, so a node has `per_node` places for its members. Groups
    # that do not divide these places, or a stride that drifts, leave some groups fewer on a node.
    per_node = max(1, ranks_per_node // stride)
    if size > per_node:
        local = per_node
    elif ranks_per_node % stride == 0:
        local = math.gcd(per_node, size)
    else:
        local = 1
    return GroupPlace(size, local, max(1, on_node // local))


def seen_by(topology: Topology, place: GroupPlace) -> Topology:
    """Return the topology of one group: its ranks on a node, its share of the link between nodes."""
    inter = topology.inter
    own = Link(alpha_us=inter.alpha_us, bandwidth_gb_per_s=inter.bandwidth_gb_per_s / place.sharing)
    return topology.model_copy(update={"ranks_per_node": place.local, "inter": own})

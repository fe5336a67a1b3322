"""What a rank sends to ranks of its own node, and to other nodes: the reason for hybrid sharding.

    talks of a step ─► where the groups of each axis lie (links.placed) ─► bytes inside, bytes between

The link between nodes is shared by all ranks of a node, so its bytes are a mean over them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from nanoray.forecast.job import Job
from nanoray.forecast.links import placed, share_between_nodes
from nanoray.forecast.parallelisms.data import ranks_of_group
from nanoray.forecast.parallelisms.record import Talk
from nanoray.forecast.traffic import talks_of
from nanoray.mesh.layout import Layout

MB = 1e6


class BytesSent(NamedTuple):
    """The bytes that a rank sends in a step."""

    inside: float  # to ranks of its node
    between: float  # to other nodes, mean over the ranks of a node


def sent_by_link(talks: Iterable[Talk], layout: Layout, ranks_per_node: int) -> BytesSent:
    """Return where the bytes of a rank go. Rank r is on node r // ranks_per_node."""
    inside = 0.0
    between = 0.0
    for talk in talks:
        place = placed(layout, talk.axis, ranks_per_node)
        nbytes = talk.sent(place.ranks)
        share = share_between_nodes(talk.op, place)
        inside += nbytes * (1 - share)
        between += nbytes * share
    return BytesSent(inside, between)


def link_lines(job: Job, layout: Layout, micro: int, ranks_per_node: int | None) -> list[str]:
    """Return the line of a dry run on what a rank sends inside its node and between nodes.

    `ranks_per_node`: None assumes that a group of replicas fills a node. Without groups nothing is
    assumed, and there is no line.
    """
    if layout.world_size == 1 or (ranks_per_node is None and layout.replicas == 1):
        return []
    about = ""
    if ranks_per_node is None:
        ranks_per_node = ranks_of_group(layout)
        about = f" (nodes of {ranks_per_node}, a group each)"

    stage = layout.pp - 1
    own = sent_by_link(talks_of(job, layout, micro, stage), layout, ranks_per_node)
    line = (
        f"links      a rank sends {own.inside / MB:,.1f} MB inside its node and "
        f"{own.between / MB:,.1f} MB between nodes a step{about}"
    )
    if layout.replicas > 1:
        flat = replace(layout, replicas=1)
        other = sent_by_link(talks_of(job, flat, micro, stage), flat, ranks_per_node)
        line += f"; without replicas {other.inside / MB:,.1f} and {other.between / MB:,.1f} MB"
    return [line]

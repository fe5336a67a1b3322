"""What a rank of a GPT sends in a step, by formulas: the kind, number and size of its collectives.

Each way to share the work says it in its record (parallelisms/).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from nanoray.forecast.job import Job
from nanoray.forecast.links import placed, share_between_nodes
from nanoray.forecast.parallelisms.record import Sender, Talk
from nanoray.forecast.parallelisms.registry import PARALLELISMS
from nanoray.mesh.layout import Layout


def talks_of(job: Job, layout: Layout, micro: int, stage: int) -> list[Talk]:
    """Return all that a rank of a stage sends in a step, except sums of single numbers."""
    accum = job.sequences // (layout.dp * micro)
    tokens = micro * job.shape.block_size // layout.cp
    sender = Sender(job, layout, stage, accum, tokens)
    talks = []
    for parallelism in PARALLELISMS:
        talks += parallelism.talks(sender)
    return talks


class BytesSent(NamedTuple):
    """The bytes that a rank sends in a step."""

    inside: float  # to ranks of its node
    between: float  # to other nodes, mean over the ranks of a node, which share the link


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

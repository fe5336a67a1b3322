"""What a rank of a GPT sends in a step, by formulas: the kind, number and size of its collectives.

Each way to share the work has a file in `talks/`, and a line here.
"""

from __future__ import annotations

from nanoray.forecast.job import Job
from nanoray.forecast.talks import context, experts, gradients, pipeline, rounds, tensor
from nanoray.forecast.talks.talk import Sender, Talk
from nanoray.mesh.layout import Layout

WAYS = (
    context.talks,
    tensor.talks,
    experts.talks,
    pipeline.talks,
    gradients.talks,
    rounds.talks,
)


def talks_of(job: Job, layout: Layout, micro: int, stage: int) -> list[Talk]:
    """Return all that a rank of a stage sends in a step, except sums of single numbers."""
    accum = job.sequences // (layout.dp * micro)
    tokens = micro * job.shape.block_size // layout.cp
    sender = Sender(job, layout, stage, accum, tokens)
    talks = []
    for way in WAYS:
        talks += way(sender)
    return talks

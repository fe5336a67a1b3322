"""What a rank of a GPT sends in a step, by formulas: the kind, number and size of its collectives.

Each way to share the work says it in its record (parallelisms/).
"""

from __future__ import annotations

from nanoray.cli.forecast.job import Job
from nanoray.cli.forecast.parallelisms.record import Sender, Talk
from nanoray.cli.forecast.parallelisms.registry import PARALLELISMS
from nanoray.config.layout import Layout


def talks_of(job: Job, layout: Layout, micro: int, stage: int) -> list[Talk]:
    """Return all that a rank of a stage sends in a step, except sums of single numbers."""
    accum = job.sequences // (layout.dp * micro)
    tokens = micro * job.shape.block_size // layout.cp
    sender = Sender(job, layout, stage, accum, tokens)
    talks = []
    for parallelism in PARALLELISMS:
        talks += parallelism.talks(sender)
    return talks

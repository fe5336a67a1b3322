"""The ways to share the work. To add one: docs/adding-a-parallelism.md.

Dry run, prediction, search and inspection loop over this list. Those that cut a model come in the
order in which a run cuts it (parallel/plan.py).
"""

from __future__ import annotations

from nanoray.cli.forecast.parallelisms import context, data, experts, pipeline, tensor
from nanoray.cli.forecast.parallelisms.record import Parallelism

PARALLELISMS: tuple[Parallelism, ...] = (
    tensor.TENSOR,
    context.CONTEXT,
    pipeline.PIPELINE,
    experts.EXPERTS,
    data.DATA,
)

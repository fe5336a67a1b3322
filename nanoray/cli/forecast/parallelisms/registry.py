"""The ways to share the work. To add one: docs/adding-a-parallelism.md.

Dry run, prediction and search loop over this list.
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

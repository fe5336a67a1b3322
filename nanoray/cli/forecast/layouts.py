"""The search for layouts: every dp·cp·tp·pp (and ep) of a number of ranks that can be trained.

A mode that shards the state is also tried with groups of replicas that fill whole nodes.

candidates ─► refusal by a rule ─► each micro batch that divides a replica's share ─► memory ─►
predicted step
"""

from __future__ import annotations

from collections.abc import Iterable

from nanoray.cli.forecast.job import Job
from nanoray.cli.forecast.parallelisms.record import Tried
from nanoray.cli.forecast.parallelisms.registry import PARALLELISMS
from nanoray.cli.forecast.predict import Network, Prediction, Speed, predict
from nanoray.cli.forecast.rank_memory import fits, memory_of
from nanoray.config import micro_batches
from nanoray.config.conflict_sizes import undivided_by_tp
from nanoray.config.conflicts import first
from nanoray.config.layout import Layout


def candidates(job: Job, ranks: int, ranks_per_node: int | None = None) -> Iterable[Layout]:
    """Return every layout that is worth a try: of each parallelism the sizes that it names.

    `ranks_per_node`: also with a sharded state in each group of whole nodes.
    """
    tried = Tried(job, ranks_per_node)
    layouts: Iterable[Layout] = (Layout(dp=ranks),)
    for parallelism in PARALLELISMS:
        layouts = [other for layout in layouts for other in parallelism.tries(tried, layout)]
    return layouts


def refusal(job: Job, layout: Layout) -> str | None:
    """Return the rule that a layout breaks, in the words of a start; None if it breaks none."""
    if job.sequences % layout.dp:
        return f"dp = {layout.dp} does not divide the step's {job.sequences} sequences"
    shape = job.shape
    problem = undivided_by_tp(layout.tp, shape.n_head, shape.n_embd, shape.padded_vocab)
    if problem:
        return problem
    # Rules on axes of one rank do not matter: a schedule without a pipeline changes nothing.
    divided = [axis for axis, size in layout.sizes().items() if axis != "dp" and size > 1]
    if not divided:
        return None
    return first(job.config_at(layout), ranks=layout.world_size, about=divided)


def fastest(
    job: Job, layout: Layout, most: int, network: Network, speed: Speed, memory_gb: float | None
) -> Prediction | None:
    """Return the fastest step of a layout that fits, over micro batches of at most `most`."""
    share = job.sequences // layout.dp
    steps = []
    for micro in micro_batches(job.config_at(layout), share):
        # A micro batch that does not fit is dropped before its step is predicted.
        if micro <= most and fits(memory_of(job, layout, micro), memory_gb):
            steps.append(predict(job, layout, micro, network, speed))
    # Of equally fast steps the smallest micro batch wins, because it needs less memory.
    return min(steps, key=lambda step: (step.step_s, step.micro), default=None)


def search(
    job: Job,
    ranks: int,
    most: int,
    network: Network,
    speed: Speed,
    memory_gb: float | None,
    ranks_per_node: int | None = None,
) -> list[Prediction]:
    """Return the step of each layout of `ranks` that can be trained and fits, the fastest first.

    `ranks_per_node`: see `candidates`.
    """
    steps = []
    for layout in candidates(job, ranks, ranks_per_node):
        if refusal(job, layout):
            continue
        step = fastest(job, layout, most, network, speed, memory_gb)
        if step is not None:
            steps.append(step)
    return sorted(steps, key=lambda step: step.step_s)

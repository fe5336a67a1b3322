"""The search for layouts: every dp·cp·tp·pp (and ep) of a number of ranks, refused by a rule, too
large, or predicted.

A mode that shards the state is also tried with groups of replicas that fill whole nodes.

candidates ─► refusal by a rule ─► each micro batch that divides a replica's share ─► memory ─►
predicted step
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nanoray.config import micro_batches
from nanoray.config.conflicts import excluded_layout
from nanoray.errors import ConfigError
from nanoray.forecast.job import Job
from nanoray.forecast.parallelisms.record import Tried
from nanoray.forecast.parallelisms.registry import PARALLELISMS
from nanoray.forecast.predict import Network, Prediction, Speed, memory_of, predict
from nanoray.mesh.layout import Layout

GB = 1e9
DOES_NOT_FIT = "does not fit"  # begins the refusal of a layout that needs too much memory
MOST_REASONS = 6  # that an error lists


@dataclass(frozen=True)
class Found:
    """A layout of the search: its fastest step that fits, or why there is none."""

    layout: Layout
    best: Prediction | None = None
    refused: str = ""


def factors(n: int) -> str:
    """Write n as a product of primes: 12 = 2*2*3."""
    primes = []
    rest = n
    k = 2
    while k * k <= rest:
        while rest % k == 0:
            primes.append(k)
            rest //= k
        k += 1
    # What remains has no divisor up to its square root, so it is prime.
    if rest > 1:
        primes.append(rest)
    if len(primes) < 2:
        return str(n)
    return f"{n} = {'*'.join(map(str, primes))}"


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
    """Return the rule that a layout breaks, with its numbers; None if it breaks none."""
    for parallelism in PARALLELISMS:
        reason = parallelism.refusal(job, layout)
        if reason:
            return reason
    # What a start would refuse, a search does not offer
    sizes = layout.sizes()
    del sizes["dp"]
    return excluded_layout(job.config, job.mode(layout), sizes, job.shape.experts)


def try_layout(
    job: Job, layout: Layout, most: int, network: Network, speed: Speed, memory_gb: float | None
) -> Found:
    """Predict a layout with each possible micro batch; return the fastest step that fits."""
    reason = refusal(job, layout)
    if reason:
        return Found(layout, refused=reason)
    share = job.sequences // layout.dp
    sizes = [micro for micro in micro_batches(job.config_at(layout), share) if micro <= most]
    if not sizes:
        return Found(
            layout, refused=f"a replica's {share} sequences are no groups of pp micro batches"
        )

    steps = []
    for micro in sizes:
        memory = memory_of(job, layout, micro)
        # A micro batch that does not fit is dropped before its step is predicted.
        if memory_gb is None or total(memory) <= GB * memory_gb:
            steps.append(predict(job, layout, micro, network, speed))
    if not steps:
        # The smallest micro batch needs the least memory, so its need is the one to report.
        least = memory_of(job, layout, sizes[0])
        return Found(layout, refused=f"{DOES_NOT_FIT}: {needs(least, memory_gb)}")
    # Of equally fast steps the smallest micro batch wins, because it needs less memory.
    return Found(layout, min(steps, key=lambda step: (step.step_s, step.micro)))


def total(memory: Mapping[str, int]) -> int:
    """Return the bytes of all parts."""
    return sum(memory.values())


def needs(memory: Mapping[str, int], memory_gb: float | None) -> str:
    """Write the memory that a rank needs, the memory of its device, and the two largest parts."""
    largest = sorted(memory.items(), key=lambda item: -item[1])[:2]
    parts = ", ".join(f"{name.replace('_', ' ')} {size / GB:.3g}" for name, size in largest)
    limit = f" of {memory_gb:g}" if memory_gb else ""
    return f"needs {total(memory) / GB:.3g} GB{limit} ({parts})"


def search(
    job: Job,
    ranks: int,
    most: int,
    network: Network,
    speed: Speed,
    memory_gb: float | None,
    ranks_per_node: int | None = None,
) -> list[Found]:
    """Return every layout of `ranks`, the fastest first, those without a step last.

    `ranks_per_node`: see `candidates`. Raises ConfigError if none has a step.
    """
    found = [
        try_layout(job, layout, most, network, speed, memory_gb)
        for layout in candidates(job, ranks, ranks_per_node)
    ]
    # Layouts without a step get infinite time, so they go to the end.
    found.sort(key=lambda layout: layout.best.step_s if layout.best else float("inf"))
    if found[0].best is None:
        reasons = [f"{format_layout(layout.layout)}: {layout.refused}" for layout in found]
        shown = reasons[:MOST_REASONS]
        if len(reasons) > MOST_REASONS:
            shown.append(f"and {len(reasons) - MOST_REASONS} more")
        raise ConfigError(
            f"no layout fits world_size = {factors(ranks)}: {'; '.join(shown)}; change "
            "world_size, the batch or --memory_gb"
        )
    return found


def format_layout(layout: Layout) -> str:
    """Write a layout with all its factors, also those of one rank."""
    axes, _, _ = layout.product.rpartition(" = ")
    if layout.ep > 1:
        return f"{axes}, ep = {layout.ep}"
    if layout.replicas > 1:
        return f"{axes}, replicas = {layout.replicas}"
    return axes


def why_slower(step: Prediction, best: Prediction) -> str:
    """Write the ratio of a step to the best one, and the two parts that grow most."""
    more = {name: seconds - best.parts[name] for name, seconds in step.parts.items()}
    longer = sorted((name for name in more if more[name] > 0), key=lambda name: -more[name])[:2]
    text = f"{step.step_s / best.step_s:.2f} × the step"
    if not longer:
        return text
    parts = [f"{name} {ms(step.parts[name])} ms against {ms(best.parts[name])}" for name in longer]
    return f"{text}: {', '.join(parts)}"


def ms(seconds: float) -> str:
    """Write seconds as milliseconds with three digits, or more if they stand before the point."""
    if seconds >= 0.1:
        return f"{1e3 * seconds:,.0f}"
    return f"{1e3 * seconds:.3g}"

"""The search for layouts: every dp·cp·tp·pp (and ep) of a number of ranks, refused by a rule, too
large, or predicted.

A mode that shards the state is also tried with groups of replicas that fill whole nodes.

candidates ─► refusal by a rule ─► each micro batch that divides a replica's share ─► memory ─►
predicted step
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from nanoray.config.conflicts import excluded_layout
from nanoray.config.mesh import SHARDS_STATE
from nanoray.errors import ConfigError
from nanoray.forecast.by_link import ranks_of_group
from nanoray.forecast.job import Job
from nanoray.forecast.predict import Network, Prediction, Speed, memory_of, predict
from nanoray.mesh.layout import Layout

GB = 1e9
DOES_NOT_FIT = "does not fit"  # begins the refusal of a layout that needs too much memory
MOST_REASONS = 6  # that an error lists
LEAST_TOKENS = 128  # of a sequence on a rank of cp, that a search tries


@dataclass(frozen=True)
class Found:
    """A layout of the search: its fastest step that fits, or why there is none."""

    layout: Layout
    best: Prediction | None = None
    refused: str = ""


def divisors(n: int) -> list[int]:
    """Return the divisors of n, rising."""
    # Divisors come in pairs, so a search up to the square root finds them all.
    low = [k for k in range(1, int(n**0.5) + 1) if n % k == 0]
    high = [n // k for k in low]
    return sorted({*low, *high})


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


def factorizations(ranks: int, experts: bool = False, tokens: int = 0) -> Iterator[Layout]:
    """Yield every dp·cp·tp·pp = ranks; with experts each ep that divides dp.

    `tokens`: of a sequence; 0: any. Each rank of cp takes two equal parts of it. Sizes of cp that
    leave a rank fewer than LEAST_TOKENS are no candidates: messages would take most of their time.
    """
    sizes = divisors(ranks)
    if tokens:
        sizes = [cp for cp in sizes if cp == 1 or _divides_sequences(cp, tokens)]
    for tp in divisors(ranks):
        for pp in divisors(ranks // tp):
            rest = ranks // tp // pp
            for cp in sizes:
                if rest % cp:
                    continue
                dp = rest // cp
                for ep in divisors(dp) if experts else [1]:
                    yield Layout(dp, tp, pp, ep, cp)


def _divides_sequences(cp: int, tokens: int) -> bool:
    """Return whether each of `cp` ranks gets two equal parts of a sequence, worth their messages."""
    return tokens % (2 * cp) == 0 and tokens // cp >= LEAST_TOKENS


def candidates(job: Job, ranks: int, ranks_per_node: int | None = None) -> Iterator[Layout]:
    """Yield every layout that is worth a try; on nodes also with a sharded state in each of them.

    Replicas that rarely communicate are single data ranks, or groups that shard their state.
    """
    for layout in factorizations(ranks, bool(job.experts), job.shape.block_size):
        if not job.config.sync_every:
            yield layout
        elif layout.dp > 1:
            yield replace(layout, replicas=layout.dp)
        shards = job.mode(layout) in SHARDS_STATE and layout.ep == 1
        if shards and ranks_per_node is not None:
            yield from _with_replicas(layout, ranks_per_node)


def _with_replicas(layout: Layout, ranks_per_node: int) -> Iterator[Layout]:
    """Yield a layout with each number of replicas whose groups fill whole nodes."""
    for replicas in divisors(layout.dp):
        # One group is the layout itself, and a group of one rank shards nothing.
        if replicas in (1, layout.dp):
            continue
        grouped = replace(layout, replicas=replicas)
        if ranks_of_group(grouped) % ranks_per_node == 0:
            yield grouped


def refusal(job: Job, layout: Layout) -> str:
    """Return the rule that a layout breaks, with its numbers; "" if it breaks none."""
    shape = job.shape
    tp = layout.tp
    pp = layout.pp

    # Sizes that must divide.
    cut_by_tp = {
        "n_head": shape.n_head,
        "4*n_embd": 4 * shape.n_embd,
        "the padded vocabulary": shape.padded_vocab,
    }
    for name, size in cut_by_tp.items():
        if size % tp:
            return f"tp does not divide {name} = {size}"
    cp = layout.cp
    if cp > 1 and shape.block_size % (2 * cp):
        return f"2*cp does not divide block_size = {shape.block_size}"
    first = job.config.seq_warmup_from
    if cp > 1 and job.config.seq_warmup_steps and first % (2 * cp):
        return f"2*cp does not divide the {first} tokens with which seq_warmup_steps begins"
    own = shape.block_size // cp
    if job.cuts_sequence(layout) and own % tp:
        of_rank = "block_size/cp" if cp > 1 else "block_size"
        return f"sequence_parallel: tp does not divide {of_rank} = {own}"
    # Each stage of an interleaved pipeline holds several chunks of layers.
    parts = pp * job.chunks if pp > 1 else 1
    if shape.n_layer % parts:
        chunks = f"*chunks = pp*{job.chunks}" if job.chunks > 1 else ""
        return f"pp{chunks} does not divide n_layer = {shape.n_layer}"
    # What a start would refuse, a search does not offer
    experts = job.experts.count if job.experts else 0
    axes = {"tp": tp, "pp": pp, "ep": layout.ep, "cp": layout.cp, "replicas": layout.replicas}
    excluded = excluded_layout(job.config, job.mode(layout), axes, experts)
    if excluded:
        return excluded
    # Experts are cut twice: tp divides the hidden units of each, ep divides their number.
    if job.experts and job.experts.hidden % tp:
        return f"tp does not divide expert_hidden = {job.experts.hidden}"
    if job.experts and job.experts.count % layout.ep:
        return f"ep does not divide experts = {job.experts.count}"
    if job.sequences % layout.dp:
        return f"dp does not divide the step's {job.sequences} sequences"
    return ""


def micros(job: Job, layout: Layout, most: int) -> list[int]:
    """Return the micro batches up to `most` sequences that divide a replica's share of a step."""
    share = job.sequences // layout.dp
    sizes = [micro for micro in divisors(share) if micro <= most]
    # The interleaved schedule takes micro batches in groups of pp.
    if job.schedule == "interleaved" and layout.pp > 1:
        sizes = [micro for micro in sizes if share // micro % layout.pp == 0]
    return sizes


def try_layout(
    job: Job, layout: Layout, most: int, network: Network, speed: Speed, memory_gb: float | None
) -> Found:
    """Predict a layout with each possible micro batch; return the fastest step that fits."""
    reason = refusal(job, layout)
    if reason:
        return Found(layout, refused=reason)
    sizes = micros(job, layout, most)
    if not sizes:
        share = job.sequences // layout.dp
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

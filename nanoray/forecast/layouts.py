"""The search for layouts: every dp·tp·pp (and ep) of a number of ranks, refused by a rule, too
large, or predicted.

factorizations ─► refusal by a rule ─► each micro batch that divides a replica's share ─► memory ─►
predicted step
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nanoray.config.conflicts import excluded_layout
from nanoray.errors import ConfigError
from nanoray.forecast.predict import Job, Network, Prediction, Speed, memory_of, predict
from nanoray.mesh.layout import Layout

GB = 1e9


@dataclass(frozen=True)
class Found:
    """A layout of the search: its fastest step that fits, or why there is none."""

    layout: Layout
    best: Prediction | None = None
    refused: str = ""


def divisors(n: int) -> list[int]:
    """Return the divisors of n, rising."""
    low = [k for k in range(1, int(n**0.5) + 1) if n % k == 0]
    return sorted({*low, *(n // k for k in low)})


def factors(n: int) -> str:
    """Write n as a product of primes: 12 = 2*2*3."""
    primes, rest, k = [], n, 2
    while k * k <= rest:
        while rest % k == 0:
            primes.append(k)
            rest //= k
        k += 1
    primes += [rest] if rest > 1 or not primes else []
    return f"{n} = {'*'.join(map(str, primes))}" if len(primes) > 1 else str(n)


def factorizations(ranks: int, experts: bool = False) -> Iterator[Layout]:
    """Yield every dp·tp·pp = ranks; with experts each ep that divides dp."""
    for tp in divisors(ranks):
        for pp in divisors(ranks // tp):
            dp = ranks // tp // pp
            for ep in divisors(dp) if experts else [1]:
                yield Layout(dp, tp, pp, ep)


def refusal(job: Job, layout: Layout) -> str:
    """Return the rule that a layout breaks, with its numbers; "" if it breaks none."""
    shape, tp, pp = job.shape, layout.tp, layout.pp
    sizes = {
        "n_head": shape.n_head,
        "4*n_embd": 4 * shape.n_embd,
        "the padded vocabulary": shape.padded_vocab,
    }
    if wrong := [f"{name} = {size}" for name, size in sizes.items() if size % tp]:
        return f"tp does not divide {wrong[0]}"
    if job.cuts_sequence(layout) and shape.block_size % tp:
        return f"sequence_parallel: tp does not divide block_size = {shape.block_size}"
    if shape.n_layer % (pp * job.chunks if pp > 1 else 1):
        chunks = f"*chunks = pp*{job.chunks}" if job.chunks > 1 else ""
        return f"pp{chunks} does not divide n_layer = {shape.n_layer}"
    # What a start would refuse, a search does not offer
    experts = job.experts.count if job.experts else 0
    excluded = excluded_layout(job.config, job.mode(layout), tp, pp, layout.ep, experts)
    if excluded:
        return excluded
    if job.experts and job.experts.hidden % tp:
        return f"tp does not divide expert_hidden = {job.experts.hidden}"
    if job.experts and job.experts.count % layout.ep:
        return f"ep does not divide experts = {job.experts.count}"
    if job.sequences % layout.dp:
        return f"dp does not divide the step's {job.sequences} sequences"
    return ""


def micros(job: Job, layout: Layout, most: int) -> list[int]:
    """Return the micro batches, of at most so many sequences, that divide a replica's share of the
    step.
    """
    share = job.sequences // layout.dp
    sizes = [micro for micro in divisors(share) if micro <= most]
    if job.schedule == "interleaved" and layout.pp > 1:  # takes them in groups of pp
        sizes = [micro for micro in sizes if share // micro % layout.pp == 0]
    return sizes


def look(
    job: Job, layout: Layout, most: int, network: Network, speed: Speed, memory_gb: float | None
) -> Found:
    """Predict one layout with each micro batch that it can have; the fastest that fits counts."""
    if why := refusal(job, layout):
        return Found(layout, refused=why)
    sizes = micros(job, layout, most)
    fits = [
        micro
        for micro in sizes
        if memory_gb is None or total(memory_of(job, layout, micro)) <= GB * memory_gb
    ]
    if not fits and sizes:
        return Found(
            layout, refused=f"does not fit: {needs(memory_of(job, layout, sizes[0]), memory_gb)}"
        )
    if not fits:
        share = job.sequences // layout.dp
        return Found(
            layout, refused=f"a replica's {share} sequences are no groups of pp micro batches"
        )
    steps = [predict(job, layout, micro, network, speed) for micro in fits]
    return Found(layout, min(steps, key=lambda step: (step.step_s, step.micro)))


def total(memory: dict[str, int]) -> int:
    """Return the bytes of all parts."""
    return sum(memory.values())


def needs(memory: dict[str, int], memory_gb: float | None) -> str:
    """Write what a rank needs of what its device has, and the two largest parts of it."""
    largest = sorted(memory.items(), key=lambda item: -item[1])[:2]
    told = ", ".join(f"{name.replace('_', ' ')} {size / GB:.3g}" for name, size in largest)
    return f"needs {total(memory) / GB:.3g} GB{f' of {memory_gb:g}' if memory_gb else ''} ({told})"


def search(
    job: Job, ranks: int, most: int, network: Network, speed: Speed, memory_gb: float | None
) -> list[Found]:
    """Look at every layout of so many ranks; those with a step first, the fastest first. Raises
    ConfigError if none.
    """
    found = [
        look(job, layout, most, network, speed, memory_gb)
        for layout in factorizations(ranks, bool(job.experts))
    ]
    found.sort(key=lambda one: one.best.step_s if one.best else float("inf"))
    if found[0].best is None:
        reasons = dict.fromkeys(f"{written(one.layout)}: {one.refused}" for one in found)
        shown = "; ".join(
            [*list(reasons)[:6], *([f"and {len(reasons) - 6} more"] if len(reasons) > 6 else [])]
        )
        raise ConfigError(
            f"no layout fits world_size = {factors(ranks)}: {shown}; change world_size, the batch "
            "or --memory_gb"
        )
    return found


def written(layout: Layout) -> str:
    """Write a layout with its factors, also those of one rank."""
    return f"dp*tp*pp = {layout.dp}*{layout.tp}*{layout.pp}" + (
        f", ep = {layout.ep}" if layout.ep > 1 else ""
    )


def why_slower(one: Prediction, best: Prediction) -> str:
    """Say in numbers what makes a layout slower than the best: the parts of its step that are
    longer.
    """
    more = {name: seconds - best.parts[name] for name, seconds in one.parts.items()}
    longer = sorted((name for name in more if more[name] > 0), key=lambda name: -more[name])[:2]
    ratio = one.step_s / best.step_s
    told = ", ".join(
        f"{name} {ms(one.parts[name])} ms against {ms(best.parts[name])}" for name in longer
    )
    return f"{ratio:.2f} × the step" + (f": {told}" if told else "")


def ms(seconds: float) -> str:
    """Write seconds as milliseconds with three digits, and all that stand before the point."""
    return f"{1e3 * seconds:,.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.3g}"

"""Predict a run's step for another link, bucket size, number of ranks or all-reduce, from its own traced steps.

    comm/steps.jsonl ─┬─ even ones ─► compute, buckets, link ─► simulate() ─┬─► the step as it was ─┐
                      │                                                     └─► what if             ├─ error
                      └─ odd ones ──► the step as measured ─────────────────────────────────────────┘

The compute of a step is that of its slowest rank, bucket by bucket. The link is a fit of the buckets' all-reduces; of
the time in which several of them are in flight, each counts its part, so in the simulation they follow each other. What
it leaves out: on a CPU, less communication also leaves more cores to compute.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from nanoray.cli import exit_code_of
from nanoray.errors import ConfigError
from nanoray.mesh.fit import Fit, fit
from nanoray.mesh.links import MODELS, Cost, Link, Topology, all_reduce, coefficients, load_topology
from nanoray.parallel.simulate import Bucket, Schedule, Step, simulate
from nanoray.trace.__main__ import read_steps
from nanoray.trace.log import PAUSES

KNOWN = {"dp_mode": "ddp", "grad_compress": "none", "tp": 1, "pp": 1, "ep": 1}
Times = list[tuple[int, float]]  # (bytes, seconds) of all-reduces


@dataclass(frozen=True)
class Traced:
    """One traced step."""

    step: Step  # what the slowest rank computed
    step_s: float  # as measured, mean over ranks
    times: Times


@dataclass(frozen=True)
class Past:
    """What the even traced steps of a run say of its compute and link, and the odd ones of its steps."""

    ranks: int
    algorithm: str
    step: Step
    link: Fit | Link
    alone: tuple[float, ...]  # measured steps that nothing was taken from


@dataclass(frozen=True)
class Question:
    """One thing to ask; what is None stays as it was."""

    bucket_mb: float | None = None
    ranks: int | None = None
    allreduce: str | None = None

    def __str__(self) -> str:
        parts = (f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}"
                 for key, value in vars(self).items() if value is not None)  # fmt: skip
        return ", ".join(parts) or "another link"


def parts_of(step: dict[str, Any]) -> Traced:
    """Return what a line of steps.jsonl says of a step's compute and its buckets."""
    buckets = sorted((c for c in step["collectives"] if c["bucket"] is not None), key=lambda c: max(c["enqueue_ms"]))
    before, after, begun = [], [], []
    for rank, phases in enumerate(step["phases"]):
        last = max(i for i, (name, _, _) in enumerate(phases) if name == "backward")
        spans = [0.0 if name in PAUSES else end - start for name, start, end in phases]
        before.append(sum(spans[:last]))
        sent = max(c["end_ms"][rank] for c in buckets)
        after.append(max(0.0, phases[last][2] - sent) + sum(spans[last + 1 :]))  # backward does not end with its sums
        begun.append(phases[last][1])
    forward_ms, at = statistics.fmean(before), statistics.fmean(begun)
    ready = [max(1e-3, max(c["enqueue_ms"]) - at) for c in buckets]
    marks = tuple(Bucket(1e-3 * ms, c["bytes"]) for ms, c in zip(ready, buckets, strict=True))
    own = Step(1e-3 * forward_ms, marks[-1].ready_s, 1e-3 * statistics.fmean(after), marks)
    flights = [(max(c["start_ms"]), max(c["start_ms"]) + 1e-3 * c["time_us"]) for c in buckets]
    times = [(c["bytes"], 1e-3 * ms) for c, ms in zip(buckets, shared(flights), strict=True)]
    return Traced(own, 1e-3 * step["figures"]["step_ms"], times)


def shared(spans: Sequence[tuple[float, float]]) -> list[float]:
    """Return what each of these intervals has of the time: where k overlap, a k-th."""
    moments = sorted({moment for span in spans for moment in span})
    mine = [0.0] * len(spans)
    for start, end in pairwise(moments):
        there = [i for i, span in enumerate(spans) if span[0] <= start and end <= span[1]]
        for i in there:
            mine[i] += (end - start) / len(there)
    return mine


def read_past(run: Path) -> Past:
    """Read the traced steps of a run's newest group of ranks. Raises ConfigError for a run that cannot be asked."""
    try:
        config = json.loads((run / "config.json").read_text(encoding="utf-8"))
        algorithm = config["allreduce"]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"cannot read {run / 'config.json'}: {error}; give the folder of a run") from None
    others = [f"{key} = {config[key]}" for key, known in KNOWN.items() if config.get(key, known) != known]
    if others:
        raise ConfigError(
            f"{run} has {', '.join(others)}: only steps whose buckets are summed by one all-reduce each are known; "
            "ask a run of dp_mode ddp, and for layouts `nanoray bench layouts`"
        )
    lines = read_steps(run)
    lines = [s for s in lines if s["attempt"] == lines[-1]["attempt"] and len(s["phases"]) == len(lines[-1]["phases"])]
    quiet = [s for s in lines if not s["figures"]["profiled"]] or lines
    steps = [parts_of(step) for step in quiet if any(c["bucket"] is not None for c in step["collectives"])]
    known, ranks = steps[::2], len(lines[-1]["phases"])
    times = [time for s in known for time in s.times if time[1] > 0]
    if not times:
        raise ConfigError(f"the traced steps of {run} have no buckets; trace a run of 2 ranks or more on gloo or NCCL")
    sizes = {nbytes for nbytes, _ in times}
    link: Fit | Link
    if len(sizes) > 1:
        link = fit(times, algorithm, ranks)
    else:  # one size: all of it counts as transfer
        (size,) = sizes
        rate = coefficients(algorithm, ranks, size)[1] / statistics.median(seconds for _, seconds in times)
        link = Link(alpha_us=0.0, bandwidth_gb_per_s=1e-9 * rate)
    return Past(ranks, algorithm, _median([s.step for s in known]), link, tuple(s.step_s for s in steps[1::2] or steps))


def _median(steps: Sequence[Step]) -> Step:
    """Return a step of the medians of each part."""
    first = steps[0]
    ready = [statistics.median(s.buckets[i].ready_s for s in steps) for i in range(len(first.buckets))]
    buckets = tuple(Bucket(at, b.nbytes) for at, b in zip(sorted(ready), first.buckets, strict=True))
    of = {key: statistics.median(getattr(s, key) for s in steps) for key in ("forward_s", "optimizer_s")}
    return replace(first, **of, backward_s=buckets[-1].ready_s, buckets=buckets)


def cut_anew(buckets: Sequence[Bucket], bucket_mb: float) -> tuple[Bucket, ...]:
    """Return buckets of another size: gradients become ready at an even pace between the moments that are known."""
    cap, total = round(bucket_mb * 2**20), sum(b.nbytes for b in buckets)
    marks = [(0.0, 0)]
    for bucket in buckets:
        marks.append((bucket.ready_s, marks[-1][1] + bucket.nbytes))

    def ready(nbytes: int) -> float:
        (a, low), (b, high) = next(pair for pair in pairwise(marks) if nbytes <= pair[1][1])
        return a + (b - a) * (nbytes - low) / (high - low)

    ends = [*range(cap, total, cap), total]
    return tuple(Bucket(ready(end), end - start) for start, end in zip([0, *ends], ends, strict=False))


def ask(past: Past, question: Question, topology: Topology) -> Schedule:
    """Simulate the run's step as asked. Each rank computes what it did, whatever the number of ranks."""
    step = past.step
    if question.bucket_mb:
        step = replace(step, buckets=cut_anew(step.buckets, question.bucket_mb))
    name = question.allreduce or past.algorithm
    name = "ring" if name == "backend" else name
    ranks = question.ranks or past.ranks

    def collective(nbytes: int) -> Cost:
        return all_reduce(topology, name, ranks, nbytes)

    return simulate(step, collective, topology.lanes)


def lines(run: Path, questions: Sequence[Question], other: Callable[[Link], Topology]) -> list[str]:
    """Return a run's step as predicted and as measured, and the answers. `other`: the link asked for."""
    past = read_past(run)
    link = past.link if isinstance(past.link, Link) else past.link.link
    own = Topology(ranks_per_node=2**20, intra=link, inter=link)
    told = f"{link.alpha_us:.0f} us a message, {link.bandwidth_gb_per_s:.3g} GB/s"
    doubt = f"median error {100 * past.link.median_error:.0f} %" if isinstance(past.link, Fit) else (
        "all buckets have one size, so latency counts as transfer"
    )  # fmt: skip
    was, real_s = ask(past, Question(), own), statistics.median(past.alone)
    sizes = sorted({b.nbytes / 2**20 for b in past.step.buckets})
    found = [
        f"run    {run.name}: {past.ranks} ranks, {len(past.step.buckets)} bucket(s) of {sizes[0]:.3g} to "
        f"{sizes[-1]:.3g} MB, all-reduce {past.algorithm}",
        f"link   {told} ({doubt})",
        f"error  predicted {1e3 * was.step_s:.1f} ms, measured {1e3 * real_s:.1f} ms "
        f"({1e3 * min(past.alone):.1f}-{1e3 * max(past.alone):.1f}, n = {len(past.alone)}): "
        f"{100 * (was.step_s / real_s - 1):+.0f} %, for the run as it was",
    ]
    rows = [("what if", "step ms", "exposed ms", "against as it was"), _row("as it was", was, was)]
    rows += [_row(str(question), ask(past, question, other(link)), was) for question in questions]
    width = max(len(row[0]) for row in rows)
    return found + [f"{name:<{width}}  {step:>8}  {exposed:>10}  {ratio:>17}" for name, step, exposed, ratio in rows]


def _row(name: str, plan: Schedule, was: Schedule) -> tuple[str, str, str, str]:
    return name, f"{1e3 * plan.step_s:.1f}", f"{1e3 * plan.exposed_s:.1f}", f"{plan.step_s / was.step_s:.2f} x"


def main(argv: list[str] | None = None) -> int:
    """Run `nanoray whatif RUN [--bucket_mb 1,8] [--ranks 4,64] ...` and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="nanoray whatif", description=__doc__.splitlines()[0], epilog="Lists: each is combined with each."
    )  # fmt: skip
    parser.add_argument("run", type=Path, help="folder of a run of dp_mode ddp that was started with --comm_trace")
    parser.add_argument("--topology", help="preset of nanoray/topologies, or a YAML file: its links, in place of these")
    parser.add_argument("--latency_us", type=float, help="of a message, in place of the fitted one")
    parser.add_argument("--bandwidth_gb_per_s", type=float, help="of a link, in place of the fitted one")
    parser.add_argument("--bucket_mb", type=_list(float), default=[None], help="sizes of a bucket")
    parser.add_argument("--ranks", type=_list(int), default=[None], help="numbers of ranks, each with its batch as now")
    parser.add_argument("--allreduce", type=_list(str), default=[None], help=f"of {', '.join((*MODELS, 'best'))}")
    args = parser.parse_args(argv)
    return exit_code_of(lambda: _run(args))


def _run(args: argparse.Namespace) -> None:
    own_link = args.latency_us is not None or args.bandwidth_gb_per_s is not None
    if args.topology and own_link:
        raise ConfigError("topology has links of its own; drop latency_us and bandwidth_gb_per_s, or topology")
    if unknown := {*args.allreduce} - {None, "best", *MODELS}:
        raise ConfigError(f"allreduce = {', '.join(unknown)}: use one of {', '.join((*MODELS, 'best'))}")
    numbers = [n for n in (*args.bucket_mb, *args.ranks, args.bandwidth_gb_per_s) if n is not None]
    if any(n <= 0 for n in numbers) or (args.latency_us or 0) < 0:
        raise ConfigError(f"{', '.join(f'{n:g}' for n in numbers)}: sizes, ranks and speeds are above 0")

    def other(link: Link) -> Topology:
        if args.topology:
            return load_topology(args.topology).filled(link)
        asked = {"alpha_us": args.latency_us, "bandwidth_gb_per_s": args.bandwidth_gb_per_s}
        link = link.model_copy(update={key: value for key, value in asked.items() if value is not None})
        return Topology(ranks_per_node=2**20, intra=link, inter=link)

    questions = [Question(*each) for each in product(args.bucket_mb, args.ranks, args.allreduce)]
    changed = [q for q in questions if own_link or args.topology or q != Question()]
    print("\n".join(lines(args.run, changed, other)))


def _list(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    def parse(text: str) -> list[Any]:
        return [kind(part) for part in text.split(",")]

    parse.__name__ = f"list of {kind.__name__}"  # as argparse names it in an error
    return parse


if __name__ == "__main__":
    raise SystemExit(main())

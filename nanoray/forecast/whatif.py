"""Predict a run's step for another link, bucket size, number of ranks or all-reduce, from its own
traced steps.

    comm/steps.jsonl ─┬─ even ones ─► compute, buckets, link ─► simulate() ─┬─► the step as it was ─┐
                      │                                                     └─► what if             ├─ error
                      └─ odd ones ──► the step as measured ─────────────────────────────────────────┘

The compute of a step is that of its slowest rank, bucket by bucket. The link is a fit of the
buckets' all-reduces; of the time in which several of them are in flight, each counts its part, so
in the simulation they follow each other. What it leaves out: on a CPU, less communication also
leaves more cores to compute.

    ddp            buckets: all-reduce beside backward
    zero1, zero2   buckets: reduce-scatter beside backward; then all-gather of the weights beside log and data, and what
                   is left of it before forward
    fsdp on CPU    all-gathers and reduce-scatters of units, for which forward and backward wait; on a GPU they run
                   beside compute, and the trace does not say how much of it they take

A reduce-scatter and an all-gather take half as long as an all-reduce each. Sums of single numbers
count as compute.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

from nanoray.cli import exit_code_of
from nanoray.errors import ConfigError
from nanoray.forecast.fit import Fit, fit
from nanoray.forecast.links import (
    MODELS,
    Cost,
    Link,
    Topology,
    all_gather,
    all_reduce,
    all_to_all,
    coefficients,
    load_topology,
    send,
)
from nanoray.forecast.simulate import NOTHING, Bucket, Schedule, Step, simulate
from nanoray.trace.__main__ import read_steps
from nanoray.trace.log import PAUSES
from nanoray.trace.timeline import group_of

KNOWN = {"grad_compress": "none", "tp": 1, "pp": 1, "ep": 1}
PARTS = ("forward", "backward", "optimizer")
MODES = ("ddp", "zero1", "zero2", "fsdp")
# Where the state is sharded
SHARED = {"all_gather": all_gather, "reduce_scatter": all_to_all, "send_recv": send}
# To simulate them takes two seconds, and four times as long for twice as many
MOST_BUCKETS = 10_000
Times = list[tuple[int, float]]  # (bytes, seconds) of all-reduces


class Wait(NamedTuple):
    """A collective that a rank waits for, and where: 0 before the last backward, 1 in it, 2 after
    its buckets.
    """

    where: int
    op: str
    nbytes: int


@dataclass(frozen=True)
class Traced:
    """One traced step."""

    step: Step  # what the slowest rank computed
    step_s: float  # as measured, mean over ranks
    times: Times
    waits: tuple[Wait, ...]
    between_s: float  # from the update to the next forward: weights are gathered meanwhile


@dataclass(frozen=True)
class Past:
    """What the even traced steps of a run say of its compute and link, and the odd ones of its
    steps.
    """

    mode: str
    ranks: int
    algorithm: str
    step: Step
    waits: tuple[Wait, ...]
    between_s: float
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
    """Return what a line of steps.jsonl says of a step's compute, its buckets, and what it waits
    for.
    """
    buckets = sorted(
        (c for c in step["collectives"] if c["bucket"] is not None),
        key=lambda c: max(c["enqueue_ms"]),
    )
    calls = [
        c
        for c in step["collectives"]
        if c["bucket"] is None and c["op"] in SHARED and c["phase"] not in PAUSES
    ]
    before, after, begun, ended, between = [], [], [], [], []
    for rank, phases in enumerate(step["phases"]):
        last = max(i for i, (name, _, _) in enumerate(phases) if name == "backward")
        first = next(i for i, (name, _, _) in enumerate(phases) if name == "forward")
        spans = [0.0 if name in PAUSES else end - start for name, start, end in phases]
        sent = max((c["end_ms"][rank] for c in buckets), default=phases[last][2])
        before.append(sum(spans[:last]))
        # Backward does not end with its sums
        after.append(max(0.0, phases[last][2] - sent) + sum(spans[last + 1 :]))
        between.append(
            sum(span for i, span in enumerate(spans) if i < first or phases[i][0] == "log")
        )
        begun.append(phases[last][1])
        ended.append(sent)
    where = [(c["start_ms"][0] >= begun[0]) + (c["start_ms"][0] >= ended[0]) for c in calls]
    waits = tuple(Wait(i, c["op"], c["bytes"]) for i, c in zip(where, calls, strict=True))
    waited = [
        1e-3 * sum(c["time_us"] for at, c in zip(where, calls, strict=True) if at == i)
        for i in range(3)
    ]
    at = statistics.fmean(begun)
    ready = [max(1e-3, max(c["enqueue_ms"]) - at) for c in buckets]
    marks = tuple(Bucket(1e-3 * ms, c["bytes"]) for ms, c in zip(ready, buckets, strict=True))
    forward_s = 1e-3 * max(0.0, statistics.fmean(before) - waited[0])
    backward_s = (
        marks[-1].ready_s if marks else 1e-3 * max(0.0, statistics.fmean(ended) - at - waited[1])
    )
    own = Step(forward_s, backward_s, 1e-3 * max(0.0, statistics.fmean(after) - waited[2]), marks)
    flights = [(max(c["start_ms"]), max(c["start_ms"]) + 1e-3 * c["time_us"]) for c in buckets]
    times = [(c, 1e-3 * ms) for c, ms in zip(buckets, shared(flights), strict=True)]
    times = times or [(c, 1e-6 * c["time_us"]) for c in calls if c["op"] != "send_recv"]
    halves = [(c["bytes"], seconds * (1 if c["op"] == "all_reduce" else 2)) for c, seconds in times]
    return Traced(
        own, 1e-3 * step["figures"]["step_ms"], halves, waits, 1e-3 * statistics.fmean(between)
    )


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
    """Read the traced steps of a run's newest group of ranks. Raises ConfigError for a run that
    cannot be asked.
    """
    mode, algorithm = _mode_of(run)
    lines = read_steps(run)
    lines = [
        s
        for s in lines
        if group_of(s) == group_of(lines[-1]) and len(s["phases"]) == len(lines[-1]["phases"])
    ]
    quiet = [s for s in lines if not s["figures"]["profiled"]] or lines
    travels = [
        s
        for s in quiet
        if any(c["bucket"] is not None or c["op"] in SHARED for c in s["collectives"])
    ]
    steps, ranks = [parts_of(step) for step in travels], len(lines[-1]["phases"])
    known = steps[::2]
    times = [time for s in known for time in s.times if time[1] > 0]
    if not times:
        raise ConfigError(
            f"the traced steps of {run} have no buckets; trace a run of 2 ranks or more on gloo or "
            "NCCL"
        )
    sent = [c["bucket"] for c in travels[-1]["collectives"] if c["bucket"] is not None]
    if len(sent) > len({*sent}):
        raise ConfigError(
            f"{run} sends each bucket in several backwards of a step (zero2 with grad_accum_steps "
            "above 1), and only "
            "the last one is known; ask a run with grad_accum_steps 1, or of dp_mode zero1"
        )
    sizes = {nbytes for nbytes, _ in times}
    link: Fit | Link
    if len(sizes) > 1:
        link = fit(times, algorithm, ranks)
    else:  # one size: all of it counts as transfer
        (size,) = sizes
        rate = coefficients(algorithm, ranks, size)[1] / statistics.median(
            seconds for _, seconds in times
        )
        link = Link(alpha_us=0.0, bandwidth_gb_per_s=1e-9 * rate)
    # Other gathers: see `ask`
    waits = tuple(w for w in known[-1].waits if mode == "fsdp" or w.op == "send_recv")
    between_s = statistics.median(s.between_s for s in known)
    alone = tuple(s.step_s for s in steps[1::2] or steps)
    return Past(
        mode, ranks, algorithm, _median([s.step for s in known]), waits, between_s, link, alone
    )


def _mode_of(run: Path) -> tuple[str, str]:
    """Return a run's dp_mode, and which all-reduce its collectives count as. Raises ConfigError for
    an unknown one.
    """
    ended = run / "summary.json"
    try:
        config = json.loads((run / "config.json").read_text(encoding="utf-8"))
        algorithm, mode = config["allreduce"], config.get("dp_mode", "ddp")
        device = (json.loads(ended.read_text(encoding="utf-8")) if ended.exists() else config).get(
            "device"
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"cannot read config and summary of {run}: {error}; give the folder of a run"
        ) from None
    others = [
        f"{key} = {config[key]}" for key, known in KNOWN.items() if config.get(key, known) != known
    ]
    others += [f"dp_mode = {mode}"] * (mode not in MODES)
    if others:
        raise ConfigError(
            f"{run} has {', '.join(others)}: only what travels in {', '.join(MODES)} with whole "
            "gradients, without tp, "
            "pp and ep, is known; for layouts there is `nanoray bench layouts`"
        )
    if mode == "fsdp" and device != "cpu":
        raise ConfigError(
            f"{run} has dp_mode = fsdp on device = {device}: gathers run beside compute there, and "
            "the trace does not "
            "say how long it waits for them; ask a finished run on CPUs, or one of zero1 or zero2"
        )
    return mode, algorithm if mode == "ddp" else "ring"


def _median(steps: Sequence[Step]) -> Step:
    """Return a step of the medians of each part."""
    first = steps[0]
    ready = [
        statistics.median(s.buckets[i].ready_s for s in steps) for i in range(len(first.buckets))
    ]
    buckets = tuple(
        Bucket(at, b.nbytes) for at, b in zip(sorted(ready), first.buckets, strict=True)
    )
    of = {f"{key}_s": statistics.median(getattr(s, f"{key}_s") for s in steps) for key in PARTS}
    return replace(
        first, **of | ({"backward_s": buckets[-1].ready_s} if buckets else {}), buckets=buckets
    )


def cut_anew(buckets: Sequence[Bucket], bucket_mb: float) -> tuple[Bucket, ...]:
    """Return buckets of another size: gradients become ready at an even pace between the moments
    that are known.
    """
    cap, total = max(4, round(bucket_mb * 2**20)), sum(b.nbytes for b in buckets)
    if total > cap * MOST_BUCKETS:
        remedy = f"give {1.05 * total / MOST_BUCKETS / 2**20:.2g} or more"
        raise ConfigError(
            f"bucket_mb = {bucket_mb:g} makes more than {MOST_BUCKETS:,} buckets; {remedy}"
        )
    marks = [(0.0, 0)]
    for bucket in buckets:
        marks.append((bucket.ready_s, marks[-1][1] + bucket.nbytes))

    def ready(nbytes: int) -> float:
        (a, low), (b, high) = next(pair for pair in pairwise(marks) if nbytes <= pair[1][1])
        return a + (b - a) * (nbytes - low) / (high - low)

    ends = [*range(cap, total, cap), total]
    return tuple(
        Bucket(ready(end), end - start) for start, end in zip([0, *ends], ends, strict=False)
    )


def ask(past: Past, question: Question, topology: Topology) -> Schedule:
    """Simulate the run's step as asked. Each rank computes what it did, whatever the number of
    ranks.
    """
    step, ranks = past.step, question.ranks or past.ranks
    if question.bucket_mb:
        step = replace(step, buckets=cut_anew(step.buckets, question.bucket_mb))
    name = question.allreduce or past.algorithm
    name = "ring" if name == "backend" else name
    waits = [
        [SHARED[w.op](topology, ranks, w.nbytes) for w in past.waits if w.where == i]
        for i in range(3)
    ]
    if past.mode in ("zero1", "zero2"):
        gather_s = sum(
            all_gather(topology, ranks, bucket.nbytes).seconds for bucket in step.buckets
        )
        waits[0].append(Cost(max(0.0, gather_s - past.between_s), 0.0))
    forward, backward, after = (Cost(*map(sum, zip(NOTHING, *each, strict=True))) for each in waits)

    def collective(nbytes: int) -> Cost:
        ddp = past.mode == "ddp"
        return (
            all_reduce(topology, name, ranks, nbytes)
            if ddp
            else all_to_all(topology, ranks, nbytes)
        )

    step = replace(step, waits=(forward, backward), optimizer_s=step.optimizer_s + after.seconds)
    return simulate(step, collective, topology.lanes)


def lines(run: Path, questions: Sequence[Question], other: Callable[[Link], Topology]) -> list[str]:
    """Return a run's step as predicted and as measured, and the answers. `other`: the link asked
    for.
    """
    past = read_past(run)
    _refuse(past, questions)
    link = past.link if isinstance(past.link, Link) else past.link.link
    own = Topology(ranks_per_node=2**20, intra=link, inter=link)
    told = f"{link.alpha_us:.0f} us a message, {link.bandwidth_gb_per_s:.3g} GB/s"
    doubt = f"median error {100 * past.link.median_error:.0f} %" if isinstance(past.link, Fit) else (
        "all buckets have one size, so latency counts as transfer"
    )  # fmt: skip
    was, real_s = ask(past, Question(), own), statistics.median(past.alone)
    what, sizes = _travels(past)
    found = [
        f"run    {run.name}: {past.ranks} ranks, {what} of {min(sizes) / 2**20:.3g} to "
        f"{max(sizes) / 2**20:.3g} MB, "
        + (f"all-reduce {past.algorithm}" if past.mode == "ddp" else past.mode),
        f"link   {told} ({doubt})",
        f"error  predicted {1e3 * was.step_s:.1f} ms, measured {1e3 * real_s:.1f} ms "
        f"({1e3 * min(past.alone):.1f}-{1e3 * max(past.alone):.1f}, n = {len(past.alone)}): "
        f"{100 * (was.step_s / real_s - 1):+.0f} %, for the run as it was",
    ]
    compute_s = past.step.compute_s
    rows = [
        ("what if", "step ms", "exposed ms", "against as it was"),
        _row("as it was", was, was, compute_s),
    ]
    rows += [
        _row(str(question), ask(past, question, other(link)), was, compute_s)
        for question in questions
    ]
    width = max(len(row[0]) for row in rows)
    return found + [
        f"{name:<{width}}  {step:>8}  {exposed:>10}  {ratio:>17}"
        for name, step, exposed, ratio in rows
    ]


def _travels(past: Past) -> tuple[str, list[int]]:
    """Return what travels in a step, and its sizes."""
    if past.step.buckets:
        return f"{len(past.step.buckets)} bucket(s)", [
            bucket.nbytes for bucket in past.step.buckets
        ]
    ops = [wait.op for wait in past.waits]
    what = f"{ops.count('all_gather')} all-gather(s) and {ops.count('reduce_scatter')} reduce-scatter(s)"
    return what, [wait.nbytes for wait in past.waits]


def _refuse(past: Past, questions: Sequence[Question]) -> None:
    """Raise ConfigError for what a mode has nothing of."""
    if past.mode != "ddp" and any(question.allreduce for question in questions):
        raise ConfigError(
            f"allreduce would be ignored: dp_mode = {past.mode} sums no gradients by all-reduce; "
            "drop it"
        )
    if past.mode == "fsdp" and any(question.bucket_mb for question in questions):
        raise ConfigError(
            "bucket_mb would be ignored: fsdp's units are the model's layers; drop it"
        )


def _row(name: str, plan: Schedule, was: Schedule, compute_s: float) -> tuple[str, str, str, str]:
    exposed_ms = max(0.0, 1e3 * (plan.step_s - compute_s))
    return (
        name,
        f"{1e3 * plan.step_s:.1f}",
        f"{exposed_ms:.1f}",
        f"{plan.step_s / was.step_s:.2f} x",
    )


def main(argv: list[str] | None = None) -> int:
    """Run `nanoray whatif RUN [--bucket_mb 1,8] [--ranks 4,64] ...` and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="nanoray whatif", description=__doc__.splitlines()[0], epilog="Lists: each is combined with each."
    )  # fmt: skip
    parser.add_argument("run", type=Path, help="folder of a run that was started with --comm_trace")
    parser.add_argument(
        "--topology",
        help="preset of nanoray/topologies, or a YAML file: its links, in place of these",
    )
    parser.add_argument("--latency_us", type=float, help="of a message, in place of the fitted one")
    parser.add_argument(
        "--bandwidth_gb_per_s", type=float, help="of a link, in place of the fitted one"
    )
    parser.add_argument("--bucket_mb", type=_list(float), default=[None], help="sizes of a bucket")
    parser.add_argument(
        "--ranks",
        type=_list(int),
        default=[None],
        help="numbers of ranks, each with its batch as now",
    )
    parser.add_argument(
        "--allreduce", type=_list(str), default=[None], help=f"of {', '.join((*MODELS, 'best'))}"
    )
    args = parser.parse_args(argv)
    return exit_code_of(lambda: _run(args))


def _run(args: argparse.Namespace) -> None:
    own_link = args.latency_us is not None or args.bandwidth_gb_per_s is not None
    if args.topology and own_link:
        raise ConfigError(
            "topology has links of its own; drop latency_us and bandwidth_gb_per_s, or topology"
        )
    if unknown := {*args.allreduce} - {None, "best", *MODELS}:
        raise ConfigError(
            f"allreduce = {', '.join(unknown)}: use one of {', '.join((*MODELS, 'best'))}"
        )
    numbers = [n for n in (*args.bucket_mb, *args.ranks, args.bandwidth_gb_per_s) if n is not None]
    if not all(0 < n < math.inf for n in numbers) or not 0 <= (args.latency_us or 0) < math.inf:
        told = ", ".join(f"{n:g}" for n in (*numbers, args.latency_us) if n is not None)
        raise ConfigError(
            f"{told}: sizes, ranks and speeds are above 0, a latency at least 0, and all are finite"
        )

    def other(link: Link) -> Topology:
        if args.topology:
            return load_topology(args.topology).filled(link)
        asked = {"alpha_us": args.latency_us, "bandwidth_gb_per_s": args.bandwidth_gb_per_s}
        link = link.model_copy(
            update={key: value for key, value in asked.items() if value is not None}
        )
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

"""Predict a run's step for another link, bucket size, rank count or all-reduce, from its trace.

    comm/steps.jsonl ─┬─ even ones ─► compute, buckets, link ─► simulate() ─┬─► the step as it was ─┐
                      │                                                     └─► what if             ├─ error
                      └─ odd ones ──► the step as measured ─────────────────────────────────────────┘

The compute of a step is that of its slowest rank, bucket by bucket. The link is a fit of the
buckets' all-reduces; they share the time in which several of them are in flight, so in the
simulation they follow each other. Left out: on a CPU, less communication also leaves more cores for
compute.

    ddp            buckets: all-reduce beside backward
    zero1, zero2   buckets: reduce-scatter beside backward; then an all-gather of the weights beside
                   log and data, whose rest delays forward
    fsdp on CPU    all-gathers and reduce-scatters of units, for which forward and backward wait; on
                   a GPU they run beside compute, and the trace does not measure how much they take

A reduce-scatter and an all-gather take half as long as an all-reduce each. Sums of single numbers
count as compute.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

from nanoray.base.atomic import json_mapping
from nanoray.cli import Parser, exit_code_of, name_program, tool_parser
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
    in_sequence,
    load_topology,
    send,
)
from nanoray.forecast.simulate import SimulatedBucket, SimulatedStep, Step, simulate
from nanoray.mesh.layout import DIVISIONS
from nanoray.trace.__main__ import read_steps
from nanoray.trace.log import PAUSES
from nanoray.trace.timeline import group_of

KNOWN = {
    "grad_compress": "none",
    **dict.fromkeys(DIVISIONS, 1),
    "sync_every": 0,
}
MODES = ("ddp", "zero1", "zero2", "fsdp")
# Collectives of a sharded state, by the function that prices them
SHARED = {"all_gather": all_gather, "reduce_scatter": all_to_all, "send_recv": send}
# Their simulation takes two seconds, and four times as long for twice as many
MOST_BUCKETS = 10_000
Times = list[tuple[int, float]]  # (bytes, seconds) of all-reduces


class Wait(NamedTuple):
    """A collective for which compute waits."""

    where: int  # 0: before the last backward, 1: in it, 2: after its buckets
    op: str
    nbytes: int


@dataclass(frozen=True)
class Traced:
    """One traced step."""

    step: Step  # the compute of the slowest rank
    step_s: float  # as measured, mean over ranks
    times: Times
    waits: tuple[Wait, ...]
    between_s: float  # from the update to the next forward: weights are gathered meanwhile


@dataclass(frozen=True)
class FittedRun:
    """The model of a run: compute and link from its even traced steps, step times from the odd."""

    mode: str
    ranks: int
    algorithm: str
    step: Step
    waits: tuple[Wait, ...]
    between_s: float
    link: Fit | Link
    alone: tuple[float, ...]  # measured steps that the model was not made from


@dataclass(frozen=True)
class Question:
    """A change to predict. None: as in the run."""

    bucket_mb: float | None = None
    ranks: int | None = None
    allreduce: str | None = None

    def __str__(self) -> str:
        parts = []
        for key, value in vars(self).items():
            if isinstance(value, float):
                parts.append(f"{key} {value:g}")
            elif value is not None:
                parts.append(f"{key} {value}")
        return ", ".join(parts) or "another link"


class _RankTimes(NamedTuple):
    """The milliseconds of one rank in a traced step."""

    before: float  # phases before the last backward
    after: float  # from the end of the last bucket, without pauses
    between: float  # phases before the first forward, and the log
    begun: float  # the moment at which the last backward begins
    ended: float  # the moment at which the last bucket has arrived


def parts_of(step: dict[str, Any]) -> Traced:
    """Return the compute, the buckets and the waits of a line of steps.jsonl."""
    buckets = sorted(
        (call for call in step["collectives"] if call["bucket"] is not None),
        key=lambda call: max(call["enqueue_ms"]),
    )
    calls = [
        call
        for call in step["collectives"]
        if call["bucket"] is None and call["op"] in SHARED and call["phase"] not in PAUSES
    ]
    of_ranks = [
        _rank_times(phases, [bucket["end_ms"][rank] for bucket in buckets])
        for rank, phases in enumerate(step["phases"])
    ]

    # The calls for which compute waits, by their place in the step.
    begun = of_ranks[0].begun
    ended = of_ranks[0].ended
    waits = []
    waited_ms = [0.0, 0.0, 0.0]
    for call in calls:
        start = call["start_ms"][0]
        where = (start >= begun) + (start >= ended)
        waits.append(Wait(where, call["op"], call["bytes"]))
        waited_ms[where] += call["time_us"] / 1e3

    # Compute is a phase without the waits inside of it, mean over the ranks.
    def mean(key: str) -> float:
        return statistics.fmean(getattr(times, key) for times in of_ranks)

    backward_begin_ms = mean("begun")
    ready = []
    for bucket in buckets:
        ready_ms = max(1e-3, max(bucket["enqueue_ms"]) - backward_begin_ms)
        ready.append(SimulatedBucket(1e-3 * ready_ms, bucket["bytes"]))
    forward_s = 1e-3 * max(0.0, mean("before") - waited_ms[0])
    optimizer_s = 1e-3 * max(0.0, mean("after") - waited_ms[2])
    if ready:
        backward_s = ready[-1].ready_s
    else:
        backward_s = 1e-3 * max(0.0, mean("ended") - backward_begin_ms - waited_ms[1])

    return Traced(
        step=Step(forward_s, backward_s, optimizer_s, tuple(ready)),
        step_s=1e-3 * step["figures"]["step_ms"],
        times=_all_reduce_times(buckets, calls),
        waits=tuple(waits),
        between_s=1e-3 * mean("between"),
    )


def _rank_times(phases: Sequence[tuple[str, float, float]], bucket_ends: list[float]) -> _RankTimes:
    """Return the times of a rank from its phases: (name, start, end) in milliseconds."""
    names = [name for name, _, _ in phases]
    first_forward = names.index("forward")
    last_backward = max(i for i, name in enumerate(names) if name == "backward")
    spans = [0.0 if name in PAUSES else end - start for name, start, end in phases]
    _, begun, backward_end = phases[last_backward]
    ended = max(bucket_ends, default=backward_end)

    between = sum(
        span
        for i, (name, span) in enumerate(zip(names, spans, strict=True))
        if i < first_forward or name == "log"
    )
    # Backward may compute for a while after its last sum.
    after = max(0.0, backward_end - ended) + sum(spans[last_backward + 1 :])
    return _RankTimes(sum(spans[:last_backward]), after, between, begun, ended)


def _all_reduce_times(buckets: list[dict[str, Any]], calls: list[dict[str, Any]]) -> Times:
    """Return bytes and seconds of each bucket or, without buckets, of each gather and scatter.

    Every time is that of an all-reduce, which takes as long as two of the other collectives.
    """
    flights = []
    for bucket in buckets:
        start_ms = max(bucket["start_ms"])
        flights.append((start_ms, start_ms + 1e-3 * bucket["time_us"]))
    seconds = [1e-3 * ms for ms in shared(flights)]
    timed = list(zip(buckets, seconds, strict=True))
    if not timed:
        timed = [(call, 1e-6 * call["time_us"]) for call in calls if call["op"] != "send_recv"]

    times = []
    for call, seconds_of_call in timed:
        factor = 1 if call["op"] == "all_reduce" else 2
        times.append((call["bytes"], factor * seconds_of_call))
    return times


def shared(spans: Sequence[tuple[float, float]]) -> list[float]:
    """Return the time of each interval; where k overlap, each counts for a k-th."""
    moments = sorted({moment for span in spans for moment in span})
    shares = [0.0] * len(spans)
    for start, end in pairwise(moments):
        open_spans = [i for i, span in enumerate(spans) if span[0] <= start and end <= span[1]]
        for i in open_spans:
            shares[i] += (end - start) / len(open_spans)
    return shares


def read_past(run: Path) -> FittedRun:
    """Read the traced steps of a run's newest group of ranks.

    Raises ConfigError for a run without a prediction.
    """
    mode, algorithm = _mode_of(run)
    records = read_steps(run)
    newest = records[-1]
    ranks = len(newest["phases"])
    records = [
        record
        for record in records
        if group_of(record) == group_of(newest) and len(record["phases"]) == ranks
    ]
    # Older versions sometimes profiled a step, which is slower: it counts only without others.
    records = [record for record in records if not record["figures"].get("profiled")] or records
    with_traffic = [record for record in records if _has_traffic(record)]
    steps = [parts_of(record) for record in with_traffic]

    # The even steps make the model; the odd ones are what it is compared with.
    known = steps[::2]
    times = [time for step in known for time in step.times if time[1] > 0]
    if not times:
        raise ConfigError(
            f"the traced steps of {run} have no buckets; trace a run of 2 ranks or more on gloo or "
            "NCCL"
        )
    sent = [call["bucket"] for call in with_traffic[-1]["collectives"]]
    sent = [bucket for bucket in sent if bucket is not None]
    if len(sent) > len(set(sent)):
        raise ConfigError(
            f"{run} sends each bucket in several backwards of a step (zero2 with grad_accum_steps "
            "above 1), and only the last one is known; ask a run with grad_accum_steps 1, or of "
            "dp_mode zero1"
        )

    # zero1 and zero2 gather weights elsewhere in the step: see `ask`.
    waits = known[-1].waits
    if mode != "fsdp":
        waits = tuple(wait for wait in waits if wait.op == "send_recv")
    return FittedRun(
        mode=mode,
        ranks=ranks,
        algorithm=algorithm,
        step=_median([step.step for step in known]),
        waits=waits,
        between_s=statistics.median(step.between_s for step in known),
        link=_fit_link(times, algorithm, ranks),
        alone=tuple(step.step_s for step in steps[1::2] or steps),
    )


def _has_traffic(record: dict[str, Any]) -> bool:
    """Return whether a traced step has buckets, or collectives of a sharded state."""
    return any(call["bucket"] is not None or call["op"] in SHARED for call in record["collectives"])


def _fit_link(times: Times, algorithm: str, ranks: int) -> Fit | Link:
    """Return the link of measured all-reduces. With one size all of its time counts as transfer."""
    sizes = {nbytes for nbytes, _ in times}
    if len(sizes) > 1:
        return fit(times, algorithm, ranks)
    (size,) = sizes
    _, moved = coefficients(algorithm, ranks, size)
    rate = moved / statistics.median(seconds for _, seconds in times)
    return Link(alpha_us=0.0, bandwidth_gb_per_s=1e-9 * rate)


def _mode_of(run: Path) -> tuple[str, str]:
    """Return a run's dp_mode, and the all-reduce that its collectives count as.

    Raises ConfigError for a mode without a prediction.
    """
    try:
        config = json_mapping((run / "config.json").read_text(encoding="utf-8"))
        algorithm = config["allreduce"]
        mode = config.get("dp_mode", "ddp")
        # A summary has the device of the run, a configuration perhaps only `auto`.
        device = config.get("device")
        summary = run / "summary.json"
        if summary.exists():
            device = json_mapping(summary.read_text(encoding="utf-8")).get("device")
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"cannot read config and summary of {run}: {error}; give the folder of a run"
        ) from None
    others = [
        f"{key} = {config[key]}" for key, known in KNOWN.items() if config.get(key, known) != known
    ]
    if mode not in MODES:
        others.append(f"dp_mode = {mode}")
    if others:
        raise ConfigError(
            f"{run} has {', '.join(others)}: only what travels in {', '.join(MODES)} with whole "
            "gradients, without cp, tp, pp, ep, replicas and rounds, is known; for layouts there is "
            "`python -m nanoray.bench layouts`, and for rounds `python -m nanoray.launch --dry_run "
            "--world_size N`"
        )
    if mode == "fsdp" and device != "cpu":
        raise ConfigError(
            f"{run} has dp_mode = fsdp on device = {device}: gathers run beside compute there, and "
            "the trace does not say how long it waits for them; ask a finished run on CPUs, or one "
            "of zero1 or zero2"
        )
    return mode, algorithm if mode == "ddp" else "ring"


def _median(steps: Sequence[Step]) -> Step:
    """Return a step of the medians of each part."""
    first = steps[0]
    ready = []
    for number in range(len(first.buckets)):
        ready.append(statistics.median(step.buckets[number].ready_s for step in steps))
    # Medians of neighbours may change places, but buckets become ready in order.
    buckets = tuple(
        SimulatedBucket(ready_s, bucket.nbytes)
        for ready_s, bucket in zip(sorted(ready), first.buckets, strict=True)
    )
    backward_s = statistics.median(step.backward_s for step in steps)
    if buckets:
        backward_s = buckets[-1].ready_s
    return replace(
        first,
        forward_s=statistics.median(step.forward_s for step in steps),
        backward_s=backward_s,
        optimizer_s=statistics.median(step.optimizer_s for step in steps),
        buckets=buckets,
    )


def cut_anew(buckets: Sequence[SimulatedBucket], bucket_mb: float) -> tuple[SimulatedBucket, ...]:
    """Return buckets of another size.

    Between the known moments, gradients become ready at an even pace.
    """
    cap = max(4, round(bucket_mb * 2**20))
    total = sum(bucket.nbytes for bucket in buckets)
    if total > cap * MOST_BUCKETS:
        remedy = f"give {1.05 * total / MOST_BUCKETS / 2**20:.2g} or more"
        raise ConfigError(
            f"bucket_mb = {bucket_mb:g} makes more than {MOST_BUCKETS:,} buckets; {remedy}"
        )

    # (seconds, bytes that are ready by then)
    marks = [(0.0, 0)]
    for bucket in buckets:
        marks.append((bucket.ready_s, marks[-1][1] + bucket.nbytes))

    def ready_s(nbytes: int) -> float:
        for (start_s, low), (end_s, high) in pairwise(marks):
            if nbytes <= high:
                return start_s + (end_s - start_s) * (nbytes - low) / (high - low)
        raise AssertionError("no bucket ends after the last gradient")

    ends = [*range(cap, total, cap), total]
    return tuple(SimulatedBucket(ready_s(end), end - start) for start, end in pairwise([0, *ends]))


def ask(past: FittedRun, question: Question, topology: Topology) -> SimulatedStep:
    """Simulate the run's step with the changes of a question.

    Each rank computes as before, whatever the number of ranks.
    """
    step = past.step
    ranks = question.ranks or past.ranks
    if question.bucket_mb:
        step = replace(step, buckets=cut_anew(step.buckets, question.bucket_mb))
    name = question.allreduce or past.algorithm
    if name == "backend":
        name = "ring"

    # Waits: in forward, in backward, after it.
    waits: list[list[Cost]] = [[], [], []]
    for wait in past.waits:
        waits[wait.where].append(SHARED[wait.op](topology, ranks, wait.nbytes))
    if past.mode in ("zero1", "zero2"):
        # Weights are gathered between the steps, and forward waits for the rest.
        gather_s = sum(
            all_gather(topology, ranks, bucket.nbytes).seconds for bucket in step.buckets
        )
        waits[0].append(Cost(max(0.0, gather_s - past.between_s), 0.0))
    forward, backward, after = (in_sequence((1, cost) for cost in costs) for costs in waits)

    def collective(nbytes: int) -> Cost:
        if past.mode == "ddp":
            return all_reduce(topology, name, ranks, nbytes)
        return all_to_all(topology, ranks, nbytes)

    step = replace(step, waits=(forward, backward), optimizer_s=step.optimizer_s + after.seconds)
    return simulate(step, collective, topology.lanes)


def lines(run: Path, questions: Sequence[Question], other: Callable[[Link], Topology]) -> list[str]:
    """Return a run's step as predicted and as measured, and the answers.

    `other`: from the fitted link to the topology of the questions.
    """
    past = read_past(run)
    _refuse(past, questions)
    if isinstance(past.link, Fit):
        link = past.link.link
        quality = f"median error {100 * past.link.median_error:.0f} %"
    else:
        link = past.link
        quality = "all buckets have one size, so latency counts as transfer"

    # The run as it was: predicted, and measured on the steps that the model was not made from.
    own = Topology(ranks_per_node=2**20, intra=link, inter=link)
    baseline = ask(past, Question(), own)
    real_s = statistics.median(past.alone)
    what, sizes = _contents(past)
    how = f"all-reduce {past.algorithm}" if past.mode == "ddp" else past.mode
    report = [
        f"run    {run.name}: {past.ranks} ranks, {what} of {min(sizes) / 2**20:.3g} to "
        f"{max(sizes) / 2**20:.3g} MB, {how}",
        f"link   {link.alpha_us:.0f} us a message, {link.bandwidth_gb_per_s:.3g} GB/s ({quality})",
        f"error  predicted {1e3 * baseline.step_s:.1f} ms, measured {1e3 * real_s:.1f} ms "
        f"({1e3 * min(past.alone):.1f}-{1e3 * max(past.alone):.1f}, n = {len(past.alone)}): "
        f"{100 * (baseline.step_s / real_s - 1):+.0f} %, for the run as it was",
    ]

    compute_s = past.step.compute_s
    rows = [
        ("what if", "step ms", "exposed ms", "against as it was"),
        _row("as it was", baseline, baseline, compute_s),
    ]
    for question in questions:
        answer = ask(past, question, other(link))
        rows.append(_row(str(question), answer, baseline, compute_s))
    width = max(len(row[0]) for row in rows)
    for name, step, exposed, ratio in rows:
        report.append(f"{name:<{width}}  {step:>8}  {exposed:>10}  {ratio:>17}")
    return report


def _contents(past: FittedRun) -> tuple[str, list[int]]:
    """Return the kind and number of messages of a step, and their sizes."""
    if past.step.buckets:
        sizes = [bucket.nbytes for bucket in past.step.buckets]
        return f"{len(sizes)} bucket(s)", sizes
    ops = [wait.op for wait in past.waits]
    what = (
        f"{ops.count('all_gather')} all-gather(s) and {ops.count('reduce_scatter')} "
        "reduce-scatter(s)"
    )
    return what, [wait.nbytes for wait in past.waits]


def _refuse(past: FittedRun, questions: Sequence[Question]) -> None:
    """Raise ConfigError for a question that has no effect in the run's mode."""
    if past.mode != "ddp" and any(question.allreduce for question in questions):
        raise ConfigError(
            f"allreduce would be ignored: dp_mode = {past.mode} sums no gradients by all-reduce; "
            "drop it"
        )
    if past.mode == "fsdp" and any(question.bucket_mb for question in questions):
        raise ConfigError(
            "bucket_mb would be ignored: fsdp's units are the model's layers; drop it"
        )


def _row(
    name: str, step: SimulatedStep, baseline: SimulatedStep, compute_s: float
) -> tuple[str, str, str, str]:
    exposed_ms = max(0.0, 1e3 * (step.step_s - compute_s))
    ratio = step.step_s / baseline.step_s
    return name, f"{1e3 * step.step_s:.1f}", f"{exposed_ms:.1f}", f"{ratio:.2f} x"


def make_parser() -> Parser:
    """Return the parser of `nanoray whatif`."""
    parser = tool_parser(name_program("whatif"), (__doc__ or "").partition("\n")[0])
    parser.epilog = "Lists: each is combined with each."
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
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run `nanoray whatif RUN [--bucket_mb 1,8] [--ranks 4,64] ...` and return the exit code."""
    return exit_code_of(lambda: _run(make_parser().parse_args(argv)))


def _run(args: argparse.Namespace) -> None:
    own_link = args.latency_us is not None or args.bandwidth_gb_per_s is not None
    if args.topology and own_link:
        raise ConfigError(
            "topology has links of its own; drop latency_us and bandwidth_gb_per_s, or topology"
        )
    unknown = set(args.allreduce) - {None, "best", *MODELS}
    if unknown:
        raise ConfigError(
            f"allreduce = {', '.join(unknown)}: use one of {', '.join((*MODELS, 'best'))}"
        )
    numbers = [n for n in (*args.bucket_mb, *args.ranks, args.bandwidth_gb_per_s) if n is not None]
    if not all(0 < n < math.inf for n in numbers) or not 0 <= (args.latency_us or 0) < math.inf:
        values = ", ".join(f"{n:g}" for n in (*numbers, args.latency_us) if n is not None)
        raise ConfigError(
            f"{values}: sizes, ranks and speeds are above 0, a latency at least 0, and all are finite"
        )

    def other(link: Link) -> Topology:
        if args.topology:
            return load_topology(args.topology).filled(link)
        given = {"alpha_us": args.latency_us, "bandwidth_gb_per_s": args.bandwidth_gb_per_s}
        given = {key: value for key, value in given.items() if value is not None}
        link = link.model_copy(update=given)
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

"""Merge the notes of all ranks: metrics, stragglers, and one line per traced step on disk.

runs/.../comm/
    steps.jsonl      every traced step: phases and collectives of all ranks, in ms on rank 0's clock
    buckets.json     which parameters travel in which bucket
"""

from __future__ import annotations

import json
import os
import statistics
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from nanoray.config.layout import Layout
from nanoray.machine.atomic import write_json
from nanoray.machine.metrics import algbw_gbps, busbw_factor
from nanoray.observe.trace.costs import (
    ClockOffset,
    Collective,
    StepCost,
    account,
    union_length,
)

# Phases of a step
# Not counted in a step's time; the last two are those of a program whose loop is not ours
PAUSES = ("eval", "checkpoint", "set-up", "closing")
IDLE = "idle"  # a stage of a pipeline waits for another one
# Axes whose groups lie within a stage of a pipeline, and are numbered in it
IN_A_STAGE = Layout().steps.keys() - {"pp", "ep", "edp"}
TURNS = ("data", "forward", "backward")  # what the stages of a pipeline do between waits
# Phases in which a rank can be slower than the others
WORK = ("data", "forward", "backward", "optimizer", "log")

# A straggler was behind in 6 of the last 8 traced steps
LATE_OF = 8
LATE_TIMES = 6
LATE_FRACTION = 0.2  # of the other ranks' own work; less is noise
LATE_MS = 5.0  # and so is this: a busy machine takes a core away for some milliseconds

DETAIL_BYTES = 256 << 20  # of steps.jsonl; later steps are written without collectives

# Figures of a step that are summed over steps, and those of which the mean is a metric
MEANS = ("step_ms", "busy_ms", "exposed_ms", "hidden_ms", "skew_ms", "late_ms")
SUMS = ("bus_bytes", "transfer_s")


class CommLog:
    """Collects the notes of all ranks. (rank 0 only)"""

    def __init__(
        self,
        folder: Path,
        resume_step: int,
        attempt: int,
        sizes: Mapping[str, int] | None = None,
        bubble: float | None = None,
        started: float = 0.0,  # Unix s of the command, which counts its attempts from 0
        partial: bool = False,  # keep collectives in which only some ranks take part
    ) -> None:
        """Open the log in `folder`, and drop its steps after `resume_step`.

        `sizes`: how many ranks share a collective of an axis (tp, pp, dp), where that is not all
        of them. `bubble`: the share of the time that a stage of a pipeline waits by its schedule;
        None: there is no pipeline.
        """
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self._group = {"attempt": attempt, "started": started}
        self._sizes = sizes if sizes is not None else {}  # a caller may add some later
        self._partial = partial
        self._bubble = bubble
        # (late rank, the phase it is late in, ms behind the others) of the newest steps
        self._late: deque[tuple[int, str, float]] = deque(maxlen=LATE_OF)
        # The newest straggler; its `until` is None while it is still behind
        self._straggler: dict[str, Any] | None = None
        self._total = Totals()
        self._slowest: dict[str, Any] = {}  # the bucket that took longest
        self._failed = ""  # the error of the first failed write
        self._file = _open_at(folder / "steps.jsonl", resume_step)

    def add(
        self,
        notes: list[list[dict[str, Any]]],
        offsets: Sequence[ClockOffset],
        buckets: dict[int, list[str]],
    ) -> tuple[dict[str, float], list[str]]:
        """Add the notes of all ranks, in rank order.

        Returns the metrics of the next record, and messages for the user.
        """
        messages: list[str] = []
        added = Totals()
        for rank_notes in zip(*notes, strict=True):  # one step, as each rank saw it
            step = merge(rank_notes, offsets, self._sizes, self._partial) | self._group
            figures = step["figures"]
            if not figures["step_ms"]:  # only a pause: after the last step
                messages += self._write(step, buckets)
                continue

            step_buckets = [c for c in step["collectives"] if c["bucket"] is not None]
            # The slowest bucket of the whole run, for the summary.
            candidates = [*step_buckets, self._slowest]
            self._slowest = max(candidates, key=lambda c: c.get("time_us") or 0.0)

            messages += self._name_straggler(figures)
            added.add(figures)
            self._total.add(figures)
            messages += self._write(step, buckets)

        # The record has the means of the steps since the last one.
        if not added.steps:
            return {}, messages
        metrics = {f"comm/{k}": value for k, value in added.means().items() if k != "hidden_ms"}
        if self._bubble is not None and added.steps:
            metrics["pipe/bubble"] = added.sums["bubble"] / added.steps
            metrics["pipe/bubble_theory"] = 100 * self._bubble
        return metrics, messages

    def _write(self, step: dict[str, Any], buckets: dict[int, list[str]]) -> list[str]:
        """Append a step to the file; after a failed write (a full disk) warn and write no more."""
        if self._failed:
            return []
        # A long run keeps its figures; its collectives would fill the disk.
        if self._file.tell() > DETAIL_BYTES:
            step = {key: step[key] for key in ("step", *self._group, "figures")}
        try:
            self._file.write(json.dumps(step) + "\n")
            self._file.flush()
            if self._total.steps == 1:  # the first of this group
                write_json(self.folder / "buckets.json", buckets)
        except OSError as error:
            self._failed = str(error)
            return [f"warning  collectives are no longer written to {self._file.name}: {error}"]
        return []

    def _name_straggler(self, figures: dict[str, Any]) -> list[str]:
        """Report once that a rank is often far behind the others, and once that it no longer is."""
        behind_ms = figures["late_ms"]
        if behind_ms <= max(LATE_MS, LATE_FRACTION * figures["others_ms"]):
            behind_ms = 0.0  # noise
        self._late.append((figures["late_rank"], figures["late_phase"], behind_ms))

        # A straggler that was reported keeps up again when it was late in few of the newest steps.
        if self._straggler and not self._straggler["until"]:
            reported_rank = self._straggler["rank"]
            late_steps = sum(rank == reported_rank and ms > 0 for rank, _, ms in self._late)
            if late_steps >= LATE_TIMES // 2:
                return []
            self._straggler["until"] = figures["step"]
            return [f"straggler  rank {reported_rank} keeps up again, at step {figures['step']}"]

        # A rank becomes a straggler when it was late in most of the newest steps.
        late_rank = figures["late_rank"]
        delays = [(phase, ms) for rank, phase, ms in self._late if rank == late_rank and ms]
        if len(delays) < LATE_TIMES:
            return []
        phase = statistics.mode(phase for phase, _ in delays)
        median_ms = statistics.median(ms for _, ms in delays)
        self._straggler = {
            "rank": late_rank,
            "phase": phase,
            "behind_ms": median_ms,
            "since": figures["step"],
            "until": None,
        }
        return [
            f"straggler  rank {late_rank}: {median_ms:.1f} ms a step behind the others "
            f"({figures['others_ms']:.1f} ms of own work), most of it in {phase}; seen in "
            f"{len(delays)} of {len(self._late)} traced steps, at step {figures['step']}"
        ]

    def finish(self, offsets: Sequence[ClockOffset]) -> dict[str, Any]:
        """Close the log, and return the summary."""
        self._file.close()
        total = self._total
        if not total.steps:
            return {"traced_steps": 0}
        mean = total.means()
        summary: dict[str, Any] = {
            key: mean.get(key) for key in (*MEANS[:4], "exposed_share", "busbw_gbps")
        }
        if self._slowest:
            keys = ("step", "bucket", "bytes", "time_us", "skew_us")
            summary["slowest"] = {key: self._slowest[key] for key in keys}
        if self._bubble is not None:
            summary["bubble"] = total.sums["bubble"] / total.steps
            summary["bubble_theory"] = 100 * self._bubble

        clock = "one host, one clock"
        uncertainties = [offset.uncertainty for offset in offsets if offset.uncertainty]
        if uncertainties:
            clock = f"hosts compared to ± {1e6 * max(uncertainties):.0f} µs"
        return summary | {
            "traced_steps": total.steps,
            "busy_share": 100 * mean["busy_ms"] / mean["step_ms"],
            "straggler": self._straggler,
            "clock": clock,
        }


def _open_at(path: Path, resume_step: int) -> TextIO:
    """Open steps.jsonl to append after `resume_step`; drop later steps, which will be repeated."""
    if path.exists():
        # A line that was cut off by a kill does not end with }, and is dropped, too.
        shortened = path.with_suffix(".tmp")
        with path.open(encoding="utf-8") as old, shortened.open("w", encoding="utf-8") as new:
            for line in old:  # not parsed, because lines are long and the other ranks wait
                step = line.removeprefix('{"step": ').partition(",")[0]
                if step.isdecimal() and int(step) <= resume_step and line.endswith("}\n"):
                    new.write(line)
        os.replace(shortened, path)
    return path.open("a", encoding="utf-8")


class Totals:
    """Sums over traced steps, and their means."""

    def __init__(self) -> None:
        self.steps = 0
        self.sums: Counter[str] = Counter()
        self.late: Counter[int] = Counter()

    def add(self, figures: dict[str, Any]) -> None:
        """Count one more step."""
        self.steps += 1
        for key in (*MEANS, *SUMS, "bubble"):
            self.sums[key] += figures[key]
        self.late[figures["late_rank"]] += 1

    def means(self) -> dict[str, float]:
        """Return the metrics: means per step, and the rank that was late most often."""
        mean: dict[str, float] = {key: self.sums[key] / self.steps for key in MEANS}
        # Shares of means, not means of shares: long steps count more.
        mean["exposed_share"] = 100 * mean["exposed_ms"] / mean["step_ms"]
        mean["late_rank"] = self.late.most_common(1)[0][0]
        if self.sums["transfer_s"]:
            mean["busbw_gbps"] = algbw_gbps(self.sums["bus_bytes"], self.sums["transfer_s"])
        return mean


def merge(
    rank_notes: Sequence[dict[str, Any]],
    offsets: Sequence[ClockOffset],
    sizes: Mapping[str, int] | None = None,
    partial: bool = False,
) -> dict[str, Any]:
    """Merge one step's notes of all ranks, in ms of rank 0's clock from the step's first phase.

    A collective's `time_us` begins when its last rank has started it: min over ranks of (end -
    start). So the wait for a late rank (`skew_us`) does not look like a slow link. Collectives of
    an axis whose `sizes` are fewer ranks run in several groups beside each other: they make one
    row, with the ranks of one of them. The stages of a pipeline have rows of their own, in which
    the times of the other ranks are None; `partial`: so has any collective of some of the ranks.
    """
    sizes = sizes or {}
    ranks = range(len(rank_notes))
    begins = []  # of each rank's first phase, in seconds of rank 0's clock
    for notes, offset in zip(rank_notes, offsets, strict=True):
        begins.append(notes["phases"][0][1] - offset.offset)
    origin = min(begins)

    def ms(seconds: float, rank: int) -> float:
        """Convert a moment of a rank's clock."""
        return 1e3 * (seconds - offsets[rank].offset - origin)

    phases = [
        [[name, ms(start, rank), ms(end, rank)] for name, start, end in rank_notes[rank]["phases"]]
        for rank in ranks
    ]

    # One row for each collective, with its times on every rank that took part.
    collectives = []
    noted = [notes["collectives"] for notes in rank_notes]
    for by_rank in _match(noted, sizes.get("pp", 1), partial):
        first = next(iter(by_rank.values()))
        transfer_s = min(c["end"] - c["start"] for c in by_rank.values())
        arrivals = {rank: ms(c["enqueue"], rank) for rank, c in by_rank.items()}
        row = {
            key: first[key]
            for key in ("op", "what", "group", "phase", "dtype", "bucket", "last", "timing")
        }
        row["step"] = rank_notes[0]["step"]
        row["bytes"] = first["size_bytes"]
        row["ranks"] = sizes.get(first["group"], len(by_rank))
        for key in ("enqueue", "start", "end"):
            row[f"{key}_ms"] = [
                ms(by_rank[rank][key], rank) if rank in by_rank else None for rank in ranks
            ]
        # When each rank began to wait for a message that travels beside compute
        if all(c.get("wait") is not None for c in by_rank.values()):
            row["wait_ms"] = [
                ms(by_rank[rank]["wait"], rank) if rank in by_rank else None for rank in ranks
            ]
        row["latency_us"] = 1e6 * max(c["end"] - c["enqueue"] for c in by_rank.values())
        row["time_us"] = 1e6 * transfer_s
        row["skew_us"] = 1e3 * (max(arrivals.values()) - min(arrivals.values()))
        row["late_rank"] = max(arrivals, key=lambda rank: arrivals[rank])
        factor = busbw_factor(first["op"], row["ranks"])
        if first["size_bytes"] and transfer_s > 0 and factor:
            row["algbw_gbps"] = algbw_gbps(first["size_bytes"], transfer_s)
            row["busbw_gbps"] = row["algbw_gbps"] * factor
        collectives.append(row)

    step = {
        "step": rank_notes[0]["step"],
        "origin_s": origin,
        "phases": phases,
        "collectives": collectives,
    }
    step["figures"] = _figures(step, rank_notes)
    return step


def _match(
    rank_collectives: Sequence[list[dict[str, Any]]], pp: int, partial: bool
) -> list[dict[int, dict[str, Any]]]:
    """Return the collectives that belong together, each as {rank: its note}.

    These are the k-th of each (op, what, bucket, group) on every rank. Each of the `pp` stages of
    a pipeline has its own along the axes in a stage.
    """
    ranks_per_stage = len(rank_collectives) // pp

    # Number the collectives of each kind on each rank, in the order in which they were noted.
    numbered: list[dict[Any, dict[str, Any]]] = []
    for rank, collectives in enumerate(rank_collectives):
        counts: Counter[tuple[Any, ...]] = Counter()
        own = {}
        for c in collectives:
            stage = 0
            if pp > 1 and c["group"] in IN_A_STAGE:
                stage = rank // ranks_per_stage
            kind = (c["op"], c["what"], c["bucket"], c["group"], stage)
            counts[kind] += 1
            own[kind, counts[kind]] = c
        numbered.append(own)

    # Keep those that all of their ranks have noted, where these are known: a row needs every rank's
    # times.
    matched = []
    for key in dict.fromkeys(key for own in numbered for key in own):
        by_rank = {rank: own[key] for rank, own in enumerate(numbered) if key in own}
        (_, _, _, group, _), _ = key
        expected = len(numbered)
        if pp > 1 and group in IN_A_STAGE:
            expected = ranks_per_stage
        if partial or len(by_rank) == expected:
            matched.append(by_rank)
    return matched


def _figures(step: dict[str, Any], rank_notes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the numbers of one step: means over ranks, and the rank with most work of its own."""
    costs = [_communication_cost(notes) for notes in rank_notes]
    step_ms = [_counted_ms(phases) for phases in step["phases"]]
    buckets = [c for c in step["collectives"] if c["bucket"] is not None]
    skew_ms = 0.0
    if buckets:
        skew_ms = statistics.fmean(c["skew_us"] for c in buckets) / 1e3
    return {
        "step": step["step"],
        "bubble": 100 * statistics.fmean(idle_fraction(notes["phases"]) for notes in rank_notes),
        "step_ms": statistics.fmean(step_ms),
        "busy_ms": 1e3 * statistics.fmean(cost.busy for cost in costs),
        "exposed_ms": 1e3 * statistics.fmean(cost.exposed for cost in costs),
        "hidden_ms": 1e3 * statistics.fmean(cost.hidden for cost in costs),
        "skew_ms": skew_ms,
        **_late_figures(rank_notes),
        **_traffic_figures(buckets),
    }


def _communication_cost(notes: dict[str, Any]) -> StepCost:
    """Return what communication cost a rank, without evaluation, checkpoints and idle waits."""
    counted = [Collective(**c) for c in notes["collectives"] if c["phase"] not in (*PAUSES, IDLE)]
    return account(counted)


def _counted_ms(phases: Sequence[Any]) -> float:
    """Return the length of a step on one rank, without evaluation and checkpoints."""
    return float(sum(end - start for name, start, end in phases if name not in PAUSES))


def _late_figures(rank_notes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the rank that worked longest, in which phase, and how far it was behind the others."""
    works = [_own_work_ms(notes) for notes in rank_notes]
    totals = [sum(work.values()) for work in works]
    late_rank = totals.index(max(totals))
    late_work = works[late_rank]

    # The median of the others, so that a second slow rank does not hide the first.
    others = [work for rank, work in enumerate(works) if rank != late_rank] or works
    behind_ms = {}
    for phase in WORK:
        behind_ms[phase] = late_work[phase] - statistics.median(work[phase] for work in others)
    others_ms = statistics.median(sum(work.values()) for work in others)
    return {
        "late_rank": late_rank,
        "late_phase": max(behind_ms, key=lambda phase: behind_ms[phase]),
        "late_ms": totals[late_rank] - others_ms,
        "others_ms": others_ms,
    }


def _traffic_figures(buckets: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the bytes of a step's buckets on the bus, and the seconds of their transfers."""
    bus_bytes = 0.0
    transfers_ms = []
    for c in buckets:
        factor = busbw_factor(c["op"], c["ranks"]) or 0
        bus_bytes += c["bytes"] * factor * _fraction_of_ranks(c)
        # A transfer begins when the last rank has started it.
        start_ms = max(ms for ms in c["start_ms"] if ms is not None)
        transfers_ms.append((start_ms, start_ms + c["time_us"] / 1e3))
    return {
        "bus_bytes": bus_bytes,
        # Buckets that run at the same time share the link, so that time counts once.
        "transfer_s": union_length(transfers_ms) / 1e3,
    }


def _fraction_of_ranks(row: dict[str, Any]) -> float:
    """Return the share of the ranks that took part in a collective.

    1 unless stages of a pipeline have different ones.
    """
    took_part = [ms for ms in row["start_ms"] if ms is not None]
    return len(took_part) / len(row["start_ms"])


def idle_fraction(phases: Sequence[Any]) -> float:
    """Return the share of a step that a stage of a pipeline waits; 0 without a pipeline."""
    idle = sum(end - start for name, start, end in phases if name == IDLE)
    if not idle:
        return 0.0
    working = sum(end - start for name, start, end in phases if name in TURNS)
    return float(idle / (idle + working))


def _own_work_ms(notes: dict[str, Any]) -> dict[str, float]:
    """Return how long a rank worked in each phase, without waiting for others.

    A step takes equally long on all ranks, because the fast ones wait in the collectives. So a
    backward pass counts until its last bucket is ready, and calls that wait for other ranks are
    subtracted from their phase.
    """
    work_ms = dict.fromkeys(WORK, 0.0)
    calls = [Collective(**c) for c in notes["collectives"] if c["bucket"] is None]
    ready = max((c["enqueue"] for c in notes["collectives"] if c["last"]), default=float("inf"))
    for name, start, end in notes["phases"]:
        if name not in work_ms:
            continue
        waited = sum(
            min(call.end, end) - max(call.waits_from, start)
            for call in calls
            if call.waits_from < end and call.end > max(start, call.waits_from)
        )
        # An earlier micro batch's backward ends before the last bucket is ready and counts fully.
        if name == "backward" and start < ready:
            end = min(end, ready)
        work_ms[name] += 1e3 * max(0.0, end - start - waited)
    return work_ms

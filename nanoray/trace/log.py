"""Merge the notes of all ranks: metrics, stragglers, and one line per traced step on disk.

runs/.../comm/
    steps.jsonl      every traced step: phases and collectives of all ranks, in ms on rank 0's clock
    buckets.json     which parameters travel in which bucket
    timeline.json, timeline.svg    the newest window of steps, drawn by timeline.py
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TextIO

from nanoray.atomic import write_json
from nanoray.mesh.mesh import Mesh
from nanoray.metrics import algbw_gbps, busbw_factor
from nanoray.trace.recorder import (
    ClockOffset,
    Collective,
    CommRecorder,
    account,
    clock_domain,
    copy_gbps,
    measure_offsets,
    union_length,
    wait_for,
)
from nanoray.trace.timeline import MAX_DRAWN, chrome_trace, draw, newest_window

PAUSES = ("eval", "checkpoint")  # not counted in a step's time
IDLE = "idle"  # a stage of a pipeline waits for another one
# Phases in which a rank can be slower than the others
WORK = ("data", "forward", "backward", "optimizer", "log")
LATE_SHARE = 0.2  # of the other ranks' own work; less is noise
LATE_OF, LATE_TIMES = 8, 6  # a straggler was behind in 6 of the last 8 traced steps
OFFSETS_EVERY = 500  # steps between two comparisons of several hosts' clocks
MIN_COMPARED = 3  # comparisons with no_sync before their median is shown
DETAIL_BYTES = 256 << 20  # of steps.jsonl; later steps are written without collectives
MEANS = ("step_ms", "busy_ms", "exposed_ms", "hidden_ms", "skew_ms", "late_ms")
TURNS = ("data", "forward", "backward")  # what the stages of a pipeline do between waits
SUMS = ("bytes", "bus_bytes", "transfer_s")


class CommTrace:
    """The loop's interface to tracing: this rank's recorder, and on rank 0 the log of all ranks."""

    def __init__(
        self,
        mesh: Mesh,
        recorder: CommRecorder,
        buckets: Callable[[], dict[int, list[str]]],
        log: CommLog | None,
    ) -> None:
        """`buckets` returns the names of the parameters in each bucket; `log` is None except on
        rank 0.
        """
        self._mesh, self._recorder, self._buckets, self._log = mesh, recorder, buckets, log
        self._offsets: list[ClockOffset] = []
        self._hosts, self._next_offsets = 1, 0

    def phase(self, step: int, name: str) -> None:
        """Note that this rank enters a phase, if the step is traced."""
        self._recorder.phase(name)

    def prepare(self) -> None:
        """Set up the profiler, compare clocks and measure memory, before the first step. (all
        ranks)
        """
        self._recorder.prepare()
        self._offsets = measure_offsets(self._mesh)
        facts = self._mesh.gather((copy_gbps(self._mesh.device), clock_domain()))
        self._hosts = self._mesh.broadcast(len({host for _, host in facts}) if facts else 0)
        if self._log and facts and self._mesh.device.type == "cpu":
            what = "the memory copy bandwidth, measured on all ranks at once"
            what += "" if self._hosts == 1 else "; the network between the hosts is slower"
            self._log.limit = (min(gbps for gbps, _ in facts), what)

    def begin(self, step: int) -> bool:
        """Return whether this step is traced."""
        traced = self._recorder.begin(step)
        self._mesh.listener = self._recorder if traced else None
        return traced

    def end(self, unsynced: Callable[[AbstractContextManager[None]], None] | None) -> float:
        """End the step's notes; now and then time `unsynced` for comparison. Return the seconds it
        took. (all ranks)

        None: this run cannot compute without communication.
        """
        self._mesh.listener = None
        self._recorder.end()
        if unsynced is None or not self._recorder.no_sync_due():
            return 0.0
        wait_for(self._mesh.device)
        start = time.perf_counter()
        unsynced(self._recorder.no_sync_pass())
        wait_for(self._mesh.device)
        return time.perf_counter() - start

    def read(self, note: Callable[[str], None]) -> dict[str, float]:
        """Return the metrics of the steps traced since the last call. (all ranks; after a value was
        fetched)
        """
        self._mesh.listener, noting = None, self._mesh.listener  # do not record the reading
        self._recorder.clock.anchor()
        own = self._recorder.read()
        metrics: dict[str, float] = {}
        if own:
            if self._hosts > 1 and own[-1]["step"] >= self._next_offsets:  # clocks drift
                self._offsets = measure_offsets(self._mesh)
                self._next_offsets = own[-1]["step"] + OFFSETS_EVERY
            notes = self._mesh.gather(own)
            if self._log is not None and notes is not None:
                metrics, lines = self._log.add(notes, self._offsets, self._buckets())
                for line in lines:
                    note(line)
        self._mesh.listener = noting
        return metrics

    def finish(self, note: Callable[[str], None]) -> dict[str, Any] | None:
        """Read the remaining notes, draw, and return the summary. (all ranks)"""
        self._recorder.stop_profile()
        wait_for(self._mesh.device)
        self.read(note)
        return self._log.finish(self._offsets, note) if self._log else None


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
    ) -> None:
        """`sizes` tells how many ranks share a collective of an axis (tp, pp, dp), where that is
        not all of them.

        `bubble` is the share of the time that a stage of a pipeline waits by its schedule; None:
        there is no pipeline.
        """
        self.folder = folder
        self.limit: tuple[float, str] | None = None  # GB/s, and what it measures
        folder.mkdir(exist_ok=True)
        self._group, self._sizes, self._bubble = (
            {"attempt": attempt, "started": started},
            sizes or {},
            bubble,
        )
        self._late: deque[tuple[int, str, float]] = deque(maxlen=LATE_OF)
        # The last one; `until` is None while it is one
        self._straggler: dict[str, Any] | None = None
        self._window: deque[dict[str, Any]] = deque(maxlen=MAX_DRAWN)
        self._total, self._profiled = Totals(), Totals()
        self._slowest: dict[str, Any] = {}
        self._failed = ""
        self._file = _open_at(folder / "steps.jsonl", resume_step)

    def add(
        self,
        notes: list[list[dict[str, Any]]],
        offsets: Sequence[ClockOffset],
        buckets: dict[int, list[str]],
    ) -> tuple[dict[str, float], list[str]]:
        """Add the notes of all ranks, in rank order; return metrics for the next record, and lines
        for the user.
        """
        lines, now = [], Totals()
        for of_ranks in zip(*notes, strict=True):
            step = merge(of_ranks, offsets, self._sizes) | self._group
            figures = step["figures"]
            self._window.append(step)
            seen = [c for c in step["collectives"] if c["bucket"] is not None]
            self._slowest = max([*seen, self._slowest], key=lambda c: c.get("time_us") or 0.0)
            lines += self._name_straggler(figures)
            now.add(figures)
            (self._profiled if figures["profiled"] else self._total).add(figures)
            lines += self._write(step, buckets)
        metrics = {f"comm/{key}": value for key, value in now.means().items() if key != "hidden_ms"}
        if self._bubble is not None and now.steps:
            metrics |= {
                "pipe/bubble": now.sums["bubble"] / now.steps,
                "pipe/bubble_theory": 100 * self._bubble,
            }
        return metrics, lines

    def _write(self, step: dict[str, Any], buckets: dict[int, list[str]]) -> list[str]:
        """Append a step to the file. After a failed write (a full disk) it warns and writes no
        more.
        """
        if self._failed:
            return []
        if self._file.tell() > DETAIL_BYTES:
            step = {key: step[key] for key in ("step", *self._group, "figures")}
        try:
            self._file.write(json.dumps(step) + "\n")
            self._file.flush()
            if len(self._window) == 1:  # the first of this group
                write_json(self.folder / "buckets.json", buckets)
        except OSError as error:
            self._failed = str(error)
            return [f"warning  collectives are no longer written to {self._file.name}: {error}"]
        return []

    def _name_straggler(self, figures: dict[str, Any]) -> list[str]:
        """Report once that a rank is often far behind the others, and once that it no longer is."""
        behind = (
            figures["late_ms"] if figures["late_ms"] > LATE_SHARE * figures["others_ms"] else 0.0
        )
        self._late.append((figures["late_rank"], figures["late_phase"], behind))
        known = self._straggler if self._straggler and not self._straggler["until"] else None
        if known:
            if (
                sum(rank == known["rank"] and ms > 0 for rank, _, ms in self._late)
                < LATE_TIMES // 2
            ):
                known["until"] = figures["step"]
                return [
                    f"straggler  rank {known['rank']} keeps up again, at step {figures['step']}"
                ]
            return []
        rank = figures["late_rank"]
        mine = [(phase, ms) for r, phase, ms in self._late if r == rank and ms]
        if len(mine) < LATE_TIMES:
            return []
        phase = statistics.mode(phase for phase, _ in mine)
        median_ms = statistics.median(ms for _, ms in mine)
        self._straggler = {
            "rank": rank,
            "phase": phase,
            "behind_ms": median_ms,
            "since": figures["step"],
            "until": None,
        }
        return [
            f"straggler  rank {rank}: {median_ms:.1f} ms a step behind the others "
            f"({figures['others_ms']:.1f} ms of "
            f"own work), most of it in {phase}; seen in {len(mine)} of {len(self._late)} traced "
            "steps, at step "
            f"{figures['step']}"
        ]

    def finish(self, offsets: Sequence[ClockOffset], note: Callable[[str], None]) -> dict[str, Any]:
        """Draw the newest window and return the summary of the run. A failed drawing gives a
        warning.
        """
        self._file.close()
        total = self._total if self._total.steps else self._profiled
        if not total.steps:
            return {"traced_steps": 0}
        try:
            drawn = newest_window(list(self._window))
            write_json(self.folder / "timeline.json", chrome_trace(drawn))
            draw(drawn, self.folder / "timeline.svg")
        except Exception as error:  # training is done and saved; a picture is optional
            note(
                f"warning  no timeline: {type(error).__name__}: {error}; try python -m "
                "nanoray.trace"
            )
        mean, known = total.means(), [o.uncertainty for o in offsets if o.uncertainty]
        summary: dict[str, Any] = {
            key: mean.get(key) for key in (*MEANS[:4], "exposed_share", "busbw_gbps")
        }
        if self.limit and summary["busbw_gbps"]:
            summary |= {"limit_gbps": self.limit[0], "limit": self.limit[1]}
            summary["limit_share"] = 100 * summary["busbw_gbps"] / self.limit[0]
        if self._slowest:
            summary["slowest"] = {
                key: self._slowest[key] for key in ("step", "bucket", "bytes", "time_us", "skew_us")
            }
        if self._bubble is not None:
            summary |= {
                "bubble": total.sums["bubble"] / total.steps,
                "bubble_theory": 100 * self._bubble,
            }
        return summary | {
            "traced_steps": self._total.steps + self._profiled.steps,
            "busy_share": 100 * mean["busy_ms"] / mean["step_ms"],
            "ab_ms": total.ab_ms(MIN_COMPARED),
            "compared_steps": len(total.compared),
            "bytes_per_step": total.sums["bytes"] / total.steps,
            "straggler": self._straggler,
            "clock": f"hosts compared to ± {1e6 * max(known):.0f} µs"
            if known
            else "one host, one clock",
        }


def _open_at(path: Path, resume_step: int) -> TextIO:
    """Open steps.jsonl to append after `resume_step`; later steps will be repeated and are dropped."""
    if path.exists():
        aside = path.with_suffix(".tmp")
        with path.open(encoding="utf-8") as old, aside.open("w", encoding="utf-8") as new:
            for line in old:  # not parsed, because lines are long and the other ranks wait
                step = line.removeprefix('{"step": ').partition(",")[0]
                if step.isdecimal() and int(step) <= resume_step and line.endswith("}\n"):
                    new.write(line)
        os.replace(aside, path)
    return path.open("a", encoding="utf-8")


class Totals:
    """Sums over traced steps, and their means."""

    def __init__(self) -> None:
        self.steps = 0
        self.sums: Counter[str] = Counter()
        self.late: Counter[int] = Counter()
        self.compared: list[float] = []  # one in a hundred steps at most

    def add(self, figures: dict[str, Any]) -> None:
        """Count one more step."""
        self.steps += 1
        for key in (*MEANS, *SUMS, "bubble"):
            self.sums[key] += figures[key]
        self.late[figures["late_rank"]] += 1
        if figures["ab_ms"] is not None:
            self.compared.append(figures["ab_ms"])

    def means(self) -> dict[str, float]:
        """Return the metrics: means per step, and the rank that was late most often."""
        mean: dict[str, float] = {key: self.sums[key] / self.steps for key in MEANS}
        mean["exposed_share"] = 100 * mean["exposed_ms"] / mean["step_ms"]
        mean["late_rank"] = self.late.most_common(1)[0][0]
        if self.compared:
            mean["ab_ms"] = statistics.median(self.compared)
        if self.sums["transfer_s"]:
            mean["busbw_gbps"] = algbw_gbps(self.sums["bus_bytes"], self.sums["transfer_s"])
        return mean

    def ab_ms(self, least: int) -> float | None:
        """Return the median difference to no_sync, or None below `least` comparisons: few are
        mostly noise.
        """
        return statistics.median(self.compared) if len(self.compared) >= least else None


def merge(
    of_ranks: Sequence[dict[str, Any]],
    offsets: Sequence[ClockOffset],
    sizes: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Convert one step's notes of all ranks to rank 0's clock, in ms from its first phase; add
    figures over ranks.

    A collective's `time_us` begins when its last rank has started it: min over ranks of (end -
    start). So the wait for a late rank (`skew_us`) does not look like a slow link. Collectives of
    an axis whose `sizes` are fewer ranks run in several groups beside each other: they make one
    row, with the ranks of one of them. The stages of a pipeline have rows of their own, in which
    the times of the other ranks are None.
    """
    origin = min(
        rank["phases"][0][1] - offset.offset for rank, offset in zip(of_ranks, offsets, strict=True)
    )

    def ms(seconds: float, rank: int) -> float:
        return 1e3 * (seconds - offsets[rank].offset - origin)

    phases = [
        [[name, ms(start, r), ms(end, r)] for name, start, end in rank["phases"]]
        for r, rank in enumerate(of_ranks)
    ]
    collectives = []
    for same in _matched([rank["collectives"] for rank in of_ranks], (sizes or {}).get("pp", 1)):
        first, *_ = same.values()
        seconds = min(c["end"] - c["start"] for c in same.values())
        arrivals = {r: ms(c["enqueue"], r) for r, c in same.items()}
        row = {
            key: first[key]
            for key in ("op", "what", "group", "phase", "dtype", "bucket", "last", "timing")
        }
        row |= {"step": of_ranks[0]["step"], "bytes": first["size_bytes"]}
        row["ranks"] = (sizes or {}).get(first["group"], len(same))
        for key in ("enqueue", "start", "end"):
            row[f"{key}_ms"] = [
                ms(same[r][key], r) if r in same else None for r in range(len(of_ranks))
            ]
        row |= {
            "latency_us": 1e6 * max(c["end"] - c["enqueue"] for c in same.values()),
            "time_us": 1e6 * seconds,
            "skew_us": 1e3 * (max(arrivals.values()) - min(arrivals.values())),
            "late_rank": max(arrivals, key=lambda r: arrivals[r]),
        }
        factor = busbw_factor(first["op"], row["ranks"])
        if first["size_bytes"] and seconds > 0 and factor:
            row["algbw_gbps"] = algbw_gbps(first["size_bytes"], seconds)
            row["busbw_gbps"] = row["algbw_gbps"] * factor
        collectives.append(row)
    step = {
        "step": of_ranks[0]["step"],
        "origin_s": origin,
        "phases": phases,
        "collectives": collectives,
    }
    return step | {"figures": _figures(step, of_ranks)}


def _matched(of_ranks: Sequence[list[dict[str, Any]]], pp: int) -> list[dict[int, dict[str, Any]]]:
    """Return the collectives that belong together, by rank: the k-th of each (op, what, bucket,
    group) on every rank.

    Each of the `pp` stages of a pipeline has its own along dp and tp.
    """
    seen: list[dict[Any, dict[str, Any]]] = []
    per_stage = len(of_ranks) // pp
    for rank, collectives in enumerate(of_ranks):
        counts: dict[tuple[Any, ...], int] = {}
        own = {}
        for c in collectives:
            stage = rank // per_stage if pp > 1 and c["group"] in ("dp", "tp") else 0
            key = (c["op"], c["what"], c["bucket"], c["group"], stage)
            counts[key] = counts.get(key, 0) + 1
            own[key, counts[key]] = c
        seen.append(own)
    found = []
    for key in dict.fromkeys(key for own in seen for key in own):
        same = {rank: own[key] for rank, own in enumerate(seen) if key in own}
        group = key[0][3]
        # Else one has no note of it
        if len(same) == (per_stage if pp > 1 and group in ("dp", "tp") else len(seen)):
            found.append(same)
    return found


def _figures(step: dict[str, Any], of_ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the numbers of one step: means over ranks, and the rank with most work of its own."""
    costs, step_ms, works, differences = [], [], [], []
    for r, rank in enumerate(of_ranks):
        own = [Collective(**c) for c in rank["collectives"] if c["phase"] not in (*PAUSES, IDLE)]
        costs.append(account(own))
        step_ms.append(
            sum(end - start for name, start, end in step["phases"][r] if name not in PAUSES)
        )
        works.append(_own_work_ms(rank))
        if rank["no_sync_s"] is not None:
            synced = sum(
                next(e - s for n, s, e in reversed(rank["phases"]) if n == x)
                for x in ("forward", "backward")
            )
            differences.append(1e3 * (synced - rank["no_sync_s"]))
    buckets = [c for c in step["collectives"] if c["bucket"] is not None]

    def begun(c: dict[str, Any]) -> float:
        return float(max(ms for ms in c["start_ms"] if ms is not None))

    totals = [sum(work.values()) for work in works]
    late = totals.index(max(totals))
    others = [work for r, work in enumerate(works) if r != late] or works
    behind = {p: works[late][p] - statistics.median(w[p] for w in others) for p in WORK}
    others_ms = statistics.median(sum(w.values()) for w in others)
    waits = [share_idle(rank["phases"]) for rank in of_ranks]
    return {
        "step": step["step"],
        "bubble": 100 * statistics.fmean(waits),
        "step_ms": statistics.fmean(step_ms),
        "busy_ms": 1e3 * statistics.fmean(c.busy for c in costs),
        "exposed_ms": 1e3 * statistics.fmean(c.exposed for c in costs),
        "hidden_ms": 1e3 * statistics.fmean(c.hidden for c in costs),
        "ab_ms": statistics.fmean(differences) if differences else None,
        "skew_ms": statistics.fmean(c["skew_us"] for c in buckets) / 1e3 if buckets else 0.0,
        "late_rank": late,
        "late_phase": max(behind, key=lambda p: behind[p]),
        "late_ms": totals[late] - others_ms,
        "others_ms": others_ms,
        "bytes": sum(
            c["bytes"] * _part(c) for c in step["collectives"] if c["phase"] not in PAUSES
        ),
        "bus_bytes": sum(
            c["bytes"] * (busbw_factor(c["op"], c["ranks"]) or 0) * _part(c) for c in buckets
        ),
        # Buckets that run at the same time share the link, so that time counts once.
        "transfer_s": union_length([(begun(c), begun(c) + c["time_us"] / 1e3) for c in buckets])
        / 1e3,
        "profiled": of_ranks[0]["profiled"],
    }


def _part(c: dict[str, Any]) -> float:
    """Return the share of the ranks that have a row's collective: 1 unless stages of a pipeline
    have other ones.
    """
    return sum(ms is not None for ms in c["start_ms"]) / len(c["start_ms"])


def share_idle(phases: Sequence[Any]) -> float:
    """Return which share of forward and backward a stage of a pipeline waits; 0 without a pipeline."""
    idle, turns = (
        sum(end - start for name, start, end in phases if name in of) for of in ((IDLE,), TURNS)
    )
    return idle / (idle + turns) if idle else 0.0


def _own_work_ms(rank: dict[str, Any]) -> dict[str, float]:
    """Return how long a rank worked in each phase, without waiting for others.

    A step takes equally long on all ranks, because the fast ones wait in the collectives. So a
    backward pass counts until its last bucket is ready, and calls that wait for other ranks are
    subtracted from their phase.
    """
    work = dict.fromkeys(WORK, 0.0)
    ready = max((c["enqueue"] for c in rank["collectives"] if c["last"]), default=float("inf"))
    for name, start, end in rank["phases"]:
        if name in work:
            waited = sum(
                min(c["end"], end) - max(c["start"], start)
                for c in rank["collectives"]
                if c["bucket"] is None and c["start"] < end and c["end"] > start
            )
            until = min(end, ready) if name == "backward" and start < ready else end
            work[name] += 1e3 * max(0.0, until - start - waited)
    return work

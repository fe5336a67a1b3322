"""What all ranks noted, put together: metrics, who was late, and one line per traced step on disk.

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
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from nanoray.comm import (
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
from nanoray.mesh import Mesh
from nanoray.metrics import algbw_gbps, busbw_factor
from nanoray.run import write_json
from nanoray.timeline import MAX_DRAWN, chrome_trace, draw, newest_window

if TYPE_CHECKING:
    from torch import nn

PAUSES = ("eval", "checkpoint")  # no part of a step's time
WORK = ("data", "forward", "backward", "optimizer", "log")  # phases in which a rank can be slower than the others
LATE_SHARE = 0.2  # of the others' own work: less is noise
LATE_OF, LATE_TIMES = 8, 6  # a straggler was behind in 6 of the last 8 traced steps
OFFSETS_EVERY = 500  # steps between two comparisons of several hosts' clocks
MIN_COMPARED = 3  # comparisons with no_sync before their median is shown
DETAIL_BYTES = 256 << 20  # of steps.jsonl; then steps are written without their collectives
MEANS = ("step_ms", "busy_ms", "exposed_ms", "hidden_ms", "skew_ms", "late_ms")
SUMS = ("bytes", "bus_bytes", "transfer_s")


class CommTrace:
    """What the loop talks to when its collectives are measured: the notebook, and rank 0's log of all notebooks."""

    def __init__(self, mesh: Mesh, recorder: CommRecorder, twin: nn.Module, log: CommLog | None) -> None:
        """Take the model's `twin`, whose hook is the recorder's; `log` is None on all ranks but rank 0."""
        self._mesh, self._recorder, self.twin, self._log = mesh, recorder, twin, log
        self._offsets: list[ClockOffset] = []
        self._hosts, self._next_offsets = 1, 0
        self.phase = recorder.phase

    def prepare(self) -> None:
        """Pay for what the first trace costs, before the first step; compare clocks and memories. (all ranks)"""
        self._recorder.prepare()
        self._offsets = measure_offsets(self._mesh)
        facts = self._mesh.gather((copy_gbps(self._mesh.device), clock_domain()))
        self._hosts = self._mesh.broadcast(len({host for _, host in facts}) if facts else 0)
        if self._log and facts and self._mesh.device.type == "cpu":
            what = "what every rank copies in its memory at the same time"
            what += "" if self._hosts == 1 else "; the network between the hosts is slower"
            self._log.limit = (min(gbps for gbps, _ in facts), what)

    def begin(self, step: int, model: nn.Module) -> nn.Module:
        """Return the model to use for this step: on traced ones the twin, whose hook takes notes."""
        if not self._recorder.begin(step):
            return model
        self._mesh.recorder = self._recorder
        return self.twin

    def end(self, unsynced: Callable[[AbstractContextManager[None]], None]) -> float:
        """Close the step's notes; now and then compare it with `unsynced`. Return the seconds that took. (all ranks)"""
        self._mesh.recorder = None
        self._recorder.end()
        if not self._recorder.no_sync_due():
            return 0.0
        wait_for(self._mesh.device)
        start = time.perf_counter()
        unsynced(self._recorder.no_sync_pass())
        wait_for(self._mesh.device)
        return time.perf_counter() - start

    def read(self, note: Callable[[str], None]) -> dict[str, float]:
        """Return the metrics of the steps traced since the last call. (all ranks; after a value was fetched)"""
        self._mesh.recorder, noting = None, self._mesh.recorder  # reading is no part of what is read
        self._recorder.clock.anchor()
        own = self._recorder.read()
        metrics: dict[str, float] = {}
        if own:
            if self._hosts > 1 and own[-1]["step"] >= self._next_offsets:  # clocks drift
                self._offsets = measure_offsets(self._mesh)
                self._next_offsets = own[-1]["step"] + OFFSETS_EVERY
            notes = self._mesh.gather(own)
            if self._log is not None and notes is not None:
                buckets = self._recorder.buckets(self.twin)
                metrics, lines = self._log.add(notes, self._offsets, buckets)
                for line in lines:
                    note(line)
        self._mesh.recorder = noting
        return metrics

    def finish(self, note: Callable[[str], None]) -> dict[str, Any] | None:
        """Read what is left, draw, and return the summary. (all ranks)"""
        self._recorder.stop_profile()
        wait_for(self._mesh.device)
        self.read(note)
        return self._log.finish(self._offsets, note) if self._log else None


class CommLog:
    """Collects what the ranks noted. (rank 0 only)"""

    def __init__(self, folder: Path, resume_step: int, attempt: int) -> None:
        self.folder = folder
        self.limit: tuple[float, str] | None = None  # GB/s, and of what
        folder.mkdir(exist_ok=True)
        self._attempt = attempt
        self._late: deque[tuple[int, str, float]] = deque(maxlen=LATE_OF)
        self._straggler: dict[str, Any] | None = None  # the last one, and whether it still is one
        self._window: deque[dict[str, Any]] = deque(maxlen=MAX_DRAWN)
        self._total, self._profiled = Totals(), Totals()
        self._slowest: dict[str, Any] = {}
        self._failed = ""
        self._file = _open_at(folder / "steps.jsonl", resume_step)

    def add(
        self, notes: list[list[dict[str, Any]]], offsets: Sequence[ClockOffset], buckets: dict[int, list[str]]
    ) -> tuple[dict[str, float], list[str]]:
        """Take the notes of all ranks, in rank order; return the metrics of the next record, and lines to say."""
        lines, now = [], Totals()
        for of_ranks in zip(*notes, strict=True):
            step = merge(of_ranks, offsets) | {"attempt": self._attempt}
            figures = step["figures"]
            self._window.append(step)
            seen = [c for c in step["collectives"] if c["bucket"] is not None]
            self._slowest = max([*seen, self._slowest], key=lambda c: c.get("time_us") or 0.0)
            lines += self._name_straggler(figures)
            now.add(figures)
            (self._profiled if figures["profiled"] else self._total).add(figures)
            lines += self._write(step, buckets)
        return {f"comm/{key}": value for key, value in now.means().items()}, lines

    def _write(self, step: dict[str, Any], buckets: dict[int, list[str]]) -> list[str]:
        """Append a step to the file. A full disk costs this file and a warning, never the run."""
        if self._failed:
            return []
        if self._file.tell() > DETAIL_BYTES:
            step = {key: step[key] for key in ("step", "attempt", "figures")}
        try:
            self._file.write(json.dumps(step) + "\n")
            self._file.flush()
            if not (self.folder / "buckets.json").exists():
                write_json(self.folder / "buckets.json", buckets)
        except OSError as error:
            self._failed = str(error)
            return [f"warning  collectives are no longer written to {self._file.name}: {error}"]
        return []

    def _name_straggler(self, figures: dict[str, Any]) -> list[str]:
        """Name a rank that was behind the others by much and often, once; and say so when it no longer is."""
        behind = figures["late_ms"] if figures["late_ms"] > LATE_SHARE * figures["others_ms"] else 0.0
        self._late.append((figures["late_rank"], figures["late_phase"], behind))
        known = self._straggler if self._straggler and not self._straggler["until"] else None
        if known:
            if sum(rank == known["rank"] and ms > 0 for rank, _, ms in self._late) < LATE_TIMES // 2:
                known["until"] = figures["step"]
                return [f"straggler  rank {known['rank']} keeps up again, at step {figures['step']}"]
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
            f"straggler  rank {rank}: {median_ms:.1f} ms a step behind the others ({figures['others_ms']:.1f} ms of "
            f"own work), most of it in {phase}; seen in {len(mine)} of {len(self._late)} traced steps, at step "
            f"{figures['step']}"
        ]

    def finish(self, offsets: Sequence[ClockOffset], note: Callable[[str], None]) -> dict[str, Any]:
        """Draw the newest window and return the summary of the run; what cannot be drawn costs a warning."""
        self._file.close()
        total = self._total if self._total.steps else self._profiled
        if not total.steps:
            return {"traced_steps": 0}
        try:
            drawn = newest_window(list(self._window))
            write_json(self.folder / "timeline.json", chrome_trace(drawn))
            draw(drawn, self.folder / "timeline.svg")
        except Exception as error:  # the training is done and saved; a picture is an extra
            note(f"warning  no timeline: {type(error).__name__}: {error}; try python -m nanoray.timeline")
        mean, known = total.means(), [o.uncertainty for o in offsets if o.uncertainty]
        summary: dict[str, Any] = {key: mean.get(key) for key in (*MEANS[:4], "exposed_share", "busbw_gbps")}
        if self.limit and summary["busbw_gbps"]:
            summary |= {"limit_gbps": self.limit[0], "limit": self.limit[1]}
            summary["limit_share"] = 100 * summary["busbw_gbps"] / self.limit[0]
        if self._slowest:
            summary["slowest"] = {key: self._slowest[key] for key in ("step", "bucket", "bytes", "time_us", "skew_us")}
        return summary | {
            "traced_steps": self._total.steps + self._profiled.steps,
            "busy_share": 100 * mean["busy_ms"] / mean["step_ms"],
            "ab_ms": total.ab_ms(MIN_COMPARED),
            "compared_steps": len(total.compared),
            "bytes_per_step": total.sums["bytes"] / total.steps,
            "straggler": self._straggler,
            "clock": f"hosts compared to ± {1e6 * max(known):.0f} µs" if known else "one host, one clock",
        }


def _open_at(path: Path, resume_step: int) -> TextIO:
    """Open steps.jsonl to append after `resume_step`; later steps, which will be run again, are dropped."""
    if path.exists():
        aside = path.with_suffix(".tmp")
        with path.open(encoding="utf-8") as old, aside.open("w", encoding="utf-8") as new:
            for line in old:  # without parsing it: lines are long, and the other ranks wait
                step = line.removeprefix('{"step": ').partition(",")[0]
                if step.isdecimal() and int(step) <= resume_step and line.endswith("}\n"):
                    new.write(line)
        os.replace(aside, path)
    return path.open("a", encoding="utf-8")


class Totals:
    """Sums over traced steps, and what follows from them."""

    def __init__(self) -> None:
        self.steps = 0
        self.sums: Counter[str] = Counter()
        self.late: Counter[int] = Counter()
        self.compared: list[float] = []  # one in a hundred steps at most

    def add(self, figures: dict[str, Any]) -> None:
        """Count one more step."""
        self.steps += 1
        for key in (*MEANS, *SUMS):
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
        """Return the median difference to no_sync, from `least` comparisons on: one alone is mostly noise."""
        return statistics.median(self.compared) if len(self.compared) >= least else None


def merge(of_ranks: Sequence[dict[str, Any]], offsets: Sequence[ClockOffset]) -> dict[str, Any]:
    """Put one step's notes of all ranks on rank 0's clock, in ms from its first phase; add what only all ranks tell.

    A collective's `time_us` is counted from the moment when its last rank had started it, so that waiting for a late
    rank (`skew_us`) is not taken for a slow link: min over ranks of (end - start).
    """
    origin = min(rank["phases"][0][1] - offset.offset for rank, offset in zip(of_ranks, offsets, strict=True))

    def ms(seconds: float, rank: int) -> float:
        return 1e3 * (seconds - offsets[rank].offset - origin)

    phases = [
        [[name, ms(start, r), ms(end, r)] for name, start, end in rank["phases"]] for r, rank in enumerate(of_ranks)
    ]
    collectives = []
    for same in _matched([rank["collectives"] for rank in of_ranks]):
        first = same[0]
        seconds = min(c["end"] - c["start"] for c in same)
        arrivals = [ms(c["enqueue"], r) for r, c in enumerate(same)]
        row = {key: first[key] for key in ("op", "what", "group", "phase", "dtype", "bucket", "last", "timing")}
        row |= {"step": of_ranks[0]["step"], "bytes": first["size_bytes"], "ranks": len(same)}
        for key in ("enqueue", "start", "end"):
            row[f"{key}_ms"] = [ms(c[key], r) for r, c in enumerate(same)]
        row |= {
            "latency_us": 1e6 * max(c["end"] - c["enqueue"] for c in same),
            "time_us": 1e6 * seconds,
            "skew_us": 1e3 * (max(arrivals) - min(arrivals)),
            "late_rank": arrivals.index(max(arrivals)),
        }
        factor = busbw_factor(first["op"], len(same))
        if first["size_bytes"] and seconds > 0 and factor:
            row["algbw_gbps"] = algbw_gbps(first["size_bytes"], seconds)
            row["busbw_gbps"] = row["algbw_gbps"] * factor
        collectives.append(row)
    step = {"step": of_ranks[0]["step"], "origin_s": origin, "phases": phases, "collectives": collectives}
    return step | {"figures": _figures(step, of_ranks)}


def _matched(of_ranks: Sequence[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    """Return the collectives that belong together: the k-th of each (operation, purpose, bucket) on every rank."""
    seen: list[dict[Any, dict[str, Any]]] = []
    for collectives in of_ranks:
        counts: dict[tuple[Any, ...], int] = {}
        own = {}
        for c in collectives:
            key = (c["op"], c["what"], c["bucket"])
            counts[key] = counts.get(key, 0) + 1
            own[key, counts[key]] = c
        seen.append(own)
    return [[own[key] for own in seen] for key in seen[0] if all(key in own for own in seen)]


def _figures(step: dict[str, Any], of_ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the numbers of one step: means over ranks of what each rank saw, and who had most work of its own."""
    costs, step_ms, works, differences = [], [], [], []
    for r, rank in enumerate(of_ranks):
        own = [Collective(**c) for c in rank["collectives"] if c["phase"] not in PAUSES]
        costs.append(account(own))
        step_ms.append(sum(end - start for name, start, end in step["phases"][r] if name not in PAUSES))
        works.append(_own_work_ms(rank))
        if rank["no_sync_s"] is not None:
            synced = sum(next(e - s for n, s, e in reversed(rank["phases"]) if n == x) for x in ("forward", "backward"))
            differences.append(1e3 * (synced - rank["no_sync_s"]))
    buckets = [c for c in step["collectives"] if c["bucket"] is not None]
    totals = [sum(work.values()) for work in works]
    late = totals.index(max(totals))
    others = [work for r, work in enumerate(works) if r != late] or works
    behind = {p: works[late][p] - statistics.median(w[p] for w in others) for p in WORK}
    others_ms = statistics.median(sum(w.values()) for w in others)
    return {
        "step": step["step"],
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
        "bytes": sum(c["bytes"] for c in step["collectives"] if c["phase"] not in PAUSES),
        "bus_bytes": sum(c["bytes"] * (busbw_factor(c["op"], c["ranks"]) or 0) for c in buckets),
        # Two that run at the same time share the link: it was busy once.
        "transfer_s": union_length([(max(c["start_ms"]), max(c["start_ms"]) + c["time_us"] / 1e3) for c in buckets])
        / 1e3,
        "profiled": of_ranks[0]["profiled"],
    }


def _own_work_ms(rank: dict[str, Any]) -> dict[str, float]:
    """Return how long a rank worked in each phase, without waiting for others.

    All ranks take equally long for a step: the fast ones wait in the collectives. So a backward pass counts to the
    moment when its last bucket was ready, and calls that wait for other ranks are taken off their phase.
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

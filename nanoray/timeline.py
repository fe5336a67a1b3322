"""What all ranks noted, put together: metrics, who was late, one line per traced step on disk, and the timeline.

runs/.../comm/
    steps.jsonl      every traced step: phases and collectives of all ranks, in ms on rank 0's clock
    buckets.json     which parameters travel in which bucket
    timeline.json    the newest window of steps for https://ui.perfetto.dev (Chrome's trace format)
    timeline.svg     the same as a picture

`python -m nanoray.timeline RUN --step S` draws another window.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoray.callbacks import JsonlWriter
from nanoray.comm import (
    ClockOffset,
    Collective,
    CommRecorder,
    account,
    clock_domain,
    copy_gbps,
    measure_offsets,
    wait_for,
)
from nanoray.errors import ConfigError
from nanoray.mesh import Mesh
from nanoray.metrics import algbw_gbps, busbw_factor
from nanoray.run import write_json

if TYPE_CHECKING:
    from torch import nn

PAUSES = ("eval", "checkpoint")  # no part of a step's time
WORK = ("data", "forward", "backward", "optimizer")  # phases in which a rank can be slower than the others
LATE_SHARE = 0.2  # of the others' own work: less is noise
LATE_OF, LATE_TIMES = 8, 6  # a straggler was behind in 6 of the last 8 traced steps
MAX_DRAWN = 4  # steps in one picture


class CommTrace:
    """What the loop talks to when its collectives are measured: the notebook, and rank 0's log of all notebooks."""

    def __init__(self, mesh: Mesh, recorder: CommRecorder, twin: nn.Module, log: CommLog | None) -> None:
        """Take the model's `twin`, whose hook is the recorder's; `log` is None on all ranks but rank 0."""
        self._mesh, self._recorder, self.twin, self._log = mesh, recorder, twin, log
        self._offsets: list[ClockOffset] = []
        self.phase = recorder.phase
        mesh.recorder = recorder

    def prepare(self) -> None:
        """Pay for what the first trace costs, before the first step; compare the clocks. (all ranks)"""
        self._recorder.prepare()
        self._offsets = measure_offsets(self._mesh)

    def begin(self, step: int, model: nn.Module) -> nn.Module:
        """Return the model to use for this step: on traced ones the twin, whose hook takes notes."""
        return self.twin if self._recorder.begin(step) else model

    def end(self, unsynced: Callable[[], None]) -> float:
        """Close the step's notes; now and then time `unsynced`, and return the seconds that took. (all ranks)"""
        self._recorder.end()
        if not self._recorder.no_sync_due():
            return 0.0
        start = time.perf_counter()
        with self._recorder.no_sync_pass():
            unsynced()
        return time.perf_counter() - start

    def read(self, note: Callable[[str], None]) -> dict[str, float]:
        """Return the metrics of the steps traced since the last call. (all ranks; after a value was fetched)"""
        self._recorder.clock.anchor()
        own = self._recorder.read()
        if not own:
            return {}
        if any(offset.uncertainty for offset in self._offsets):  # several hosts: their clocks drift
            self._offsets = measure_offsets(self._mesh)
        self._mesh.recorder = None  # the notes are no part of what they describe
        notes = self._mesh.gather(own)
        self._mesh.recorder = self._recorder
        if self._log is None or notes is None:
            return {}
        write_json(self._log.folder / "buckets.json", self._recorder.buckets(self.twin))
        metrics, lines = self._log.add(notes, self._offsets)
        for line in lines:
            note(line)
        return metrics

    def finish(self, note: Callable[[str], None]) -> dict[str, Any] | None:
        """Read what is left, measure the memory's limit, draw; return the summary. (all ranks)"""
        wait_for(self._mesh.device)
        self.read(note)
        self._mesh.barrier()
        limits = self._mesh.gather((copy_gbps(self._mesh.device), clock_domain()))
        self._mesh.recorder = None
        if self._log is None or limits is None:
            return None
        one_host = len({host for _, host in limits}) == 1
        what = "what every rank copies in its memory at the same time"
        what += "" if one_host else "; the network between the hosts is slower"
        return self._log.finish(self._offsets, min(gbps for gbps, _ in limits), what)


class CommLog:
    """Collects what the ranks noted. (rank 0 only)"""

    def __init__(self, folder: Path, resume_step: int, attempt: int) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self._file = JsonlWriter(folder / "steps.jsonl", resume_step)
        self._attempt = attempt
        self._late: deque[tuple[int, str, float]] = deque(maxlen=LATE_OF)
        self._named: tuple[int, str] | None = None
        self._window: deque[dict[str, Any]] = deque(maxlen=MAX_DRAWN)
        self._steps: list[dict[str, Any]] = []  # the figures of every traced step, without its collectives
        self._slowest: dict[str, Any] = {}

    def add(
        self, notes: list[list[dict[str, Any]]], offsets: Sequence[ClockOffset]
    ) -> tuple[dict[str, float], list[str]]:
        """Take the notes of all ranks, in rank order; return the metrics of the next record, and lines to say."""
        lines, figures = [], []
        for of_ranks in zip(*notes, strict=True):
            step = merge(of_ranks, offsets) | {"attempt": self._attempt}
            self._file.on_record(step)
            self._window.append(step)
            figures.append(step["figures"])
            buckets = [c for c in step["collectives"] if c["bucket"] is not None]
            self._slowest = max([*buckets, self._slowest], key=lambda c: c.get("time_us") or 0.0)
            lines += self._straggler(step["figures"])
        self._steps += figures
        return {f"comm/{key}": value for key, value in mean_figures(figures).items()}, lines

    def _straggler(self, figures: dict[str, Any]) -> list[str]:
        """Name a rank that was behind the others by much and often; once, until it changes."""
        rank, phase, excess_ms = figures["late_rank"], figures["late_phase"], figures["late_ms"]
        self._late.append((rank, phase, excess_ms if excess_ms > LATE_SHARE * figures["others_ms"] else 0.0))
        mine = [(p, ms) for r, p, ms in self._late if r == rank and ms]
        if len(mine) < LATE_TIMES:
            return []
        phase = statistics.mode(p for p, _ in mine)
        if self._named == (rank, phase):
            return []
        self._named = (rank, phase)
        behind = statistics.median(ms for _, ms in mine)
        return [
            f"straggler  rank {rank}: {behind:.1f} ms a step behind the others ({figures['others_ms']:.1f} ms of own "
            f"work), most of it in {phase}; seen in {len(mine)} of {len(self._late)} traced steps, at step "
            f"{figures['step']}"
        ]

    def finish(self, offsets: Sequence[ClockOffset], limit_gbps: float, limit: str) -> dict[str, Any]:
        """Draw the newest window and return the summary of the run."""
        self._file.close()
        if not self._steps:
            return {"traced_steps": 0}
        drawn = newest_window(list(self._window))
        write_json(self.folder / "timeline.json", chrome_trace(drawn))
        draw(drawn, self.folder / "timeline.svg")
        mean = mean_figures(self._steps)
        known = [o.uncertainty for o in offsets if o.uncertainty]
        busbw = mean.get("busbw_gbps")
        return {
            "traced_steps": len(self._steps),
            "step_ms": mean["step_ms"],
            "busy_share": 100 * mean["busy_ms"] / mean["step_ms"],
            "exposed_share": mean["exposed_share"],
            "busy_ms": mean["busy_ms"],
            "exposed_ms": mean["exposed_ms"],
            "hidden_ms": mean["hidden_ms"],
            "ab_ms": mean.get("ab_ms"),
            "bytes_per_step": statistics.mean(f["bytes"] for f in self._steps),
            "slowest": {key: self._slowest[key] for key in ("step", "bucket", "bytes", "time_us", "skew_us")},
            "busbw_gbps": busbw,
            "limit_gbps": limit_gbps,
            "limit": limit,
            "limit_share": 100 * busbw / limit_gbps if busbw else None,
            "straggler": list(self._named) if self._named else None,
            "clock": f"± {1e6 * max(known):.0f} µs between hosts" if known else "one host, one clock",
        }


def mean_figures(steps: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the metrics of several traced steps: means, and the rank that was late most often."""
    keys = ("step_ms", "busy_ms", "exposed_ms", "hidden_ms", "skew_ms", "late_ms")
    mean: dict[str, float] = {key: statistics.fmean(s[key] for s in steps) for key in keys}
    mean["exposed_share"] = 100 * mean["exposed_ms"] / mean["step_ms"]
    mean["late_rank"] = statistics.mode(s["late_rank"] for s in steps)
    compared = [s["ab_ms"] for s in steps if s["ab_ms"] is not None]
    if compared:
        mean["ab_ms"] = statistics.median(compared)
    moved, seconds = sum(s["bus_bytes"] for s in steps), sum(s["transfer_s"] for s in steps)
    if seconds:
        mean["busbw_gbps"] = algbw_gbps(moved, seconds)
    return mean


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
        "transfer_s": sum(c["time_us"] for c in buckets) / 1e6,
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


# The timeline.


def newest_window(steps: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the newest steps that follow each other."""
    window = [steps[-1]]
    for step in reversed(steps[:-1]):
        if step["step"] != window[0]["step"] - 1:
            break
        window.insert(0, step)
    return window[-MAX_DRAWN:]


def chrome_trace(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the steps in Chrome's trace format: a process per rank, a row of phases, a row per kind of collective."""
    origin = steps[0]["origin_s"]
    events: list[dict[str, Any]] = []
    for rank in range(len(steps[0]["phases"])):
        rows = {"phases": 0}  # slices of one row must not overlap: what runs beside another gets the next row
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}})
        for step in steps:
            shift = 1e6 * (step["origin_s"] - origin)
            for name, start, end in step["phases"][rank]:
                span = {"ts": shift + 1e3 * start, "dur": 1e3 * (end - start), "pid": rank, "tid": 0}
                events.append({"ph": "X", "name": name, "cat": "phase", **span, "args": {"step": step["step"]}})
            free: dict[str, float] = {}
            for c in sorted(step["collectives"], key=lambda c: c["start_ms"][rank]):
                label = c["what"] if c["bucket"] is None else f"bucket {c['bucket']}"
                start, end = c["start_ms"][rank], c["end_ms"][rank]
                row_name = next(
                    n for n in (c["what"], *(f"{c['what']} {i}" for i in range(2, 99))) if free.get(n, 0) <= start
                )
                row = rows.setdefault(row_name, len(rows))
                free[row_name] = end
                span = {"ts": shift + 1e3 * start, "dur": 1e3 * (end - start), "pid": rank, "tid": row}
                keys = ("op", "group", "dtype", "bytes", "timing", "latency_us", "time_us", "skew_us", "busbw_gbps")
                args = {key: c[key] for key in keys if key in c} | {"enqueue_us": shift + 1e3 * c["enqueue_ms"][rank]}
                events.append({"ph": "X", "name": label, "cat": "collective", **span, "args": args})
        for name, row in rows.items():
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": row, "args": {"name": name}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


COLOURS = {
    "data": "#c9a227",
    "forward": "#7fb3d5",
    "backward": "#2e6da4",
    "optimizer": "#7d9a58",
    "log": "#b8b8b8",
    "eval": "#8e7cc3",
    "checkpoint": "#c27ba0",
}
EXPOSED, HIDDEN = "#c0392b", "#f0b27a"


def draw(steps: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw what every rank did in these steps; the picture explains itself."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    ranks, origin = len(steps[0]["phases"]), steps[0]["origin_s"]
    figure, axes = pyplot.subplots(figsize=(12, 1.9 + 0.9 * ranks), layout="constrained")
    used = set()
    for step in steps:
        shift = 1e3 * (step["origin_s"] - origin)
        for rank, phases in enumerate(step["phases"]):
            for name, start, end in phases:
                used.add(name)
                axes.barh(rank - 0.22, end - start, 0.36, shift + start, color=COLOURS.get(name, "#dddddd"), lw=0)
            ready = max((c["enqueue_ms"][rank] for c in step["collectives"] if c["last"]), default=0.0)
            for c in step["collectives"]:
                start, end = c["start_ms"][rank], c["end_ms"][rank]
                middle = start if c["bucket"] is None else min(max(start, ready), end)
                axes.barh(rank + 0.16, middle - start, 0.3, shift + start, color=HIDDEN, ec="white", lw=0.6)
                axes.barh(rank + 0.16, end - middle, 0.3, shift + middle, color=EXPOSED, ec="white", lw=0.6)
                if c["bucket"] is not None:
                    at = (shift + (start + end) / 2, rank + 0.16)
                    axes.text(*at, str(c["bucket"]), fontsize=7, ha="center", va="center")
        axes.axvline(shift, color="0.4", lw=0.6)
        axes.text(shift, -0.62, f" step {step['step']}", fontsize=8, color="0.3", va="center")
    axes.set_yticks(range(ranks), [f"rank {r}" for r in range(ranks)])
    axes.set_ylim(ranks - 0.4, -0.75)
    axes.set_xlabel("ms on rank 0's clock")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    legend = [Patch(color=COLOURS[name], label=name) for name in COLOURS if name in used]
    legend.append(Patch(color=HIDDEN, label="collective, hidden behind backward"))
    legend.append(Patch(color=EXPOSED, label="collective, exposed: the step waits"))
    figure.legend(handles=legend, loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    mean = mean_figures([step["figures"] for step in steps])
    numbers = ", ".join(f"{c['bytes'] / 1e6:.2g} MB" for c in steps[-1]["collectives"] if c["bucket"] is not None)
    axes.set_title(
        f"{ranks} ranks, {len(steps)} step(s): {mean['step_ms']:.1f} ms a step, collectives {mean['busy_ms']:.1f} ms, "
        f"exposed {mean['exposed_ms']:.1f} ms ({mean['exposed_share']:.0f} %)\n"
        f"upper bar: what the rank does; lower bar: gradient buckets ({numbers}) and other collectives",
        fontsize=9,
        loc="left",
    )
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> int:
    """Run `python -m nanoray.timeline RUN [--step S]`: draw a window of traced steps again."""
    parser = argparse.ArgumentParser(prog="python -m nanoray.timeline", description="Draw traced steps of a run.")
    parser.add_argument("run", type=Path, help="folder of a run that was started with --comm_trace")
    parser.add_argument("--step", type=int, help="last step to draw [the newest traced one]")
    parser.add_argument("--figure", type=Path, help="picture to write [RUN/comm/timeline.svg]")
    args = parser.parse_args(argv)
    try:
        steps = read_steps(args.run)
        if args.step is not None:
            if args.step not in {s["step"] for s in steps}:
                known = ", ".join(str(s["step"]) for s in steps[-8:])
                raise ConfigError(f"step = {args.step} was not traced; the last traced ones are {known}")
            steps = [s for s in steps if s["step"] <= args.step]
        drawn = newest_window(steps)
        figure = args.figure or args.run / "comm" / "timeline.svg"
        draw(drawn, figure)
        write_json(figure.with_suffix(".json"), chrome_trace(drawn))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{figure}  and {figure.with_suffix('.json').name} for https://ui.perfetto.dev")
    return 0


def read_steps(run: Path) -> list[dict[str, Any]]:
    """Return the traced steps of a run. Raises ConfigError when there is none."""
    path = run / "comm" / "steps.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    if not lines:
        raise ConfigError(f"{run} has no traced steps; start a run with --comm_trace every=50, or always")
    return [json.loads(line) for line in lines]


if __name__ == "__main__":
    raise SystemExit(main())

"""`python -m tests.stress control`: what thousands of ranks cost the driver, and how soon it names
a failed one.

    decision    faults/cause.py and faults/hang.py alone, in this process, given made-up events of n ranks
    driver      the driver's own loop on a local Ray: n pending runs, n pending heartbeats, one rank really killed

No rank trains. A few actors stand in for all ranks but one: they answer as a `Worker` does, at the
lowest cost. So the driver has as many handles, calls and answers as in a run of n ranks, but fewer
connections. A cost that is linear in n has the exponent 1 between two sizes. Above LINEAR this
benchmark fails.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import random
import resource
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from nanoray.bench.harness.benchmark import Benchmark, Number
from nanoray.bench.harness.report import Measurement, Report, markdown, number
from nanoray.errors import ConfigError
from nanoray.faults.cause import Failure, FailureCollector, FaultReport, consequences_of
from nanoray.faults.hang import Position, Watchdog, behind
from nanoray.launch.connection import connected
from nanoray.launch.recovery.worker_group import SETTLE_S
from nanoray.machine.slots import local_slots
from nanoray.machine.text import aligned
from tests.stress.crowd import Crowd, Stage, end_hung

# The largest exponent that counts as linear: a constant part lowers it, cold caches raise it
LINEAR = 1.3
SIZES = "64,1000,4000"
QUICK_SIZES = "16,64"
MIN_WINDOW_S = 3.0  # answers come in bursts
ROUNDS = 20  # heartbeats of every rank in the decision's steady state
EVENTS = "events per second"
MEMORY = "peak memory"
HEARTBEATS = "heartbeats"
CPU = "driver CPU"
RSS = "driver RSS"
START = "start"
KILLED = "killed, others fail"
WAITS = "killed, others wait"
HUNG = "hung"


class ControlBenchmark(Benchmark):
    """Measure what thousands of ranks cost the driver."""

    numbers = (Number("rounds", "faults of each kind, and windows", 5, 2),)
    # Wrong: reports that name another rank than the one that failed

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Add this benchmark's flags."""
        parser.add_argument(
            "--workers",
            metavar="N,N",
            help=f"numbers of ranks [{SIZES}; {QUICK_SIZES} with --quick]",
        )
        parser.add_argument(
            "--window_s",
            type=float,
            metavar="S",
            help="a window of steady state [each rank heartbeats once, or more]",
        )
        parser.add_argument(
            "--part", choices=("decision", "driver"), help="only one of the two [both]"
        )

    def measure(self, args: argparse.Namespace, report: Report) -> None:
        """Measure both parts at every size and fill the report."""
        sizes = _sizes(args.workers or (QUICK_SIZES if args.quick else SIZES))
        rounds = args.rounds
        if args.window_s is not None and not 0 < args.window_s < math.inf:
            raise ConfigError(f"window_s = {args.window_s}; give one above 0, or leave it out")
        report.conditions["recipe"] = (
            f"{', '.join(map(str, sizes))} ranks, {rounds} rounds, nothing is trained"
        )
        with tempfile.TemporaryDirectory(prefix="nanoray-control-") as folder:
            if args.part != "driver":
                for n in sizes:
                    _decide(report, n, rounds, Path(folder))
            if args.part != "decision":
                _drive(report, sizes, rounds, args.window_s, Path(folder))
        if len(sizes) > 1:
            for arm, metric in dict.fromkeys(
                (row.extra["part"], row.metric) for row in report.rows
            ):
                if metric in (KILLED, WAITS, HUNG, START, MEMORY):
                    _exponent(report, arm, metric, *sizes[-2:])

    def format_text(self, report: Report) -> list[str]:
        """Return a table with a column per size, the notes of the rows, and the finding."""
        header, found = _table(report, spread=False)
        wrong = [
            f"{row.arm}, {row.metric}: {row.wrong} of {row.n} name the wrong rank"
            for row in report.rows
            if row.wrong
        ]
        notes = dict.fromkeys(
            f"{row.metric}: {row.note}"
            for row in report.rows
            if row.note and "exponent" not in row.arm
        )
        table = aligned(
            [(*header, ""), *((*line, "") for line in found)], right=set(range(1, len(header)))
        )
        return [*table, "", *wrong, *notes, "", *report.findings(finding(report))]

    def format_markdown(self, report: Report) -> list[str]:
        """Return a table for a page, and the finding."""
        header, found = _table(report, spread=True)
        return [*markdown(header, found), "", *report.findings(finding(report))]

    def draw(self, report: Report, path: Path) -> None:
        """Draw the time to name the failed rank, and the driver's CPU share, over the number of ranks."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        def series(part: str, metric: str) -> list[Measurement]:
            found = [
                r
                for r in report.rows
                if r.extra.get("part") == part and r.metric == metric and r.values
            ]
            return [r for r in found if "ranks" in r.extra]

        figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
        for part, style in (("decision", "--"), ("driver", "-")):
            for metric in (KILLED, WAITS, HUNG):
                if rows := series(part, metric):
                    spread = [
                        [r.median - r.quartiles[0] for r in rows],
                        [r.quartiles[1] - r.median for r in rows],
                    ]
                    ranks = [r.extra["ranks"] for r in rows]
                    left.errorbar(
                        ranks,
                        [r.median for r in rows],
                        spread,
                        ls=style,
                        marker="o",
                        label=f"{part}: {metric}",
                    )
        left.set(
            title="time until the failed rank is named",
            xlabel="ranks",
            ylabel="ms, median and quartiles",
        )
        left.set(xscale="log", yscale="log")
        left.legend(fontsize=7)
        for metric, colour in ((CPU, "#c0392b"), (RSS, "#2980b9")):
            if rows := series("driver", metric):
                label = f"{metric}, {rows[0].unit}"
                right.plot(
                    [r.extra["ranks"] for r in rows],
                    [r.median for r in rows],
                    "o-",
                    color=colour,
                    label=label,
                )
                right.legend(fontsize=8)
        right.set(title="the driver in steady state", xlabel="ranks", xscale="log")
        figure.supxlabel(report.conditions.get("recipe", ""), fontsize=7)
        figure.savefig(path, dpi=150)
        pyplot.close(figure)


def _sizes(text: str) -> list[int]:
    try:
        sizes = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise ConfigError(f"workers = {text}: not whole numbers; write N,N like {SIZES}") from None
    if sizes[0] < 2:
        raise ConfigError(f"workers = {text}: with one rank no other can fail; give 2 or more")
    return sizes


def _arm(part: str, n: int) -> str:
    return f"{part}, {n}"


def _add(
    report: Report, part: str, n: int, metric: str, unit: str, values: list[float], **more: Any
) -> None:
    extra = {"part": part, "ranks": n}
    report.add(_arm(part, n), metric, unit, values, extra=extra, **more)
    what = f"{number(report.rows[-1].median)} {unit}" if values else "FAILED"
    print(f"{_arm(part, n):<16} {metric:<24} {what}", file=sys.stderr, flush=True)


def _exponent(report: Report, part: str, metric: str, few: int, many: int) -> None:
    """Add log(cost at many / cost at few) / log(many / few), by rounds, and its target."""
    low = report.row(_arm(part, few), metric)
    high = report.row(_arm(part, many), metric)
    if not (low and high and low.values and high.values):
        return
    values = [
        math.log(b / a) / math.log(many / few)
        for a, b in zip(low.values, high.values, strict=False)
    ]
    note = f"from {few} to {many} ranks: 1 is linear, 2 quadratic"
    row = Measurement(f"{part}, exponent", metric, "", tuple(values), note, extra={"part": part})
    report.rows.append(row)
    report.add_target(f"{part}: growth of {metric!r}, {few} to {many} ranks", row, "<=", LINEAR)


# The decision alone.


def _decide(report: Report, n: int, rounds: int, folder: Path) -> None:
    """Measure collector and watchdog with n ranks: in steady state, and with one failure of each
    kind per round.
    """
    source = random.Random(n)
    rates = []
    peaks = []
    took: dict[str, list[float]] = {KILLED: [], WAITS: [], HUNG: []}
    wrong = dict.fromkeys(took, 0)
    for _ in range(rounds):
        collector = FailureCollector(range(n), True, 60.0, SETTLE_S)
        watchdog = Watchdog(range(n), 60.0)
        began = time.thread_time()
        for step in range(ROUNDS):
            _heartbeats(collector, watchdog, n, step)
        rates.append(ROUNDS * n / (time.thread_time() - began))
        for kind in took:
            victim = source.randrange(n)
            if kind == HUNG:
                seconds, named = _hang(n, victim, folder)
            else:
                seconds, named = _kill(n, victim, source, kind, folder)
            took[kind].append(1e3 * seconds)
            wrong[kind] += named != victim
        tracemalloc.start()
        collector = FailureCollector(range(n), True, 60.0, SETTLE_S)
        watchdog = Watchdog(range(n), 60.0)
        _heartbeats(collector, watchdog, n, 1)
        _kill(n, 0, source, KILLED, folder)
        peaks.append(tracemalloc.get_traced_memory()[1] / 2**20)
        tracemalloc.stop()
    note = "heartbeats; after each, the collector and the watchdog are asked whether there is something to do"
    _add(report, "decision", n, EVENTS, "1/s of CPU", rates, note=note)
    _add(
        report,
        "decision",
        n,
        MEMORY,
        "MiB",
        peaks,
        note="of Python objects, in a round of heartbeats and a kill",
    )
    notes = {
        KILLED: "CPU time from the first event to the written report",
        HUNG: "CPU time from the alarm to the written report",
    }
    for kind, values in took.items():
        note = notes.get(kind, notes[KILLED])
        _add(report, "decision", n, kind, "ms", values, note=note, wrong=wrong[kind])


def _heartbeats(collector: FailureCollector, watchdog: Watchdog, n: int, step: int) -> None:
    for rank in range(n):
        collector.set_waiting(rank, False, time.monotonic())
        watchdog.update(rank, Position(step + 2, "forward"), time.monotonic())
        if collector.complete(time.monotonic()) or watchdog.hangs():
            raise RuntimeError(
                "the collector or the watchdog reported a fault though all ranks made progress"
            )


def _kill(n: int, victim: int, source: random.Random, kind: str, folder: Path) -> tuple[float, int]:
    """Let one rank die and all others notice; the death is reported anywhere among their events.

    Return the CPU seconds until the report is written, and the rank it names.
    """
    collector = FailureCollector(range(n), kind == WAITS, 60.0, SETTLE_S)
    others = [rank for rank in range(n) if rank != victim]
    source.shuffle(others)
    at = source.randrange(n)
    began = time.thread_time()
    for rank in [*others[:at], victim, *others[at:]]:
        now = time.monotonic()
        if collector.complete(now):
            break
        if rank == victim:
            collector.ended(rank, Failure(rank, "killed", f"rank {rank} died", 7, "backward"), now)
        elif kind == WAITS:
            collector.set_waiting(rank, True, now)
        else:
            collector.ended(
                rank, Failure(rank, "peer_lost", f"rank {rank} failed: connection closed", 7), now
            )
    return _report(collector, n, folder, began)


def _hang(n: int, victim: int, folder: Path) -> tuple[float, int]:
    """Let one rank stay a phase behind; return the CPU seconds from alarm to report, and the rank
    it names.
    """
    watchdog = Watchdog(range(n), 1e-9)
    collector = FailureCollector(range(n), False, 60.0, 0.0)
    for rank in range(n):
        watchdog.update(rank, Position(7, "forward" if rank == victim else "backward"), 0.0)
    time.sleep(0.001)
    began = time.thread_time()
    if not watchdog.hangs():
        raise RuntimeError("no rank moved, and the watchdog gave no alarm")
    positions = watchdog.positions()
    for rank in behind(positions, {}):
        step, phase = positions[rank]
        collector.ended(
            rank,
            Failure(rank, "hung", f"rank {rank} made no progress", step, phase),
            time.monotonic(),
        )
    return _report(collector, n, folder, began)


def _report(collector: FailureCollector, n: int, folder: Path, began: float) -> tuple[float, int]:
    cause = collector.cause
    others = [failure for failure in collector.failures if failure is not cause]
    FaultReport(cause, consequences_of(others), 0, n).write(folder)
    return time.thread_time() - began, cause.rank


# The driver's loop on a real Ray.


def _drive(
    report: Report, sizes: list[int], rounds: int, window_s: float | None, folder: Path
) -> None:
    """Measure the driver's loop at every size, on a local Ray that is started for it."""
    with _local_ray():
        for n in sizes:
            stage = Stage(n, folder)
            try:
                _steady(report, stage, rounds, window_s)
                _faults(report, stage, rounds)
            finally:
                stage.end()


@contextmanager
def _local_ray() -> Iterator[None]:
    with contextlib.redirect_stdout(sys.stderr):  # stdout is the report's
        local = connected("local", local_slots("cpu", 1, [], 1))
        with local:
            yield


def _steady(report: Report, stage: Stage, windows: int, window_s: float | None) -> None:
    """Watch ranks without faults: heartbeats per second, and the CPU time and memory of this
    process.
    """
    crowd = stage.crowd("restart")
    period_s = crowd_period = 0.0
    samples: list[tuple[int, float, float]] = []
    rss: list[float] = []

    def look() -> None:
        nonlocal period_s, crowd_period
        crowd_period = crowd.heartbeat_s
        period_s = window_s or max(MIN_WINDOW_S, crowd_period)
        deadline = time.monotonic() + 60
        # On average each has answered once
        while crowd.requests < 2 * stage.n and time.monotonic() < deadline:
            time.sleep(0.01)
        for _ in range(windows + 1):
            samples.append((crowd.requests, time.process_time(), time.monotonic()))
            rss.append(_rss_mib())
            if len(samples) <= windows:
                time.sleep(period_s)
        stage.kill(crowd, False)

    _, _, named = stage.watch(crowd, look)
    stage.rest(crowd)
    pairs = list(itertools.pairwise(samples))
    rates = [(b[0] - a[0]) / (b[2] - a[2]) for a, b in pairs]
    shares = [100 * (b[1] - a[1]) / (b[2] - a[2]) for a, b in pairs]
    wanted = stage.n / crowd_period
    note = f"{wanted:.0f} wanted: each of {stage.n} ranks every {crowd_period:g} s, {len(stage.actors)} stand-in(s)"
    if sum(rates) / len(rates) < 0.8 * wanted:
        note += "; the driver is " + (
            "busy" if max(shares) > 80 else "not busy: stand-ins or machine give no more"
        )
    _add(
        report,
        "driver",
        stage.n,
        HEARTBEATS,
        "1/s",
        rates,
        note=note,
        wrong=int(named != crowd.victim),
    )
    _add(
        report,
        "driver",
        stage.n,
        CPU,
        "% of a core",
        shares,
        note="all threads of the driver, including Ray's",
    )
    _add(
        report,
        "driver",
        stage.n,
        RSS,
        "MiB",
        rss[1:],
        note="resident memory of the driver, including numpy and Ray",
    )


def _faults(report: Report, stage: Stage, rounds: int) -> None:
    """Let one rank fail `rounds` times in each way."""
    starts: list[float] = []
    took: dict[str, list[float]] = {KILLED: [], WAITS: [], HUNG: []}
    wrong = dict.fromkeys(took, 0)
    for _ in range(rounds):
        for kind, values in took.items():
            crowd = stage.crowd("in_place" if kind == WAITS else "restart")
            if kind == HUNG:
                seconds, named = end_hung(crowd)
            else:

                def soon(crowd: Crowd = crowd, kind: str = kind) -> None:
                    deadline = time.monotonic() + 60
                    while crowd.requests < stage.n and time.monotonic() < deadline:
                        time.sleep(0.01)
                    time.sleep(0.5)
                    stage.kill(crowd, kind == WAITS)

                started, seconds, named = stage.watch(crowd, soon)
                starts.append(1e3 * started)
            values.append(1e3 * seconds)
            wrong[kind] += named != crowd.victim
            stage.rest(crowd)
    _add(
        report,
        "driver",
        stage.n,
        START,
        "ms",
        starts,
        note="WorkerGroup.begin: tell every rank where to meet the others",
    )
    kill = "SIGKILL of one rank to the written report that names it"
    notes = {
        KILLED: f"{kill}; all others fail",
        WAITS: f"{kill}; all others wait",
        HUNG: "alarm to the named rank",
    }
    for kind, values in took.items():
        _add(report, "driver", stage.n, kind, "ms", values, note=notes[kind], wrong=wrong[kind])


def _rss_mib() -> float:
    with suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
        return pages * resource.getpagesize() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


# The report.


def finding(report: Report) -> list[str]:
    """Return the result at the largest size in one sentence."""
    driven = [row for row in report.rows if row.metric == CPU and row.values]
    if not driven:
        return []
    arm = driven[-1].arm
    n = driven[-1].extra["ranks"]
    found = {
        metric: report.row(arm, metric) for metric in (HEARTBEATS, CPU, RSS, KILLED, WAITS, HUNG)
    }
    value = {
        metric: number(row.median) if row and row.values else "?" for metric, row in found.items()
    }
    return [
        f"{n:,} ranks: {value[HEARTBEATS]} heartbeats/s cost the driver {value[CPU]} % of a core "
        f"and {value[RSS]} MiB; "
        f"a killed rank is named after {value[KILLED]} ms when all others fail and {value[WAITS]} "
        "ms when they wait, "
        f"one that hangs {value[HUNG]} ms after the alarm"
    ]


def _table(report: Report, spread: bool) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return a line per quantity, a column per size, and the exponent where there is one."""
    sizes = sorted({row.extra["ranks"] for row in report.rows if "ranks" in row.extra})

    def cell(part: str, metric: str, n: int) -> str:
        row = report.row(_arm(part, n), metric)
        if row is None or not row.values:
            return "" if row is None else "FAILED"
        return number(row.median) + (
            f" ({number(min(row.values))}–{number(max(row.values))})" if spread else ""
        )

    lines = []
    for part, metric in dict.fromkeys((row.extra["part"], row.metric) for row in report.rows):
        row = report.row(_arm(part, sizes[0]), metric)
        growth = report.row(f"{part}, exponent", metric)
        unit = f", {row.unit}" if row and row.unit else ""
        tail = number(growth.median) if growth and growth.values else ""
        lines.append((f"{part}: {metric}{unit}", *(cell(part, metric, n) for n in sizes), tail))
    return ("", *(f"{n:,} ranks" for n in sizes), "exponent"), lines

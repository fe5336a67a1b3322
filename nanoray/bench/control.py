"""`python -m nanoray.bench control`: what thousands of ranks cost the driver, and how soon it names a culprit.

    judgement   failures.py and watchdog.py alone, in this process, fed with made-up news of n ranks
    driver      the driver's own loop on a local Ray: n pending runs, n pending beats, one rank really killed

No rank trains. A few actors stand in for all ranks but one: they answer as a `Worker` does, and cost as little as they
can. So the driver's handles, calls and answers are as many as in a run of n ranks; its connections are fewer. What
is linear in n doubles with n: the exponent between two sizes is 1. Above LINEAR this benchmark fails.
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

from nanoray.bench.crowd import Crowd, Stage, end_hung
from nanoray.bench.report import Report, Row, Target, aligned, markdown, number
from nanoray.config import load_config
from nanoray.devices import local_slots
from nanoray.errors import ConfigError
from nanoray.failures import Failure, FaultReport, Inquest
from nanoray.gang import DRAIN_S
from nanoray.placement import connected
from nanoray.watchdog import Position, Watchdog, behind

LINEAR = 1.3  # the largest exponent that is taken for linear: a constant part lowers it, cold caches raise it
SIZES, QUICK_SIZES = "64,1000,4000", "16,64"
MIN_WINDOW_S = 3.0  # answers come in bunches
ROUNDS = 20  # beats of every rank in the judgement's steady state
NEWS, MEMORY = "news per second", "peak memory"
BEATS, CPU, RSS, START = "beats heard", "driver CPU", "driver RSS", "start"
KILLED, WAITS, HUNG = "killed, echo of errors", "killed, others wait", "hung"
WRONG = "verdicts that name another rank than the one that failed"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's flags."""
    parser.add_argument("--workers", metavar="N,N", help=f"numbers of ranks [{SIZES}; {QUICK_SIZES} with --quick]")
    parser.add_argument("--rounds", type=int, metavar="N", help="faults of each kind, and windows [5; 2 with --quick]")
    parser.add_argument(
        "--window_s", type=float, metavar="S", help="a window of steady state [each rank beats once, or more]"
    )
    parser.add_argument("--part", choices=("judgement", "driver"), help="only one of the two [both]")


def measure(args: argparse.Namespace, report: Report) -> None:
    """Measure both parts at every size and fill the report."""
    sizes = _sizes(args.workers or (QUICK_SIZES if args.quick else SIZES))
    rounds = (2 if args.quick else 5) if args.rounds is None else args.rounds
    if rounds < 1 or (args.window_s is not None and not 0 < args.window_s < math.inf):
        raise ConfigError(f"rounds = {rounds}, window_s = {args.window_s}; both must be above 0: leave them out")
    report.conditions["recipe"] = f"{', '.join(map(str, sizes))} ranks, {rounds} rounds, nothing is trained"
    with tempfile.TemporaryDirectory(prefix="nanoray-control-") as folder:
        if args.part != "driver":
            for n in sizes:
                _judge(report, n, rounds, Path(folder))
        if args.part != "judgement":
            _drive(report, sizes, rounds, args.window_s, Path(folder))
    if len(sizes) > 1:
        for arm, metric in dict.fromkeys((row.extra["part"], row.metric) for row in report.rows):
            if metric in (KILLED, WAITS, HUNG, START, MEMORY):
                _exponent(report, arm, metric, *sizes[-2:])


def _sizes(text: str) -> list[int]:
    try:
        sizes = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise ConfigError(f"workers = {text}: not whole numbers; write N,N like {SIZES}") from None
    if sizes[0] < 2:
        raise ConfigError(f"workers = {text}: one rank has no other that fails with it; give 2 or more")
    return sizes


def _arm(part: str, n: int) -> str:
    return f"{part}, {n}"


def _add(report: Report, part: str, n: int, metric: str, unit: str, values: list[float], **more: Any) -> None:
    extra = {"part": part, "ranks": n}
    report.rows.append(Row(_arm(part, n), metric, unit, tuple(values), extra=extra, **more))
    what = f"{number(report.rows[-1].median)} {unit}" if values else "FAILED"
    print(f"{_arm(part, n):<16} {metric:<24} {what}", file=sys.stderr, flush=True)


def _exponent(report: Report, part: str, metric: str, few: int, many: int) -> None:
    """Add log(cost at many / cost at few) / log(many / few), by rounds, and its target."""
    low, high = report.row(_arm(part, few), metric), report.row(_arm(part, many), metric)
    if not (low and high and low.values and high.values):
        return
    values = [math.log(b / a) / math.log(many / few) for a, b in zip(low.values, high.values, strict=False)]
    note = f"from {few} to {many} ranks: 1 is linear, 2 quadratic"
    row = Row(f"{part}, exponent", metric, "", tuple(values), note, extra={"part": part})
    report.rows.append(row)
    report.targets.append(Target(f"{part}: growth of {metric!r}, {few} to {many} ranks", row, "<=", LINEAR))


# The judgement alone.


def _judge(report: Report, n: int, rounds: int, folder: Path) -> None:
    """Feed the judgement with news of n ranks: steady state, and one failure of each kind per round."""
    source, rates, peaks = random.Random(n), [], []
    took: dict[str, list[float]] = {KILLED: [], WAITS: [], HUNG: []}
    wrong = dict.fromkeys(took, 0)
    for _ in range(rounds):
        inquest, watchdog = Inquest(range(n), True, 60.0, DRAIN_S), Watchdog(range(n), 60.0)
        began = time.thread_time()
        for step in range(ROUNDS):
            _beats(inquest, watchdog, n, step)
        rates.append(ROUNDS * n / (time.thread_time() - began))
        for kind in took:
            culprit = source.randrange(n)
            seconds, named = _hang(n, culprit, folder) if kind == HUNG else _death(n, culprit, source, kind, folder)
            took[kind].append(1e3 * seconds)
            wrong[kind] += named != culprit
        tracemalloc.start()
        inquest, watchdog = Inquest(range(n), True, 60.0, DRAIN_S), Watchdog(range(n), 60.0)
        _beats(inquest, watchdog, n, 1)
        _death(n, 0, source, KILLED, folder)
        peaks.append(tracemalloc.get_traced_memory()[1] / 2**20)
        tracemalloc.stop()
    note = "beats, each followed by the questions whether all is known and whether somebody hangs"
    _add(report, "judgement", n, NEWS, "1/s of CPU", rates, note=note)
    _add(report, "judgement", n, MEMORY, "MiB", peaks, note="of Python's objects, a round of beats and a death")
    notes = {
        KILLED: "CPU time from the first news to the written report",
        HUNG: "CPU time from the alarm to the written report",
    }
    for kind, values in took.items():
        note = notes.get(kind, notes[KILLED])
        _add(report, "judgement", n, kind, "ms", values, note=note, wrong=wrong[kind])


def _beats(inquest: Inquest, watchdog: Watchdog, n: int, step: int) -> None:
    for rank in range(n):
        inquest.waits(rank, False, time.monotonic())
        watchdog.see(rank, Position(step + 2, "forward"), time.monotonic())
        if inquest.closed(time.monotonic()) or watchdog.hangs():
            raise RuntimeError("a run in which everybody moves was judged to be over")


def _death(n: int, culprit: int, source: random.Random, kind: str, folder: Path) -> tuple[float, int]:
    """Let one rank die and all others notice, the death's news anywhere among theirs.

    Return the CPU seconds that it took, and who is named.
    """
    inquest = Inquest(range(n), kind == WAITS, 60.0, DRAIN_S)
    others = [rank for rank in range(n) if rank != culprit]
    source.shuffle(others)
    at = source.randrange(n)
    began = time.thread_time()
    for rank in [*others[:at], culprit, *others[at:]]:
        now = time.monotonic()
        if inquest.closed(now):
            break
        if rank == culprit:
            inquest.ended(rank, Failure(rank, "killed", f"rank {rank} died", 7, "backward"), now)
        elif kind == WAITS:
            inquest.waits(rank, True, now)
        else:
            inquest.ended(rank, Failure(rank, "peer_lost", f"rank {rank} failed: connection closed", 7), now)
    return _verdict(inquest, n, folder, began)


def _hang(n: int, culprit: int, folder: Path) -> tuple[float, int]:
    """Let one rank stay a phase behind; return CPU seconds from the alarm to the report, and who is named."""
    watchdog, inquest = Watchdog(range(n), 1e-9), Inquest(range(n), False, 60.0, 0.0)
    for rank in range(n):
        watchdog.see(rank, Position(7, "forward" if rank == culprit else "backward"), 0.0)
    time.sleep(0.001)
    began = time.thread_time()
    if not watchdog.hangs():
        raise RuntimeError("nobody moved, and there was no alarm")
    places = watchdog.places()
    for rank in behind(places):
        step, phase = places[rank]
        inquest.ended(rank, Failure(rank, "hung", f"rank {rank} made no progress", step, phase), time.monotonic())
    return _verdict(inquest, n, folder, began)


def _verdict(inquest: Inquest, n: int, folder: Path, began: float) -> tuple[float, int]:
    cause = inquest.cause
    others = [failure for failure in inquest.failures if failure is not cause]
    FaultReport.of(cause, others, 0, n).write(folder)
    return time.thread_time() - began, cause.rank


# The driver's loop on a real Ray.


def _drive(report: Report, sizes: list[int], rounds: int, window_s: float | None, folder: Path) -> None:
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
    config = load_config(preset="tiny")
    with contextlib.redirect_stdout(sys.stderr):  # stdout is the report's
        local = connected("local", local_slots("cpu", 1, [], 1), config)
        with local:
            yield


def _steady(report: Report, stage: Stage, windows: int, window_s: float | None) -> None:
    """Watch ranks that all are well: beats per second, and the CPU time and memory of this process."""
    crowd = stage.crowd("restart")
    period_s = crowd_period = 0.0
    samples: list[tuple[int, float, float]] = []
    rss: list[float] = []

    def look() -> None:
        nonlocal period_s, crowd_period
        crowd_period = crowd.beat_s
        period_s = window_s or max(MIN_WINDOW_S, crowd_period)
        deadline = time.monotonic() + 60
        while crowd.asked < 2 * stage.n and time.monotonic() < deadline:  # all have answered once, on the average
            time.sleep(0.01)
        for _ in range(windows + 1):
            samples.append((crowd.asked, time.process_time(), time.monotonic()))
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
        note += "; the driver is " + ("busy" if max(shares) > 80 else "not busy: stand-ins or machine give no more")
    _add(report, "driver", stage.n, BEATS, "1/s", rates, note=note, wrong=int(named != crowd.culprit))
    _add(report, "driver", stage.n, CPU, "% of a core", shares, note="all threads of the driver, Ray's among them")
    _add(report, "driver", stage.n, RSS, "MiB", rss[1:], note="resident memory of the driver, numpy and Ray in it")


def _faults(report: Report, stage: Stage, rounds: int) -> None:
    """Let one rank fail, in every way and `rounds` times."""
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
                    while crowd.asked < stage.n and time.monotonic() < deadline:
                        time.sleep(0.01)
                    time.sleep(0.5)
                    stage.kill(crowd, kind == WAITS)

                started, seconds, named = stage.watch(crowd, soon)
                starts.append(1e3 * started)
            values.append(1e3 * seconds)
            wrong[kind] += named != crowd.culprit
            stage.rest(crowd)
    _add(report, "driver", stage.n, START, "ms", starts, note="Gang.begin: every rank is told where to meet the others")
    kill = "SIGKILL of one rank to the written report that names it"
    notes = {KILLED: f"{kill}; all others fail", WAITS: f"{kill}; all others wait", HUNG: "alarm to the named rank"}
    for kind, values in took.items():
        _add(report, "driver", stage.n, kind, "ms", values, note=notes[kind], wrong=wrong[kind])


def _rss_mib() -> float:
    with suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
        return pages * resource.getpagesize() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


# What it says.


def finding(report: Report) -> list[str]:
    """Return what it comes to at the largest size."""
    driven = [row for row in report.rows if row.metric == CPU and row.values]
    if not driven:
        return []
    arm, n = driven[-1].arm, driven[-1].extra["ranks"]
    found = {metric: report.row(arm, metric) for metric in (BEATS, CPU, RSS, KILLED, WAITS, HUNG)}
    value = {metric: number(row.median) if row and row.values else "?" for metric, row in found.items()}
    return [
        f"{n:,} ranks: {value[BEATS]} beats a second cost the driver {value[CPU]} % of a core and {value[RSS]} MiB; a "
        f"killed rank is named after {value[KILLED]} ms when all others fail and {value[WAITS]} ms when they wait, one "
        f"that hangs {value[HUNG]} ms after the alarm"
    ]


def _table(report: Report, spread: bool) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return a line per quantity, a column per size, and the exponent where there is one."""
    sizes = sorted({row.extra["ranks"] for row in report.rows if "ranks" in row.extra})

    def cell(part: str, metric: str, n: int) -> str:
        row = report.row(_arm(part, n), metric)
        if row is None or not row.values:
            return "" if row is None else "FAILED"
        return number(row.median) + (f" ({number(min(row.values))}–{number(max(row.values))})" if spread else "")

    lines = []
    for part, metric in dict.fromkeys((row.extra["part"], row.metric) for row in report.rows):
        row, growth = report.row(_arm(part, sizes[0]), metric), report.row(f"{part}, exponent", metric)
        unit = f", {row.unit}" if row and row.unit else ""
        tail = number(growth.median) if growth and growth.values else ""
        lines.append((f"{part}: {metric}{unit}", *(cell(part, metric, n) for n in sizes), tail))
    return ("", *(f"{n:,} ranks" for n in sizes), "exponent"), lines


def lines(report: Report) -> list[str]:
    """Return a table with a column per size, the notes of the rows, and the finding."""
    header, found = _table(report, spread=False)
    wrong = [f"{row.arm}, {row.metric}: {row.wrong} of {row.n} named wrong" for row in report.rows if row.wrong]
    notes = dict.fromkeys(f"{row.metric}: {row.note}" for row in report.rows if row.note and "exponent" not in row.arm)
    table = aligned([(*header, ""), *((*line, "") for line in found)], right=set(range(1, len(header))))
    return [*table, "", *wrong, *notes, "", *finding(report)]


def paste(report: Report) -> list[str]:
    """Return a table for a page, and the finding."""
    header, found = _table(report, spread=True)
    return [*markdown(header, found), "", *finding(report)]


def draw(report: Report, path: Path) -> None:
    """Draw the time to name the culprit, and the driver's CPU share, over the number of ranks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    def series(part: str, metric: str) -> list[Row]:
        found = [r for r in report.rows if r.extra.get("part") == part and r.metric == metric and r.values]
        return [r for r in found if "ranks" in r.extra]

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
    for part, style in (("judgement", "--"), ("driver", "-")):
        for metric in (KILLED, WAITS, HUNG):
            if rows := series(part, metric):
                spread = [[r.median - r.quartiles[0] for r in rows], [r.quartiles[1] - r.median for r in rows]]
                ranks = [r.extra["ranks"] for r in rows]
                left.errorbar(ranks, [r.median for r in rows], spread, ls=style, marker="o", label=f"{part}: {metric}")
    left.set(title="time until the culprit is named", xlabel="ranks", ylabel="ms, median and quartiles")
    left.set(xscale="log", yscale="log")
    left.legend(fontsize=7)
    for metric, colour in ((CPU, "#c0392b"), (RSS, "#2980b9")):
        if rows := series("driver", metric):
            label = f"{metric}, {rows[0].unit}"
            right.plot([r.extra["ranks"] for r in rows], [r.median for r in rows], "o-", color=colour, label=label)
            right.legend(fontsize=8)
    right.set(title="the driver in steady state", xlabel="ranks", xscale="log")
    figure.supxlabel(report.conditions.get("recipe", ""), fontsize=7)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)

"""`python -m nanoray.bench communication algorithms`: hand-written all-reduces against the backend's, over sizes.

Small tensors pay for messages, large ones for bytes, so the fastest algorithm changes with the
size: this finds where. NCCL's ring and tree are also forced, each in a communicator of its own, and
NCCL's tuning log proves what ran.
"""

from __future__ import annotations

import argparse
import glob
import math
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, TextIO

from nanoray.base.environment import environment
from nanoray.base.metrics import algbw_gbps, busbw_factor
from nanoray.base.text import aligned
from nanoray.bench.collectives import (
    agree,
    data_of,
    exact_period,
    finish,
    p99_of,
    start_together,
    wrong_elements,
)
from nanoray.bench.harness.benchmark import Benchmark, ranks_for
from nanoray.bench.harness.figure import Figure, Panel
from nanoray.bench.harness.plan import rotated
from nanoray.bench.harness.rank_pool import add_where_flags, where_from
from nanoray.bench.harness.report import Emit, Measurement, Record, Report, markdown, number, say
from nanoray.host.gpus import discover_gpus

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from nanoray.mesh.mesh import Mesh

ENTRY = "nanoray.bench.algorithms:sweep_rank"
BACKEND = "backend"
BY_HAND = ("ring", "tree", "double_tree", "recursive_doubling", "halving_doubling", "flat")
FORCED = {"nccl ring": "RING", "nccl tree": "TREE"}  # arm -> what the log must say
SIZES = tuple(4**i << 10 for i in range(9))  # 1 KB .. 64 MB
QUICK_SIZES = (1 << 10, 1 << 16, 1 << 20)
SMALL = "1 KB"
LARGE = "64 MB"
STATED_FOR = (4, "gloo")  # ranks and backend of the targets
TIE = 1.1  # medians closer than this swap places from run to run

_DECISION = re.compile(r"AllReduce: *(\d+) Bytes -> Algo (\w+) proto (\w+)", re.IGNORECASE)


def parse_tuning_log(text: str) -> list[tuple[int, str, str]]:
    """Return (bytes, algorithm, protocol) of every all-reduce in a log of NCCL's TUNING subsystem.

    The names are in capitals. (NCCL before 2.24, which no torch from 2.11 on has, writes numbers.)
    """
    found = _DECISION.findall(text)
    return [(int(size), algo.upper(), proto.upper()) for size, algo, proto in found]


# What a rank does.


def sweep_rank(mesh: Mesh, order: Record, emit: Emit) -> None:
    """Time every algorithm at every size and emit one event per pair. (all ranks)

    The order of the algorithms rotates from turn to turn. order: algorithms, sizes (bytes), dtype,
    iters. Emitted: algorithm, bytes, ranks, and either time_us (a blocking latency per turn, the
    slowest rank's) with wrong (elements, over all turns and ranks) and ran (what NCCL's log says),
    or skipped. One warm-up turn is checked and not timed.
    """
    import torch

    common = {"ranks": mesh.world_size}
    skipped = {}
    for name in order["algorithms"]:
        reason = _lacks(name, mesh)
        if reason:
            skipped[name] = reason
    names = [name for name in order["algorithms"] if name not in skipped]
    runs = _reductions(names, mesh)
    log = _own_log() if mesh.backend == "nccl" else None
    for size in order["sizes"]:
        for name, why in skipped.items():
            emit(common | {"algorithm": name, "bytes": size, "skipped": why})
        if not names:
            continue
        kind = getattr(torch, order["dtype"])
        ranks = mesh.world_size
        shape = (exact_period(order["dtype"], ranks), max(1, size // kind.itemsize))
        source = data_of([mesh.rank], *shape, kind, mesh.device)
        expected = data_of(range(ranks), *shape, kind, mesh.device)
        data = torch.empty_like(source)
        time_us: dict[str, list[float]] = {name: [] for name in names}
        wrong = dict.fromkeys(names, 0)
        ran = {name: set[str]() for name in names}
        for turn in range(-1, order["iters"]):
            for name in rotated(names, turn):
                data.copy_(source)
                start = start_together(mesh)
                runs[name](data)
                finish(mesh)
                elapsed_us = (time.perf_counter() - start) * 1e6
                wrong[name] += wrong_elements(data, expected)
                if turn >= 0:
                    time_us[name].append(elapsed_us)
                if log:  # NCCL writes line by line, so what this call decided is there
                    ran[name] |= {
                        f"{algo} {proto}" for _, algo, proto in parse_tuning_log(log.read())
                    }
        for name in names:
            slowest = agree(mesh, time_us[name], "max")
            (bad,) = agree(mesh, [wrong[name]], "sum")
            found = {"time_us": slowest, "wrong": int(bad), "ran": sorted(ran[name])}
            emit(common | {"algorithm": name, "bytes": data.nbytes} | found)


def _lacks(name: str, mesh: Mesh) -> str | None:
    """Return why this algorithm cannot run here, or None."""
    if mesh.world_size == 1:
        return "one rank has no other to sum with"
    if name in FORCED and mesh.backend != "nccl":
        return f"backend {mesh.backend} has one algorithm and no switch"
    if name in BY_HAND and mesh.device.type == "cuda" and mesh.backend != "nccl":
        return f"{mesh.backend} sends and receives no CUDA tensors"
    return None


def _reductions(names: list[str], mesh: Mesh) -> dict[str, Callable[[Tensor], Any]]:
    """Return a function per name that sums a tensor in place. (all ranks)

    Each forced NCCL algorithm gets a communicator of its own.
    """
    import torch
    import torch.distributed as dist

    from nanoray.mesh.algorithms import ALGORITHMS

    def by_hand(reduce: Callable[[Tensor, ProcessGroup | None], None]) -> Callable[[Tensor], None]:
        return lambda tensor: reduce(tensor, own)

    runs: dict[str, Callable[[Tensor], Any]] = {}
    if names:
        own = dist.new_group()
        # NCCL: a communicator begins with a collective
        dist.all_reduce(torch.zeros(1, device=mesh.device), group=own)
    for name in names:
        if name in ALGORITHMS:
            runs[name] = by_hand(ALGORITHMS[name])
        elif name in FORCED:
            # Read when a communicator begins
            with environment({"NCCL_ALGO": f"allreduce:{FORCED[name].lower()}"}):
                group = dist.new_group()
                dist.all_reduce(torch.zeros(1, device=mesh.device), group=group)
                torch.cuda.synchronize()
            runs[name] = partial(dist.all_reduce, group=group)
        else:
            runs[name] = dist.all_reduce
    return runs


def _own_log() -> TextIO | None:
    """Open the file that NCCL writes in this process, at its end; it has decisions on rank 0 only."""
    paths = glob.glob(
        os.environ.get("NCCL_DEBUG_FILE", "").replace("%h", "*").replace("%p", str(os.getpid()))
    )
    if not paths:
        return None
    log = open(paths[0], encoding="utf-8", errors="replace")  # as long as this process  # noqa: SIM115
    log.seek(0, os.SEEK_END)
    return log


# What the command does.


@contextmanager
def _nccl_tells() -> Iterator[None]:
    """Make NCCL write its decisions to files.

    NCCL reads these variables once, when a process first uses it.
    """
    if not discover_gpus():
        yield
        return
    with tempfile.TemporaryDirectory(prefix="nanoray-nccl-") as folder:
        subsystems = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV,TUNING"}
        with environment(subsystems | {"NCCL_DEBUG_FILE": f"{folder}/%h.%p"}):
            yield


def draw_times(axes: Any, report: Report) -> None:
    """Draw time over bytes, both logarithmic: medians and quartiles.

    A vertical line marks a size at which the fastest algorithm changes.
    """
    for arm, rows in _timed(report).items():
        sizes = sorted(rows)
        medians = [rows[size].median for size in sizes]
        bold = {"color": "black", "linewidth": 2.2} if arm == BACKEND else {"linewidth": 1.2}
        (line,) = axes.plot(sizes, medians, marker="o", markersize=3, label=arm, **bold)
        low, high = zip(*(rows[size].quartiles for size in sizes), strict=True)
        axes.fill_between(sizes, low, high, alpha=0.12, color=line.get_color(), linewidth=0)
    for (before, loser), (size, winner) in pairwise(winners(report)):
        if winner != loser:
            middle = math.sqrt(before * size)
            axes.axvline(middle, color="0.4", linestyle=":", linewidth=1)
            style = {"transform": axes.get_xaxis_transform(), "rotation": 90}
            axes.text(middle, 0.02, f"{loser} | {winner}", ha="right", fontsize=7, **style)
    ranks = report.conditions.get("ranks", {}).get("world size", 0)
    backend = report.conditions.get("backend", "")
    axes.set_title(f"all_reduce, {ranks} ranks, {backend}", fontsize=9)


class AlgorithmsBenchmark(Benchmark):
    """Time the hand-written all-reduces beside the backend's own."""

    joins_torchrun = True
    figure = Figure(
        (
            Panel(
                draw_times,
                {
                    "xscale": "log",
                    "yscale": "log",
                    "xlabel": "bytes",
                    "ylabel": "us, one blocking call, slowest rank",
                },
                {"fontsize": 8},
                grid=True,
            ),
        ),
        size=(7.5, 4.6),
    )

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Add this benchmark's flags."""
        add_where_flags(parser, cpu_workers=STATED_FOR[0])
        parser.add_argument(
            "--dtype",
            choices=("float32", "bfloat16", "float16"),
            default="float32",
            help="[float32]",
        )

    def measure(self, args: argparse.Namespace, report: Report) -> None:
        """Sweep sizes and algorithms. A rank that dies leaves the rows that were there, and a failure."""
        where = where_from(args)
        with _nccl_tells(), ranks_for(report, where) as pool:
            arms = [BACKEND, *BY_HAND, *(FORCED if pool.backend == "nccl" else ())]
            order = {
                "algorithms": arms,
                "sizes": QUICK_SIZES if args.quick else SIZES,
                "dtype": args.dtype,
            }
            for event in pool.run(ENTRY, order | {"iters": 4 if args.quick else 25}):
                report.rows.append(row_of(event, args.dtype))
                row = report.rows[-1]
                result = row.problem or row.skipped or f"{number(row.median)} us"
                say(f"{row.arm:<20}{row.metric:>8}  {result}")
            _add_targets(report, len(pool.facts), pool.backend)

    def format_text(self, report: Report) -> list[str]:
        """Return a table of medians: one line per size, one column per algorithm."""
        timed = [row for row in report.rows if row.unit == "us"]
        arms = list(dict.fromkeys(r.arm for r in timed))
        sizes = list(dict.fromkeys(r.metric for r in timed))

        def cell(arm: str, size: str) -> str:
            row = report.row(arm, size)
            if row is None:
                return ""
            if row.error:
                return "FAILED"
            if row.values:
                return number(row.median)
            return "skipped"

        table = [("us, median", *arms, "wrong", "")]
        for size in sizes:
            wrong = sum(r.wrong or 0 for r in timed if r.metric == size)
            table.append((size, *(cell(arm, size) for arm in arms), str(wrong), ""))
        text = aligned(table, right=set(range(1, len(arms) + 2)))
        text += sorted(
            {f"skipped {r.arm}: {r.skipped}" for r in timed if r.skipped and not r.values}
        )
        text += [
            f"{r.arm}, {r.metric}: {r.note or 'no log of NCCL'}"
            for r in timed
            if r.arm in FORCED and r.values
        ]
        return [*text, *report.findings(crossovers(report))]

    def format_markdown(self, report: Report) -> list[str]:
        """Return the medians for a README, and where the winner changes."""
        timed = _timed(report)
        if not timed:
            return []
        rows = [
            (
                _label(size),
                *(number(timed[arm][size].median) if size in timed[arm] else "–" for arm in timed),
            )
            for size, _ in winners(report)
        ]
        return [
            *markdown(("all_reduce, us", *timed), rows),
            "",
            "; ".join(report.findings(crossovers(report))),
        ]


def row_of(event: Record, dtype: str) -> Measurement:
    """Return the row of an event of rank 0.

    A forced algorithm that NCCL's log does not confirm is an error.
    """
    name = event["algorithm"]
    size = event["bytes"]
    ranks = event["ranks"]
    keys = {"op": "all_reduce", "algorithm": name, "dtype": dtype, "bytes": size, "ranks": ranks}
    if "skipped" in event:
        return Measurement(name, _label(size), "us", (), skipped=event["skipped"], extra=keys)
    ran = event["ran"]
    error = ""
    times = event["time_us"]
    if name in FORCED and {words.split()[0] for words in ran} != {FORCED[name]}:
        error = f"asked for {FORCED[name]}, NCCL's log says {', '.join(ran) or 'nothing'}"
    algbw = algbw_gbps(size, statistics.median(times) / 1e6)
    keys |= {
        "time_us": statistics.median(times),
        "p99_us": p99_of(times),
        "ran": ran,
    }
    factor = busbw_factor("all_reduce", ranks)  # None for one rank
    keys |= {"algbw_gbps": algbw, "busbw_gbps": algbw * factor if factor else 0.0}
    note = f"ran {', '.join(ran)}" if ran else ""
    return Measurement(
        name, _label(size), "us", tuple(times), note, error, event["wrong"], extra=keys
    )


def _label(size: int) -> str:
    power = min(2, (size.bit_length() - 1) // 10) if size else 0
    return f"{size / 1024**power:g} {('B', 'KB', 'MB')[power]}"


def _add_targets(report: Report, ranks: int, backend: str) -> None:
    stated = "{} ranks on {}".format(*STATED_FOR)
    if (ranks, backend) == STATED_FOR:
        excuse = ""
    else:
        excuse = f"stated for {stated}; here: {ranks} on {backend}"
    # The best hand-written algorithm for the smallest message
    timed = _timed(report)
    by_hand = [timed[name][SIZES[0]] for name in BY_HAND if SIZES[0] in timed.get(name, {})]
    best = BY_HAND[0]
    if by_hand:
        best = min(by_hand, key=lambda row: row.median).arm
    wanted = ((BACKEND, best, SMALL, ">=", 3.0), ("ring", BACKEND, LARGE, "<=", 1.15))
    for upper, lower, size, relation, limit in wanted:
        row = report.compare(upper, lower, size)
        if row:
            report.add_target(f"{size}: {row.arm}", row, relation, limit, excuse)


def _timed(report: Report) -> dict[str, dict[int, Measurement]]:
    """Return arm -> bytes -> row of what was timed and is right."""
    found: dict[str, dict[int, Measurement]] = {}
    for row in report.rows:
        if row.unit == "us" and row.values and not row.problem:
            found.setdefault(row.arm, {})[row.extra["bytes"]] = row
    return found


def winners(report: Report) -> list[tuple[int, str]]:
    """Return (bytes, arm with the lowest median) per size, in ascending order of sizes.

    The previous winner stays until another arm is faster by the factor TIE.
    """
    timed = _timed(report)
    won = list[tuple[int, str]]()
    for size in sorted({size for rows in timed.values() for size in rows}):
        medians = {arm: rows[size].median for arm, rows in timed.items() if size in rows}
        fastest = min(medians, key=lambda a: medians[a])
        leader = won[-1][1] if won else ""
        stays = medians.get(leader, math.inf) <= TIE * medians[fastest]
        won.append((size, leader if stays else fastest))
    return won


def crossovers(report: Report) -> list[str]:
    """Return sentences that say where the fastest algorithm changes."""
    said = []
    for arm, won in groupby(winners(report), key=lambda pair: pair[1]):
        first, *rest = (_label(size) for size, _ in won)
        said.append(f"fastest, or within 10 %, {first}{f' to {rest[-1]}' if rest else ''}: {arm}")
    return said

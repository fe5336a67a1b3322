"""`python -m nanoray.bench communication algorithms`: hand-written all-reduces against the backend's, over sizes.

Small tensors pay for messages, large ones for bytes, so the fastest algorithm changes with the size.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nanoray.bench.collectives import (
    agree,
    data_of,
    exact_period,
    finish,
    start_together,
    wrong_elements,
)
from nanoray.bench.harness.benchmark import Benchmark, ranks_for
from nanoray.bench.harness.figure import Figure, Panel
from nanoray.bench.harness.rank_pool import add_where_flags, where_from
from nanoray.bench.harness.report import Emit, Measurement, Record, Report, number, say
from nanoray.bench.harness.table import Table, TableColumn, names
from nanoray.bench.harness.trainings import rotated

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from nanoray.parallel.mesh import Mesh

ENTRY = "nanoray.bench.algorithms:sweep_rank"
BACKEND = "backend"
DTYPE = "float32"
BY_HAND = ("ring", "tree", "double_tree", "recursive_doubling", "halving_doubling", "flat")
SIZES = tuple(4**i << 10 for i in range(9))  # 1 KB .. 64 MB
QUICK_SIZES = (1 << 10, 1 << 16, 1 << 20)

# What a rank does.


def sweep_rank(mesh: Mesh, order: Record, emit: Emit) -> None:
    """Time every algorithm at every size and emit one event per pair. (all ranks)

    The order of the algorithms rotates from turn to turn. order: algorithms, sizes (bytes), dtype,
    iters. Emitted: algorithm, bytes, ranks, and either time_us (a blocking latency per turn, the
    slowest rank's) with wrong (elements, over all turns and ranks),
    or skipped. One warm-up turn is checked and not timed.
    """
    import torch

    common = {"ranks": mesh.world_size}
    skipped = {}
    for name in order["algorithms"]:
        reason = _lacks(name, mesh)
        if reason:
            skipped[name] = reason
    able = [name for name in order["algorithms"] if name not in skipped]
    runs = _reductions(able, mesh)
    for size in order["sizes"]:
        for name, why in skipped.items():
            emit(common | {"algorithm": name, "bytes": size, "skipped": why})
        if not able:
            continue
        kind = getattr(torch, order["dtype"])
        ranks = mesh.world_size
        shape = (exact_period(order["dtype"], ranks), max(1, size // kind.itemsize))
        source = data_of([mesh.rank], *shape, kind, mesh.device)
        expected = data_of(range(ranks), *shape, kind, mesh.device)
        data = torch.empty_like(source)
        time_us: dict[str, list[float]] = {name: [] for name in able}
        wrong = dict.fromkeys(able, 0)
        for turn in range(-1, order["iters"]):
            for name in rotated(able, turn):
                data.copy_(source)
                start = start_together(mesh)
                runs[name](data)
                finish(mesh)
                elapsed_us = (time.perf_counter() - start) * 1e6
                wrong[name] += wrong_elements(data, expected)
                if turn >= 0:
                    time_us[name].append(elapsed_us)
        for name in able:
            slowest = agree(mesh, time_us[name], "max")
            (bad,) = agree(mesh, [wrong[name]], "sum")
            found = {"time_us": slowest, "wrong": int(bad)}
            emit(common | {"algorithm": name, "bytes": data.nbytes} | found)


def _lacks(name: str, mesh: Mesh) -> str | None:
    """Return why this algorithm cannot run here, or None."""
    if mesh.world_size == 1:
        return "one rank has no other to sum with"
    if name in BY_HAND and mesh.device.type == "cuda" and mesh.backend != "nccl":
        return f"{mesh.backend} sends and receives no CUDA tensors"
    return None


def _reductions(able: list[str], mesh: Mesh) -> dict[str, Callable[[Tensor], Any]]:
    """Return a function per name that sums a tensor in place. (all ranks)"""
    import torch
    import torch.distributed as dist

    from nanoray.parallel.algorithms import ALGORITHMS

    def by_hand(reduce: Callable[[Tensor, ProcessGroup | None], None]) -> Callable[[Tensor], Any]:
        return lambda tensor: reduce(tensor, own)

    if not able:
        return {}
    own = dist.new_group()
    # NCCL: a communicator begins with a collective
    dist.all_reduce(torch.zeros(1, device=mesh.device), group=own)
    hand_written = {name: by_hand(ALGORITHMS[name]) for name in able if name in ALGORITHMS}
    return {name: hand_written.get(name, dist.all_reduce) for name in able}


# What the command does.


def draw_times(axes: Any, report: Report) -> None:
    """Draw time over bytes, both logarithmic: medians and quartiles."""
    for arm, rows in _timed(report).items():
        sizes = sorted(rows)
        medians = [rows[size].median for size in sizes]
        bold = {"color": "black", "linewidth": 2.2} if arm == BACKEND else {"linewidth": 1.2}
        (line,) = axes.plot(sizes, medians, marker="o", markersize=3, label=arm, **bold)
        low, high = zip(*(rows[size].quartiles for size in sizes), strict=True)
        axes.fill_between(sizes, low, high, alpha=0.12, color=line.get_color(), linewidth=0)
    ranks = report.conditions.get("ranks", {}).get("world size", 0)
    backend = report.conditions.get("backend", "")
    axes.set_title(f"all_reduce, {ranks} ranks, {backend}", fontsize=9)


def _rows_of(report: Report) -> list[Measurement]:
    """Return the rows of all algorithms and sizes."""
    return [row for row in report.rows if row.unit == "us"]


def _sizes_of(report: Report) -> list[str]:
    """Return the sizes, a line of the table each."""
    return list(dict.fromkeys(row.metric for row in _rows_of(report)))


def _columns_of(report: Report) -> list[TableColumn]:
    """Return a column for each algorithm: medians, and the ratio to the backend in the same turn."""

    def column(arm: str) -> TableColumn:
        def cell(report: Report, size: str, spread: str) -> str:
            ratio = report.cell(f"{BACKEND} / {arm}", size, "none")
            return report.cell(arm, size, "none") + (f" ({ratio} x)" if ratio else "")

        return TableColumn(arm, cell)

    arms = dict.fromkeys(row.arm for row in _rows_of(report))
    return [names("all_reduce, us (x as fast as the backend)"), *map(column, arms)]


class AlgorithmsBenchmark(Benchmark):
    """Time the hand-written all-reduces beside the backend's own."""

    tables = (Table(_sizes_of, _columns_of),)
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
        add_where_flags(parser, cpu_workers=4)

    def measure(self, args: argparse.Namespace, report: Report) -> None:
        """Sweep sizes and algorithms. A rank that dies leaves the rows that were there, and a failure."""
        where = where_from(args)
        with ranks_for(report, where) as pool:
            arms = [BACKEND, *BY_HAND]
            order = {
                "algorithms": arms,
                "sizes": QUICK_SIZES if args.quick else SIZES,
                "dtype": DTYPE,
            }
            for event in pool.run(ENTRY, order | {"iters": 4 if args.quick else 25}):
                report.rows.append(row_of(event))
                row = report.rows[-1]
                result = row.problem or row.skipped or f"{number(row.median)} us"
                say(f"{row.arm:<20}{row.metric:>8}  {result}")
            for arm in BY_HAND:
                for size in _sizes_of(report):
                    report.compare(BACKEND, arm, size, "paired by turn")

    def notes(self, report: Report) -> list[str]:
        """Return why algorithms were skipped."""
        return sorted(
            {f"skipped {row.arm}: {row.skipped}" for row in _rows_of(report) if row.skipped}
        )


def row_of(event: Record) -> Measurement:
    """Return the row of an event of rank 0."""
    name = event["algorithm"]
    size = event["bytes"]
    ranks = event["ranks"]
    keys = {"op": "all_reduce", "algorithm": name, "dtype": DTYPE, "bytes": size, "ranks": ranks}
    if "skipped" in event:
        return Measurement(name, _label(size), "us", (), skipped=event["skipped"], extra=keys)
    times = tuple(event["time_us"])
    return Measurement(name, _label(size), "us", times, wrong=event["wrong"], extra=keys)


def _label(size: int) -> str:
    power = min(2, (size.bit_length() - 1) // 10) if size else 0
    return f"{size / 1024**power:g} {('B', 'KB', 'MB')[power]}"


def _timed(report: Report) -> dict[str, dict[int, Measurement]]:
    """Return arm -> bytes -> row of what was timed and is right."""
    found: dict[str, dict[int, Measurement]] = {}
    for row in _rows_of(report):
        if row.values and not row.problem:
            found.setdefault(row.arm, {})[row.extra["bytes"]] = row
    return found

"""`python -m nanoray.bench communication overlap`: what communication costs per bucket size, and what hides it.

One model under DDP for each bucket size, and one that each rank trains alone (no_sync). Every round
runs a few steps of each in turn, so a slow minute of the machine hits all. Step times are those of
DDP's own C++ path; busy and exposed times come from one more step of each round, traced.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

from nanoray.bench.engine import (
    BUSY,
    COMMUNICATION,
    EXPOSED,
    STEP,
    TIME_ENTRY,
    Found,
    collect,
    each,
    order_of,
)
from nanoray.bench.harness.benchmark import Benchmark, Number, ranks_for
from nanoray.bench.harness.figure import Figure, Panel, dots, measured, with_values
from nanoray.bench.harness.rank_pool import add_where_flags, where_from
from nanoray.bench.harness.report import Measurement, Record, Report
from nanoray.bench.harness.table import SPREAD, Table, TableColumn, names
from nanoray.bench.harness.trainings import numbers_of
from nanoray.config import Config, load_config

NO_SYNC = "no_sync"
# Relative, of the gradients' norm in the first round: buckets of another size sum in another order, no
# more; in 16 bits attention's backward has an order as well.
SAME_NORM = {"fp32": 1e-4}
SAME_NORM_16 = 1e-2
CPU_BUCKETS = "0.1,0.25,0.5,1,2,4"
GPU_BUCKETS = "1,5,12.5,25,50,100,500"


def _swept(report: Report) -> list[Measurement]:
    """Return the steps of the bucket sizes."""
    return [row for row in with_values(report, STEP) if row.arm != NO_SYNC]


def _draw_steps(axes: Any, report: Report) -> None:
    """Draw the step over the bucket size."""
    rows = _swept(report)
    dots(axes, [row.arm for row in rows], rows, fmt="-o", capsize=3, label="step")
    for bare in measured(report, [NO_SYNC], STEP):
        text = "step without communication (no_sync)"
        axes.axhline(bare.median, color="0.5", ls="--", label=text)


def _draw_communication(axes: Any, report: Report) -> None:
    """Draw hidden and exposed time over the bucket size."""
    sizes = [row.arm for row in _swept(report)]
    exposed = [_median(report, arm, EXPOSED) for arm in sizes]
    hidden = [_median(report, arm, BUSY) - e for arm, e in zip(sizes, exposed, strict=True)]
    axes.bar(sizes, hidden, color="#f0b27a", label="hidden behind backward")
    axes.bar(sizes, exposed, bottom=hidden, color="#c0392b", label="exposed")


def _note(report: Report) -> str:
    known = report.conditions
    ranks = known.get("ranks", {}).get("world size", "?")
    return f"{ranks} ranks, {known['backend']} · {known['recipe']}"


class OverlapBenchmark(Benchmark):
    """Time a DDP step for several bucket sizes, and the communication that it does not hide."""

    # Wrong: arms whose gradients have not the norm of the first bucket size's
    numbers = (
        Number("rounds", "rounds of all sizes", usual=20, few=3),
        Number("steps", "steps of one size per round", usual=10, few=4),
    )
    tables = (
        Table(
            STEP,
            (
                names("buckets"),
                TableColumn("step, ms", STEP, SPREAD),
                TableColumn("/ no_sync", STEP, SPREAD, over=NO_SYNC),
                TableColumn("busy, ms", BUSY, SPREAD),
                TableColumn("exposed, ms", EXPOSED, SPREAD),
            ),
        ),
    )
    figure = Figure(
        (
            Panel(
                _draw_steps,
                {
                    "title": "optimizer step over DDP's bucket size",
                    "ylabel": "ms, median and quartiles",
                },
                {"fontsize": 8},
            ),
            Panel(
                _draw_communication,
                {"title": "communication of a step", "ylabel": "ms, medians"},
                {"fontsize": 8},
            ),
        ),
        note=_note,
    )

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Add this benchmark's flags."""
        add_where_flags(parser)
        sizes = f"bucket sizes in MB [{CPU_BUCKETS} on CPU, {GPU_BUCKETS} on GPU]"
        parser.add_argument("--buckets", metavar="MB,MB", help=sizes)
        parser.add_argument(
            "--preset", help="whose model and batch [shakespeare-cpu; on GPU gpt2-124m]"
        )

    def measure(self, args: argparse.Namespace, report: Report) -> None:
        """Sweep the bucket sizes and fill the report."""
        where = where_from(args, least=2)
        asked = None if args.buckets is None else _parse_sizes(args.buckets)
        if args.preset:
            load_config(preset=args.preset)  # refuses one that is not known
        found: Found = {}

        def add_rows() -> None:
            for arm, events in found.items():
                _add_rows(report, arm, events, found)

        with ranks_for(report, where, add_rows) as pool:
            on_cpu = pool.facts[0]["device"] == "cpu"
            sizes = asked or _parse_sizes(CPU_BUCKETS if on_cpu else GPU_BUCKETS)
            preset = args.preset or ("shakespeare-cpu" if on_cpu else "gpt2-124m")
            arms = arms_of(preset, sizes, where.workers)
            found |= {arm: [] for arm in arms}
            order = order_of(arms, args.rounds, args.steps, [COMMUNICATION], alone=[NO_SYNC])
            recipe = f"preset {preset}, {args.rounds} rounds of {args.steps} steps, random tokens"
            collect(pool.run(TIME_ENTRY, order), report, found, recipe)

    def notes(self, report: Report) -> list[str]:
        """Return the fastest bucket size, and whether hiding more made steps faster."""
        arms = [row.arm for row in _swept(report)]
        if not arms:
            return []
        # By the paired ratio to no_sync, not by medians of times that were taken in different
        # minutes.
        slowdown = {arm: _median(report, f"{arm} / {NO_SYNC}", STEP) for arm in arms}
        hidden = {}
        for arm in arms:
            share = _median(report, arm, EXPOSED) / _median(report, arm, BUSY)
            hidden[arm] = 100 * (1 - share)
        best = min(slowdown, key=lambda arm: slowdown[arm])
        most = max(hidden, key=lambda arm: hidden[arm])
        lines = [
            f"fastest: {best} buckets, a step takes {slowdown[best]:.3f} x one that does not "
            f"communicate, {hidden[best]:.0f} % of the communication hidden: --bucket_mb "
            f"{best.removesuffix(' MB')} on this machine",
        ]
        if most != best:
            lines.append(
                f"most hidden: {most} buckets, {hidden[most]:.0f} %, yet {slowdown[most]:.3f} x: "
                "hiding more is not faster where communication takes compute's cores, or where "
                "small messages cost latency"
            )
        return report.findings(lines)


def _parse_sizes(text: str) -> list[float]:
    return sorted(set(numbers_of(text, "buckets", CPU_BUCKETS)))


def arms_of(preset: str, sizes: list[float], ranks: int) -> dict[str, Config]:
    """Return the configuration of each arm: one micro batch a rank and step, as many as in a run."""
    config = load_config(preset=preset)
    micro = config.micro_batch_size or max(1, config.global_batch_size // ranks)
    own = {"micro_batch_size": micro, "grad_accum_steps": 1, "global_batch_size": 0}
    arms = {NO_SYNC: config.model_copy(update=own)}
    for mb in sizes:
        arms[f"{mb:g} MB"] = config.model_copy(update=own | {"bucket_mb": mb})
    return arms


def _add_rows(report: Report, arm: str, events: list[Record], found: Found) -> None:
    times = each(events, "step_ms")
    if arm == NO_SYNC or not events:
        report.add(arm, STEP, "ms", times)
        return
    ((buckets, _),) = events[0]["collectives"].values()
    note = f"{buckets} bucket(s) of at most {events[0]['largest'] / 1e6:.3g} MB"
    # After equal steps on equal batches only the order of sums differs.
    first = next(theirs for other, theirs in found.items() if other != NO_SYNC)
    tolerance = SAME_NORM.get(events[0]["precision"], SAME_NORM_16)
    wrong = not math.isclose(events[0]["norm"], first[0]["norm"], rel_tol=tolerance)
    report.add(arm, STEP, "ms", times, note, wrong=int(wrong))
    report.add(arm, BUSY, "ms", each(events, "busy_ms"), note)
    report.add(arm, EXPOSED, "ms", each(events, "exposed_ms"), note)
    report.compare(arm, NO_SYNC, STEP, "paired by round")


def _median(report: Report, arm: str, metric: str) -> float:
    row = report.row(arm, metric)
    assert row is not None
    return row.median

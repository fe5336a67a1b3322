"""`python -m nanoray.bench layouts pipeline`: how long pipeline stages wait, measured and in theory.

One rank is one stage. All arms train the same GPT on the same batches, so the schedules must end
with the same loss, and all but `interleaved`, which computes in other chunks, with the same bits as
1f1b. Each round trains some steps of every arm in turn. A stage's waiting is the share of forward
and backward in which it needs what another one has not sent yet; the theory knows equal stages and
messages that take no time.
"""

from __future__ import annotations

import argparse
from typing import Any

from nanoray.bench.engine import (
    BITS,
    STEP,
    TIME_ENTRY,
    WAITING,
    Found,
    collect,
    each,
    order_of,
)
from nanoray.bench.harness.benchmark import Benchmark, Number, ranks_for
from nanoray.bench.harness.figure import Figure, Panel, dots, measured, with_values
from nanoray.bench.harness.rank_pool import add_where_flags, where_from
from nanoray.bench.harness.report import Record, Report
from nanoray.bench.harness.table import SPREAD, Table, TableColumn, names
from nanoray.bench.harness.trainings import numbers_of
from nanoray.config import Config, load_config
from nanoray.parallel.schedules import SCHEDULES

BASE = "1f1b"
WAIT = "waiting"
THEORY = "waiting, theory"
LOSS = "loss"
# Of losses: in other chunks the norm is summed in another order, and AdamW makes more of it each
# step
FAR = 1e-3


def base_of(arm: str) -> str:
    """Return the arm of 1f1b with as many micro batches."""
    return f"{BASE}, {arm.partition(', ')[2]}"


def _draw_waiting(axes: Any, report: Report) -> None:
    """Draw measured over theoretical waiting."""
    for i, kind in enumerate(SCHEDULES):
        rows = [row for row in with_values(report, WAIT) if row.arm.startswith(f"{kind},")]
        theory = measured(report, [row.arm for row in rows], THEORY)
        if rows:
            medians = [row.median for row in rows]
            axes.plot([row.median for row in theory], medians, "o", color=f"C{i}", label=kind)
    axes.axline((0, 0), slope=1, color="0.6", lw=0.8)


def _draw_ratios(axes: Any, report: Report) -> None:
    """Draw the steps of each schedule over those of 1f1b."""
    ratios = with_values(report, STEP, ratios=True)
    for i, kind in enumerate(SCHEDULES):
        rows = [row for row in ratios if row.arm.startswith(f"{kind},")]
        at = [k + i / 10 for k in range(len(rows))]  # so that no whisker hides another
        dots(axes, at, rows, color=f"C{i}")
        if rows:
            axes.set_xticks(at, [row.arm.split()[1] for row in rows])
    axes.axhline(1.0, color="0.6", lw=0.8)


class PipelineBenchmark(Benchmark):
    """Measure how long the stages of a pipeline wait under each schedule."""

    # Wrong: ranks whose weights are not those under 1f1b, or whose loss is far from it
    numbers = (
        Number("rounds", "rounds of all arms", usual=10, few=2),
        Number("steps", "steps of an arm per round", usual=8, few=2),
        Number("micro_batch_size", "sequences in one", 4),
    )
    tables = (
        Table(
            STEP,
            (
                names("schedule"),
                TableColumn("step, ms", STEP, SPREAD),
                TableColumn("step / 1f1b", STEP, SPREAD, over=base_of),
                TableColumn("a stage waits, %", WAIT, SPREAD),
                TableColumn("by the theory, %", THEORY),
            ),
        ),
    )
    figure = Figure(
        (
            Panel(
                _draw_waiting,
                {
                    "xlabel": "a stage waits by the theory, %",
                    "ylabel": "a stage waits, measured, %",
                },
                legend={"fontsize": 7},
            ),
            Panel(
                _draw_ratios,
                {
                    "xlabel": "micro batches",
                    "ylabel": "step over that of 1f1b, median and quartiles",
                },
            ),
        ),
        size=(11, 4.4),
        note=("recipe", "backend"),
    )

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Add this benchmark's flags."""
        add_where_flags(parser)
        parser.add_argument(
            "--preset", default="shakespeare-cpu", help="whose model and batch [%(default)s]"
        )
        parser.add_argument(
            "--micro",
            default="2,4,8",
            help="micro batches of a step, one after another [%(default)s]",
        )

    def measure(self, args: argparse.Namespace, report: Report) -> None:
        """Train all arms in turn on the same ranks, and fill the report."""
        where = where_from(args, least=2)
        counts = numbers_of(args.micro, "micro", "2,4,8", int)
        arms = arms_of(where.workers, counts, configuration(args, {}).n_layer)
        # What cannot be trained is known before a rank is started
        configs = {name: configuration(args, own) for name, own in arms.items()}
        order = order_of(configs, args.rounds, args.steps, [WAITING, BITS])
        found: Found = {name: [] for name in arms}

        def add_rows() -> None:
            for name, events in found.items():
                _add_rows(report, name, arms[name], events, found)

        with ranks_for(report, where, add_rows) as pool:
            rounds = f"{args.rounds} rounds of {args.steps} steps"
            collect(pool.run(TIME_ENTRY, order), report, found, rounds)


def arms_of(stages: int, counts: list[int], layers: int) -> dict[str, Record]:
    """Return the settings of every schedule with each number of micro batches and layers."""
    return {
        f"{kind}, {m} micro": {"pp": stages, "pp_schedule": kind, "grad_accum_steps": m}
        for m in counts
        for kind in (BASE, *(kind for kind in SCHEDULES if kind != BASE))
        if kind != "interleaved" or (m % stages == 0 and layers % (2 * stages) == 0)
    }


def configuration(args: argparse.Namespace, own: Record) -> Config:
    """Return what an arm trains. Raises ConfigError for a key or value that cannot be."""
    size = {"micro_batch_size": args.micro_batch_size, "global_batch_size": 0}
    return load_config(preset=args.preset, overrides=size | own)


def _add_rows(
    report: Report,
    name: str,
    own: Record,
    events: list[Record],
    found: Found,
) -> None:
    """Add an arm's rows, and its ratio to 1f1b with the same number of micro batches."""
    kind = own["pp_schedule"]
    base = f"{BASE}, {own['grad_accum_steps']} micro"
    if not events:
        report.add(name, STEP, "ms", ())
        return
    losses = [event["losses"][-1] for event in events]
    pairs = list(zip(events, found[base], strict=False))
    wrong = sum(abs(a["losses"][-1] - b["losses"][-1]) > FAR for a, b in pairs)
    if kind != "interleaved":
        wrong += sum(a["digests"] != b["digests"] for a, b in pairs)
    report.add(name, STEP, "ms", each(events, "step_ms"))
    report.add(name, WAIT, "%", each(events, "wait"), "mean over the stages")
    report.add(name, THEORY, "%", events[0]["theory"])
    report.add(name, LOSS, "nat", losses, f"against {base}", wrong=wrong)
    if name != base:
        report.compare(name, base, STEP, "paired by round")

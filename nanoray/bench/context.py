"""`python -m nanoray.bench layouts context`: the memory of a rank against the length of sequences.

A GPT learns from one sequence per step, alone and shared by several ranks (cp). Each length and each
number of ranks has fresh ranks, and its peak is compared with the formula of `nanoray.forecast.memory`
and `nanoray.models.costs`. What a rank keeps of a sequence is linear in its length, so with cp ranks
the line rises a cp-th as fast, and the same memory holds a longer context.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from nanoray.bench.engine import order_of
from nanoray.bench.harness.benchmark import Benchmark, ranks_for
from nanoray.bench.harness.figure import Figure, Panel, dots, with_values
from nanoray.bench.harness.plan import add_settings_flag, numbers_of, settings_of
from nanoray.bench.harness.rank_pool import add_where_flags, where_from
from nanoray.bench.harness.report import Report
from nanoray.bench.harness.table import Cell, Table, TableColumn
from nanoray.bench.strategies import (
    PEAK,
    PEAK_ERROR,
    PEAK_FORMULA,
    STATE,
    add_memory_rows,
    configuration,
)
from nanoray.config import Config
from nanoray.errors import ConfigError

RANKS = "1,2,4"
LENGTHS = "1024,2048,4096,8192"
QUICK_LENGTHS = "64,128"
LIMIT = 10.0  # percent between a peak and its formula
# A small model, so that what is kept of a sequence is the larger part
MODEL = {"n_layer": "4", "n_embd": "128", "n_head": "4", "precision": "fp32", "attention": "flash"}


def _size(key: str) -> Cell:
    """Return the cell of what an arm's row is of: cp, or T with its thousands apart."""

    def cell(report: Report, arm: str, spread: str) -> str:
        row = report.row(arm, PEAK)
        return f"{row.extra[key]:,}" if row else ""

    return cell


def draw_peaks(axes: Any, report: Report) -> None:
    """Draw peaks over sequence length: points are measured, lines are the formula."""
    for number, cp in enumerate(sorted({row.extra["cp"] for row in with_values(report, PEAK)})):
        rows = with_values(report, PEAK, cp=cp)
        tokens = [row.extra["T"] for row in rows]
        formulas = [report.row(row.arm, PEAK_FORMULA) for row in rows]
        by_formula = [formula.median if formula else None for formula in formulas]
        axes.plot(tokens, by_formula, color=f"C{number}", lw=1)
        dots(axes, tokens, rows, quartiles=False, ms=4, color=f"C{number}", label=f"cp {cp}")


class ContextBenchmark(Benchmark):
    """Measure the peak of a step over sequence length, at several sizes of cp."""

    tables = (
        Table(
            lambda report: [row.arm for row in with_values(report, PEAK)],
            (
                TableColumn("tokens", _size("T")),
                TableColumn("cp", _size("cp")),
                TableColumn("peak, MiB", PEAK, "range"),
                TableColumn("formula", PEAK_FORMULA),
                TableColumn("error, %", PEAK_ERROR),
                TableColumn("state, MiB", STATE),
            ),
        ),
    )
    figure = Figure(
        (
            Panel(
                draw_peaks,
                {
                    "xlabel": "tokens of a sequence",
                    "ylabel": "peak of a step, MiB per rank",
                    "xlim": (0, None),
                    "ylim": (0, None),
                },
                {"title": "measured; lines: formula", "fontsize": 8},
                grid=True,
            ),
        ),
        size=(7, 4.6),
        note=("recipe",),
    )

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Add this benchmark's flags."""
        add_where_flags(parser)
        parser.add_argument(
            "--cp",
            default=RANKS,
            metavar="N,M,...",
            help="ranks that share a sequence [%(default)s]",
        )
        parser.add_argument(
            "--lengths",
            metavar="T,T,...",
            help=f"tokens of a sequence [{LENGTHS}; {QUICK_LENGTHS} with --quick]",
        )
        parser.add_argument(
            "--preset", default="tiny", help="a gpt's sizes and optimizer [%(default)s]"
        )
        add_settings_flag(parser, "the preset's, beside " + ", ".join(MODEL))

    def measure(self, args: argparse.Namespace, report: Report) -> None:
        """Measure each length at each number of ranks, and fill the report."""
        where = where_from(args)
        if args.workers:
            raise ConfigError(
                "bench layouts context starts as many ranks as share a sequence: drop --workers, and give --cp"
            )
        lengths = args.lengths or (QUICK_LENGTHS if args.quick else LENGTHS)
        ranks = sorted(set(numbers_of(args.cp, "cp", RANKS, int)))
        base = {"preset": args.preset, "model": "gpt"}
        base["overrides"] = MODEL | {"global_batch_size": 1} | settings_of(args)
        # What cannot be trained is known before a rank is started
        configs: dict[tuple[int, int], Config] = {}
        for cp in ranks:
            for tokens in sorted(set(numbers_of(lengths, "lengths", LENGTHS, int))):
                own = {"cp": cp, "block_size": tokens}
                configs[cp, tokens] = configuration(base, own, cp)

        # The most ranks first, so that a lack of devices is known at once
        with ranks_for(report, replace(where, workers=max(ranks))):
            pass
        sizes = " ".join(f"{key}={value}" for key, value in (MODEL | settings_of(args)).items())
        report.conditions["recipe"] = f"one sequence a step, preset {args.preset}, {sizes}"
        for (cp, tokens), config in configs.items():
            arm = name_of(cp, tokens)
            there = replace(where, workers=cp)
            add_memory_rows(report, there, order_of({arm: config}), arm, cp=cp, T=tokens)
        _add_target(report)


def name_of(cp: int, tokens: int) -> str:
    """Return the name of an arm."""
    return f"cp {cp}, {tokens} tokens"


def _add_target(report: Report) -> None:
    """Judge the formula by the arm that is furthest from its peak."""
    rows = with_values(report, PEAK_ERROR)
    if not rows:
        return
    furthest = max(rows, key=lambda row: abs(row.median))
    distances = map(abs, furthest.values)
    worst = report.add("worst arm", PEAK_ERROR, "%", distances, furthest.arm)
    text = f"peak of a step, measured against the formula, {furthest.arm}, %"
    report.add_target(text, worst, "<=", LIMIT)

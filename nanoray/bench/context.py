"""`python -m nanoray.bench context`: the memory of a rank against the length of sequences.

A GPT learns from one sequence per step, alone and shared by several ranks (cp). Each length and each
number of ranks has fresh ranks, and its peak is compared with the formula of `nanoray.forecast.memory`
and `nanoray.models.costs`. What a rank keeps of a sequence is linear in its length, so with cp ranks
the line rises a cp-th as fast, and the same memory holds a longer context.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nanoray.bench.harness.benchmark import Benchmark
from nanoray.bench.harness.figure import figure, whiskers
from nanoray.bench.harness.plan import add_settings_flag, settings_of
from nanoray.bench.harness.rank_pool import RankPool, add_where_flags, describe, where_from
from nanoray.bench.harness.report import Measurement, Report, Target, aligned, markdown
from nanoray.bench.strategies import (
    PEAK,
    PEAK_ERROR,
    PEAK_FORMULA,
    STATE,
    configuration,
    memory_rows,
)
from nanoray.errors import ConfigError

RANKS = "1,2,4"
LENGTHS = "1024,2048,4096,8192"
QUICK_LENGTHS = "64,128"
LIMIT = 10.0  # percent between a peak and its formula
# A small model, so that what is kept of a sequence is the larger part
MODEL = {"n_layer": "4", "n_embd": "128", "n_head": "4", "precision": "fp32", "attention": "flash"}


class ContextBenchmark(Benchmark):
    """Measure the peak of a step over sequence length, at several sizes of cp."""

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
        if where.launcher == "torchrun" or args.workers:
            raise ConfigError(
                "bench context starts as many ranks as share a sequence: drop --workers and "
                "torchrun, and give --cp"
            )
        lengths = args.lengths or (QUICK_LENGTHS if args.quick else LENGTHS)
        ranks = _numbers(args.cp, "cp")
        orders = _orders(ranks, _numbers(lengths, "lengths"), args)

        # The most ranks first, so that a lack of devices is known at once
        with RankPool(replace(where, workers=max(ranks))) as pool:
            describe(report, pool)
        sizes = " ".join(f"{key}={value}" for key, value in (MODEL | settings_of(args)).items())
        report.conditions["recipe"] = f"one sequence a step, preset {args.preset}, {sizes}"
        for (cp, tokens), order in orders.items():
            rows = memory_rows(replace(where, workers=cp), order, name_of(cp, tokens))
            # What the row is of, for the figure
            report.rows += [replace(row, extra=row.extra | {"cp": cp, "T": tokens}) for row in rows]
        _add_target(report)

    def format_text(self, report: Report) -> list[str]:
        """Return a line per length and number of ranks."""
        return aligned([(*line, "") for line in _build_table(report)], right=set(range(0, 6)))

    def format_markdown(self, report: Report) -> list[str]:
        """Return the table for a page."""
        head, *body = _build_table(report)
        return markdown(head, body)

    def draw(self, report: Report, path: Path) -> None:
        """Draw peaks over sequence length: points are measured, lines are the formula."""
        note = str(report.conditions.get("recipe", ""))
        with figure(report, path, (7, 4.6), (1, 1), note=note) as (axes,):
            for number, cp in enumerate(sorted({row.extra["cp"] for row in _peaks(report)})):
                rows = [row for row in _peaks(report) if row.extra["cp"] == cp]
                tokens = [row.extra["T"] for row in rows]
                formulas = []
                for row in rows:
                    formula = report.row(row.arm, PEAK_FORMULA)
                    formulas.append(formula.median if formula else None)
                color = f"C{number}"
                axes.plot(tokens, formulas, color=color, lw=1)
                axes.errorbar(
                    tokens,
                    [row.median for row in rows],
                    yerr=whiskers(rows),
                    fmt="o",
                    ms=4,
                    capsize=2,
                    color=color,
                    label=f"cp {cp}",
                )
            axes.set(xlabel="tokens of a sequence", ylabel="peak of a step, MiB per rank")
            axes.set(xlim=(0, None), ylim=(0, None))
            axes.legend(title="measured; lines: formula", fontsize=8)
            axes.grid(alpha=0.25)


def name_of(cp: int, tokens: int) -> str:
    """Return the name of an arm."""
    return f"cp {cp}, {tokens} tokens"


def _numbers(text: str, flag: str) -> list[int]:
    """Return the numbers of a flag, rising. Raises ConfigError."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdigit() and int(word) > 0 for word in words):
        raise ConfigError(f"{flag} = {text}: not numbers above 0; write for example 1,2,4")
    return sorted({int(word) for word in words})


def _orders(
    sizes: Sequence[int], lengths: Sequence[int], args: argparse.Namespace
) -> dict[tuple[int, int], dict[str, Any]]:
    """Return the order of each arm, by its cp and its tokens. Raises ConfigError for what cannot be."""
    orders = {}
    for cp in sizes:
        for tokens in lengths:
            own = {"cp": cp, "block_size": tokens}
            order = {
                "model": "gpt",
                "preset": args.preset,
                "overrides": MODEL | {"global_batch_size": 1} | settings_of(args),
                "arms": {name_of(cp, tokens): own},
            }
            configuration(order, own, cp)  # what cannot be is known before a rank is started
            orders[cp, tokens] = order
    return orders


def _peaks(report: Report) -> list[Measurement]:
    return [row for row in report.rows if row.metric == PEAK and row.values]


def _add_target(report: Report) -> None:
    """Judge the formula by the arm that is furthest from its peak."""
    rows = [row for row in report.rows if row.metric == PEAK_ERROR and row.values]
    if not rows:
        return
    furthest = max(rows, key=lambda row: abs(row.median))
    distances = tuple(abs(value) for value in furthest.values)
    worst = Measurement("worst arm", PEAK_ERROR, "%", distances, furthest.arm)
    report.rows.append(worst)
    text = f"peak of a step, measured against the formula, {furthest.arm}, %"
    report.targets.append(Target(text, worst, "<=", LIMIT))


def _build_table(report: Report) -> list[tuple[str, ...]]:
    """Return a line per arm, the head first."""
    table: list[tuple[str, ...]] = [
        ("tokens", "cp", "peak, MiB", "formula", "error, %", "state, MiB")
    ]
    for row in _peaks(report):
        cells = [report.cell(row.arm, metric, "none") for metric in (PEAK_FORMULA, PEAK_ERROR)]
        state = report.cell(row.arm, STATE, "none")
        tokens = f"{row.extra['T']:,}"
        table.append(
            (tokens, str(row.extra["cp"]), report.cell(row.arm, PEAK, "range"), *cells, state)
        )
    return table

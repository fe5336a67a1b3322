"""`python -m nanoray.bench communication compression`: bytes, time and loss of compressed gradients.

Every arm trains the same model on the same batches of a text, beside one that sends float32. Each
round trains some steps of each in turn, so a slow minute of the machine hits all arms; the exposed
time and the bytes come from one more step of each round, traced. The bytes are those that the
busiest link of the best algorithm has to carry.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from nanoray.base.metrics import busbw_factor
from nanoray.bench.engine import (
    BITS,
    BUSY,
    COMMUNICATION,
    EXPOSED,
    STEP,
    TIME_ENTRY,
    Found,
    collect,
    each,
    note_of_sent,
    order_of,
)
from nanoray.bench.harness.benchmark import Benchmark, Number, ranks_for
from nanoray.bench.harness.figure import Figure, Panel, dots, with_values
from nanoray.bench.harness.plan import add_arms_flag, chosen
from nanoray.bench.harness.rank_pool import add_where_flags, where_from
from nanoray.bench.harness.report import Report
from nanoray.bench.harness.table import SPREAD, Table, TableColumn, names
from nanoray.config import load_config
from nanoray.data.prepare import prepare
from nanoray.errors import ConfigError

PLAIN = "fp32"
ARMS: dict[str, dict[str, Any]] = {PLAIN: {}} | {
    kind: {"grad_compress": kind} for kind in ("bf16", "fp16")
}
WIRE = "bytes on the wire"
LOSS = "loss"
OFF = "loss, off"
PAYS = "pays below"


def _draw_times(axes: Any, report: Report) -> None:
    """Draw the step of each arm over the bytes that it sends."""
    for i, step in enumerate(with_values(report, STEP)):
        wire = report.row(step.arm, WIRE)
        if wire and wire.values:
            dots(axes, [wire.median], [step], color=f"C{i}", label=step.arm)


def _draw_losses(axes: Any, report: Report) -> None:
    """Draw how the loss of each arm goes away from that of float32, round by round."""
    for i, step in enumerate(with_values(report, STEP)):
        off = report.row(step.arm, OFF)
        if off:
            axes.plot(off.extra["by_round"], color=f"C{i}", label=step.arm)
    axes.axhline(0.0, color="0.6", lw=0.8)


def _last_loss(report: Report, arm: str, spread: str) -> str:
    """Write the loss of the last round: an arm goes on learning from round to round."""
    loss = report.row(arm, LOSS)
    return f"{loss.values[-1]:.4f}" if loss and loss.values else report.cell(arm, LOSS, spread)


class CompressionBenchmark(Benchmark):
    """Compare bytes, step time and loss of compressed gradients with float32."""

    joins_torchrun = True
    # Wrong: ranks whose weights differ from those of rank 0
    numbers = (
        Number("rounds", "rounds of all arms", usual=10, few=2),
        Number("steps", "steps of an arm per round", usual=30, few=4),
    )
    tables = (
        Table(
            STEP,
            (
                names("sent"),
                TableColumn(f"step / {PLAIN}", STEP, SPREAD, over=PLAIN),
                TableColumn("step, ms", STEP, SPREAD),
                TableColumn("exposed, ms", EXPOSED, SPREAD),
                TableColumn("MB on the wire", WIRE),
                TableColumn("loss", _last_loss),
                TableColumn("off, nat", OFF),
                TableColumn("pays below, MB/s", PAYS),
            ),
        ),
    )
    figure = Figure(
        (
            Panel(
                _draw_times,
                {
                    "xlabel": "MB on the wire per step",
                    "ylabel": "step, ms, median and quartiles",
                    "xlim": (0, None),
                },
                {"fontsize": 7},
            ),
            Panel(
                _draw_losses,
                {
                    "xlabel": "round",
                    "ylabel": f"loss - loss of {PLAIN}, nat",
                    "title": "same batches",
                },
            ),
        ),
        size=(11, 4.6),
        note=("recipe", "backend"),
    )

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Add this benchmark's flags."""
        add_where_flags(parser)
        parser.add_argument(
            "--preset", help="whose model, batch and optimizer [shakespeare-cpu; on GPU gpt2-124m]"
        )
        parser.add_argument(
            "--dataset", default="stdlib", help="text to learn, as of nanoray.train [%(default)s]"
        )
        parser.add_argument(
            "--precision", default="auto", help="of the products, as of nanoray.train [%(default)s]"
        )
        parser.add_argument(
            "--dp_mode",
            choices=("ddp", "ddp_by_hand"),
            default="ddp",
            help="of all arms [%(default)s]",
        )
        add_arms_flag(parser, ARMS)

    def measure(self, args: argparse.Namespace, report: Report) -> None:
        """Train all arms in turn on the same ranks, and fill the report."""
        where = where_from(args)
        if where.workers < 2:
            raise ConfigError(f"workers = {where.workers}; 2 is the least: one rank sends nothing")
        # The arm that sends float32 always runs: every other one is compared with it.
        arms = [PLAIN, *(name for name in chosen(args.arms, list(ARMS)) if name != PLAIN)]
        found: Found = {name: [] for name in arms}

        def add_rows() -> None:
            for name, events in found.items():
                _add_rows(report, name, events, where.workers)

        with ranks_for(report, where, add_rows) as pool:
            on_gpu = pool.facts[0]["device"] != "cpu"
            preset = args.preset or ("gpt2-124m" if on_gpu else "shakespeare-cpu")
            own = {"dataset": args.dataset, "precision": args.precision, "dp_mode": args.dp_mode}
            own["tokenizer"] = "byte"
            configs = {
                name: load_config(preset=preset, overrides=own | ARMS[name]) for name in arms
            }
            # Once, before the ranks ask for it: two that prepare it would write the same files
            note = prepare(configs[PLAIN]).note
            order = order_of(configs, args.rounds, args.steps, [COMMUNICATION, BITS], "gpt on text")
            rounds = f"{args.rounds} rounds of {args.steps} + 1 steps, {args.dp_mode}, {note}"
            collect(pool.run(TIME_ENTRY, order), report, found, rounds)

    def notes(self, report: Report) -> list[str]:
        """Return the bytes of each collective."""
        return [f"{row.arm}: {row.note}" for row in with_values(report, WIRE)]

    def finding(self, report: Report) -> list[str]:
        """Return what was found, by its numbers: which compressed arm is the fastest."""
        ratios = with_values(report, STEP, ratios=True)
        if not ratios:
            return []
        # The smallest ratio, measured in the same rounds as its reference.
        speed = min(ratios, key=lambda row: row.median)
        best = speed.arm.partition(" / ")[0]
        off = report.row(best, OFF)
        loss = f", the loss {off.median:+.4f} nat" if off else ""
        return [
            f"the fastest compressed arm, {best}, is {speed.speed} {PLAIN} here: "
            f"{speed.median:.3g} x its step{loss}"
        ]


def _add_rows(report: Report, name: str, events: list[dict[str, Any]], ranks: int) -> None:
    """Add an arm's rows, and its ratios to the arm that sends float32, round by round."""
    if not events:
        report.add(name, STEP, "ms", ())
        return

    # Bytes are the same in every round, so the last one stands for all.
    last = events[-1]
    plain = report.row(PLAIN, LOSS)
    wrong = sum(digest != last["digests"][0] for digest in last["digests"])
    step = report.add(name, STEP, "ms", each(events, "step_ms"), wrong=wrong)
    report.add(name, BUSY, "ms", each(events, "busy_ms"))
    report.add(name, EXPOSED, "ms", each(events, "exposed_ms"))
    carried = _wire_mb(last["collectives"], ranks)
    report.add(name, WIRE, "MB", carried, note_of_sent(last["collectives"]))
    means = (statistics.fmean(event["losses"]) for event in events)
    note = f"mean of each round's steps; {last['trained']} in all"
    loss = report.add(name, LOSS, "nat", means, note)
    # What follows compares with float32, round by round.
    if name == PLAIN or plain is None:
        return
    off = [a - b for a, b in zip(loss.values, plain.values, strict=False)]
    note = f"of the last round, against {PLAIN}"
    report.add(name, OFF, "nat", off[-1:], note, extra={"by_round": off})
    report.compare(name, PLAIN, STEP, "paired by round")
    # A slower arm still pays where its saved bytes take longer than its work: below this speed of a
    # link.
    whole = report.row(PLAIN, STEP)
    sent = report.row(PLAIN, WIRE)
    if whole and sent:
        more = [a - b for a, b in zip(step.values, whole.values, strict=False)]
        speed = 1e3 * (sent.median - carried) / max(1e-9, statistics.median(more))
        if statistics.median(more) > 0:
            report.add(name, PAYS, "MB/s", speed, "of a link")
        else:
            report.add(name, PAYS, "MB/s", (), "of a link", skipped="faster here already")


def _wire_mb(collectives: dict[str, tuple[int, int]], ranks: int) -> float:
    """Return the MB of gradients that the busiest link carries in a step."""
    total = 0.0
    for name, (_, size) in collectives.items():
        if name.endswith(" gradients"):
            # nccl-tests' factor: the share of the buffer that crosses the busiest link.
            factor = busbw_factor(name.partition(" ")[0], ranks)
            if factor:  # None for one rank, which sends nothing
                total += size * factor
    return total / 1e6

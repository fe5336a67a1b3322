"""`python -m nanoray.bench compression`: bytes, time and loss of compressed gradients.

Every arm trains the same model on the same batches of a text, beside one that sends float32. Each
round trains some steps of each in turn, so a slow minute of the machine hits all arms; the exposed
time and the bytes come from one more step of each round, traced. The bytes are those that the
busiest link of the best algorithm has to carry.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoray.base.metrics import busbw_factor
from nanoray.bench.harness.benchmark import Benchmark
from nanoray.bench.harness.figure import figure, whiskers
from nanoray.bench.harness.plan import chosen, count_of, rotated
from nanoray.bench.harness.rank_pool import (
    RankFailed,
    RankPool,
    add_where_flags,
    describe,
    where_from,
)
from nanoray.bench.harness.report import Measurement, Report, aligned, markdown, say
from nanoray.config import Config, load_config
from nanoray.data.prepare import prepare
from nanoray.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from nanoray.bench.arm import Case
    from nanoray.mesh.mesh import Mesh

PLAIN = "fp32"
ARMS: dict[str, dict[str, Any]] = {PLAIN: {}} | {
    kind: {"grad_compress": kind} for kind in ("bf16", "fp16", "int8")
}
ARMS |= {f"powersgd {r}": {"grad_compress": "powersgd", "powersgd_rank": r} for r in (1, 4, 16)}
STEP = "step"
EXPOSED = "exposed"
BUSY = "collectives busy"
WIRE = "bytes on the wire"
KEPT = "memory"
LOSS = "loss"
OFF = "loss, off"
PAYS = "pays below"


class CompressionBenchmark(Benchmark):
    """Compare bytes, step time and loss of compressed gradients with float32."""

    wrong = "ranks whose weights differ from those of rank 0"

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
        parser.add_argument(
            "--arms", default="all", help=f"some of {', '.join(ARMS)} [%(default)s]"
        )
        parser.add_argument(
            "--rounds", type=int, metavar="N", help="rounds of all arms [10; 2 with --quick]"
        )
        parser.add_argument(
            "--steps", type=int, metavar="N", help="steps of an arm per round [30; 4 with --quick]"
        )

    def measure(self, args: argparse.Namespace, report: Report) -> None:
        """Train all arms in turn on the same ranks, and fill the report."""
        where = where_from(args)
        rounds = count_of(args.rounds, args.quick, few=2, usual=10)
        steps = count_of(args.steps, args.quick, few=4, usual=30)
        if where.workers < 2 or min(rounds, steps) < 1:
            raise ConfigError(
                f"workers = {where.workers}, rounds = {rounds}, steps = {steps}; 2, 1 and 1 are the "
                "least"
            )
        # The arm that sends float32 always runs: every other one is compared with it.
        names = [PLAIN, *(name for name in chosen(args.arms, list(ARMS)) if name != PLAIN)]
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        with RankPool(where) as pool:
            describe(report, pool)
            on_gpu = pool.facts[0]["device"] != "cpu"
            own = {
                "dataset": args.dataset,
                "precision": args.precision,
                "dp_mode": args.dp_mode,
                "tokenizer": "byte",
            }
            order = {
                "preset": args.preset or ("gpt2-124m" if on_gpu else "shakespeare-cpu"),
                "overrides": own,
            }
            # One data set for all ranks: two that prepare it at once would write the same files.
            note = prepare(configuration(order)).note  # once, before the ranks ask for it
            order |= {"arms": names, "rounds": rounds, "steps": steps}
            # Events arrive while the ranks train; a lost rank fails the report and keeps what came
            # before.
            try:
                for event in pool.run("nanoray.bench.compression:train_rank", order):
                    if "recipe" in event:
                        report.conditions["recipe"] = (
                            f"{event['recipe']}, {rounds} rounds of {steps} + 1 steps, {args.dp_mode}, "
                            f"{note}"
                        )
                        continue
                    found[event["arm"]].append(event)
                    say(
                        f"round {event['round']}  {event['arm']:<12} {event['step_ms']:.1f} ms, loss "
                        f"{event['loss']:.3f}"
                    )
            except RankFailed as error:
                report.failures.append(str(error))
        ranks = where.workers
        for name, events in found.items():
            _add_rows(report, name, events, ranks)

    def format_text(self, report: Report) -> list[str]:
        """Return a line per arm, the bytes of each collective, and the finding."""
        rows = [row for row in report.rows if row.metric == WIRE and row.values]
        table = aligned(
            [(*line, "") for line in _build_table(report, "quartiles")], right=set(range(1, 9))
        )
        return [
            *table,
            "",
            *(f"{row.arm}: {row.note}" for row in rows),
            *report.findings(finding(report)),
        ]

    def format_markdown(self, report: Report) -> list[str]:
        """Return the table for a page, and the finding."""
        head, *body = _build_table(report, "range")
        return [*markdown(head, body), "", *report.findings(finding(report))]

    def draw(self, report: Report, path: Path) -> None:
        """Draw step time over bytes, and how the loss of each arm goes away from that of float32."""
        note = f"{report.conditions.get('recipe', '')} · {report.conditions.get('backend', '')}"
        with figure(report, path, (11, 4.6), note=note) as (left, right):
            # On the left the bytes and the time, on the right how far the loss moves away.
            for i, row in enumerate(
                r for r in report.rows if r.metric == STEP and r.unit == "ms" and r.values
            ):
                wire = report.row(row.arm, WIRE)
                off = report.row(row.arm, OFF)
                assert wire
                spread = whiskers([row], quartiles=True)
                left.errorbar(
                    wire.median,
                    row.median,
                    yerr=spread,
                    fmt="o",
                    capsize=2,
                    color=f"C{i}",
                    label=row.arm,
                )
                if off:
                    right.plot(off.extra["by_round"], color=f"C{i}", label=row.arm)
            left.set(
                xlabel="MB on the wire per step",
                ylabel="step, ms, median and quartiles",
                xlim=(0, None),
            )
            left.legend(fontsize=7)
            right.axhline(0.0, color="0.6", lw=0.8)
            right.set(xlabel="round", ylabel=f"loss - loss of {PLAIN}, nat", title="same batches")


def configuration(order: dict[str, Any], **more: Any) -> Config:
    """Return what is trained. Raises ConfigError for a key or value that cannot be."""
    return load_config(preset=order["preset"], overrides=order["overrides"] | more)


def _add_rows(report: Report, name: str, events: list[dict[str, Any]], ranks: int) -> None:
    """Add an arm's rows, and its ratios to the arm that sends float32, round by round."""
    if not events:
        report.rows.append(Measurement(name, STEP, "ms", ()))
        return

    def row(metric: str, unit: str, values: Any, note: str = "", **more: Any) -> Measurement:
        report.rows.append(Measurement(name, metric, unit, tuple(values), note, **more))
        return report.rows[-1]

    # Bytes and memory are the same in every round, so the last one stands for all.
    last = events[-1]
    plain = report.row(PLAIN, LOSS)
    step = row(STEP, "ms", (e["step_ms"] for e in events), wrong=last["wrong"])
    row(BUSY, "ms", (e["busy_ms"] for e in events))
    row(EXPOSED, "ms", (e["exposed_ms"] for e in events))
    note = " · ".join(
        f"{op} {size / 1e6:.3g} MB in {n}" for op, (n, size) in last["collectives"].items()
    )
    carried = _wire_mb(last["collectives"], ranks)
    row(WIRE, "MB", (carried,), note)
    row(KEPT, "MiB", (last["kept"] / 2**20,), "error feedback, in a rank's memory")
    loss = row(
        LOSS,
        "nat",
        (e["loss"] for e in events),
        f"mean of each round's steps; {last['trained']} in all",
    )
    # What follows compares with float32, round by round.
    if name == PLAIN or plain is None:
        return
    off = [a - b for a, b in zip(loss.values, plain.values, strict=False)]
    row(OFF, "nat", off[-1:], f"of the last round, against {PLAIN}", extra={"by_round": off})
    report.compare(name, PLAIN, STEP, "paired by round")
    # A slower arm still pays where its saved bytes take longer than its work: below this speed of a
    # link.
    whole = report.row(PLAIN, STEP)
    sent = report.row(PLAIN, WIRE)
    if whole and sent:
        more = [a - b for a, b in zip(step.values, whole.values, strict=False)]
        speed = 1e3 * (sent.median - carried) / max(1e-9, statistics.median(more))
        slower = statistics.median(more) > 0
        row(
            PAYS,
            "MB/s",
            (speed,) if slower else (),
            "of a link",
            skipped="" if slower else "faster here already",
        )


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


def finding(report: Report) -> list[str]:
    """Return what was found, by its numbers: which compressed arm is the fastest."""
    ratios = {
        r.arm.partition(" / ")[0]: r
        for r in report.rows
        if r.metric == STEP and " / " in r.arm and r.values
    }
    if not ratios:
        return []
    # The smallest ratio, measured in the same rounds as its reference.
    best = min(ratios, key=lambda name: ratios[name].median)
    speed = ratios[best]
    off = report.row(best, OFF)
    loss = f", the loss {off.median:+.4f} nat" if off else ""
    return [
        f"the fastest compressed arm, {best}, is {speed.speed} {PLAIN} here: {speed.median:.3g} x "
        f"its step{loss}"
    ]


def _build_table(report: Report, spread: str) -> list[tuple[str, ...]]:
    columns = {
        STEP: "step, ms",
        EXPOSED: "exposed, ms",
        WIRE: "MB on the wire",
        LOSS: "loss",
        OFF: "off, nat",
    }
    columns |= {PAYS: "pays below, MB/s", KEPT: "kept, MiB"}
    table = [("sent", f"step / {PLAIN}", *columns.values())]
    for name in (r.arm for r in report.rows if r.metric == STEP and r.unit == "ms"):
        # Only times have a spread worth printing.
        cells = [
            report.cell(name, metric, spread if metric in (STEP, EXPOSED) else "none")
            for metric in columns
        ]
        last = report.row(name, LOSS)
        # Of the last round
        cells[3] = f"{last.values[-1]:.4f}" if last and last.values else cells[3]
        table.append((name, report.cell(f"{name} / {PLAIN}", STEP, spread), *cells))
    return table


# On every rank.


def make_text_case(
    mesh: Mesh, config: Config, precision: str, micro: int, data: Any = None
) -> Case:
    """Return a GPT that learns from a text, for `bench strategies`' arms."""
    from nanoray.bench.arm import gpt
    from nanoray.config import resolve_batch
    from nanoray.data.tokens import MicroBatches

    # The model is that of `bench strategies`; only the data differ.
    case = gpt(mesh, config, precision, micro)
    batch = resolve_batch(config, mesh.world_size)
    batches = MicroBatches(data, batch, mesh.rank)

    def of(number: int) -> tuple[Tensor, Tensor]:
        # The number counts micro batches, so the batch follows from it alone.
        step, part = divmod(number, batch.accum)
        return batches.get(step * batch.global_size, part)

    case.batch = of
    return case


def train_rank(mesh: Mesh, order: dict[str, Any], emit: Callable[[Any], None]) -> None:
    """Run the rounds; emit one event per arm and round, times of the slowest rank. (all ranks)"""
    import torch

    from nanoray.bench.arm import Arm
    from nanoray.data.tokens import TokenData
    from nanoray.host.host import keep_freed_memory
    from nanoray.trace.recorder import wait_for

    # Memory that is freed stays with the process, as in a training run.
    if mesh.device.type == "cpu":
        keep_freed_memory()
    config = configuration(order)
    data = TokenData(prepare(config), config.block_size, config.seed, mesh.device)
    make = partial(make_text_case, data=data)
    # All arms share the data and start from the same weights.
    arms = {
        name: Arm(mesh, configuration(order, **ARMS[name]), make, traced=True)
        for name in order["arms"]
    }
    emit({"recipe": next(iter(arms.values())).recipe})
    # Rounds of all arms, in another order each time: the machine's speed drifts.
    for turn in range(order["rounds"]):
        for name in rotated(list(arms), turn):
            arm = arms[name]
            losses = []
            mesh.barrier()
            start = time.perf_counter()
            for _ in range(order["steps"]):
                arm.step()
                arm.plan.zero_grad()
                losses.append(arm.loss)
            # On a GPU the clock stops when the device has done the steps, not when they are queued.
            wait_for(mesh.device)
            ms = 1e3 * (time.perf_counter() - start) / order["steps"]
            # One traced step beside the timed ones: tracing takes time of its own.
            event = {"arm": name, "round": turn, **arm.traced_step()}
            # The slowest rank sets the pace of all.
            times = torch.tensor([ms, event["busy_ms"], event["exposed_ms"]], device=mesh.device)
            event["step_ms"], event["busy_ms"], event["exposed_ms"] = mesh.all_reduce(
                times, op="max"
            ).tolist()
            event["loss"] = mesh.all_reduce_mean(torch.stack(losses).mean()).item()
            # Replicas that differ after a round are an error, whatever was sent.
            digests = arm.digests()
            event |= {
                "trained": arm.trained,
                "wrong": sum(digest != digests[0] for digest in digests),
            }
            event["kept"] = 0 if arm.plan.memory is None else arm.plan.memory.nbytes
            emit(event)
    for arm in arms.values():
        arm.plan.close()

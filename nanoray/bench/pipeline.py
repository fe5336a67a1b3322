"""`python -m nanoray.bench pipeline`: how long pipeline stages wait, measured and in theory.

One rank is one stage. All arms train the same GPT on the same batches, so the schedules must end
with the same loss, and all but `interleaved`, which computes in other chunks, with the same bits as
1f1b. Each round trains some steps of every arm in turn. A stage's waiting is the share of forward
and backward in which it needs what another one has not sent yet; the theory knows equal stages and
messages that take no time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nanoray.bench.harness.benchmark import Benchmark, Count, part
from nanoray.bench.harness.figure import Figure, Panel, dots, measured, with_values
from nanoray.bench.harness.plan import rotated
from nanoray.bench.harness.rank_pool import RankPool, add_where_flags, describe, where_from
from nanoray.bench.harness.report import Measurement, Report, say
from nanoray.bench.harness.table import SPREAD, Table, TableColumn, names
from nanoray.config import Config, load_config
from nanoray.errors import ConfigError
from nanoray.parallel.schedules import SCHEDULES

if TYPE_CHECKING:
    from nanoray.bench.arm import Arm
    from nanoray.mesh.mesh import Mesh

BASE = "1f1b"
STEP = "step"
WAIT = "waiting"
THEORY = "waiting, theory"
LOSS = "loss"
BITS = "bits"
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

    wrong = "ranks whose weights are not those under 1f1b, or whose loss is far from it"
    counts = (
        Count("rounds", "rounds of all arms", usual=10, few=2),
        Count("steps", "steps of an arm per round", usual=8, few=2),
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
        parser.add_argument(
            "--micro_batch_size",
            type=int,
            default=4,
            metavar="N",
            help="sequences in one [%(default)s]",
        )

    def measure(self, args: argparse.Namespace, report: Report) -> None:
        """Train all arms in turn on the same ranks, and fill the report."""
        where = where_from(args)
        counts = [int(text) for text in args.micro.split(",") if text.strip().isdigit()]
        if where.workers < 2 or min(counts, default=0) < 1:
            raise ConfigError(
                f"workers = {where.workers}, micro = {args.micro}; a pipeline needs 2 ranks, and "
                "1 micro batch or more, like 2,4,8"
            )
        order = {"preset": args.preset, "rounds": args.rounds, "steps": args.steps}
        order |= {"micro_batch_size": args.micro_batch_size}
        order["arms"] = arms_of(where.workers, counts, configuration(order, {}).n_layer)
        for own in order["arms"].values():
            configuration(order, own)  # what cannot be is known before a rank is started
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in order["arms"]}

        def add_rows() -> None:
            for name, events in found.items():
                _add_rows(report, name, order["arms"][name], events, found)

        with part(report, add_rows), RankPool(where) as pool:
            describe(report, pool)
            for event in pool.run("nanoray.bench.pipeline:train_rank", order):
                if "recipe" in event:
                    rounds = f"{args.rounds} rounds of {args.steps} steps"
                    report.conditions["recipe"] = f"{event['recipe']}, {rounds}"
                    continue
                found[event["arm"]].append(event)
                times = f"{event['step_ms']:.1f} ms, waits {event['wait']:.1f} %"
                say(f"round {event['round']}  {event['arm']:<22} {times}")

    def finding(self, report: Report) -> list[str]:
        """Return which schedule gains most on 1f1b with the same number of micro batches."""
        ratios = with_values(report, STEP, ratios=True)
        if not ratios:
            return []
        best = min(ratios, key=lambda row: row.median)
        name, _, base = best.arm.partition(" / ")
        return [
            f"the best schedule beside 1f1b, {name}, is {best.speed} {base} here: "
            f"{best.median:.3g} x its step"
        ]


def arms_of(stages: int, counts: list[int], layers: int) -> dict[str, dict[str, Any]]:
    """Return the settings of every schedule with each number of micro batches and layers."""
    return {
        f"{kind}, {m} micro": {"pp": stages, "pp_schedule": kind, "grad_accum_steps": m}
        for m in counts
        for kind in (BASE, *(kind for kind in SCHEDULES if kind != BASE))
        if kind != "interleaved" or (m % stages == 0 and layers % (2 * stages) == 0)
    }


def configuration(order: dict[str, Any], own: dict[str, Any]) -> Config:
    """Return what an arm trains. Raises ConfigError for a key or value that cannot be."""
    size = {"micro_batch_size": order["micro_batch_size"], "global_batch_size": 0}
    return load_config(preset=order["preset"], overrides=size | own)


def _add_rows(
    report: Report,
    name: str,
    own: dict[str, Any],
    events: list[dict[str, Any]],
    found: dict[str, list[dict[str, Any]]],
) -> None:
    """Add an arm's rows, and its ratio to 1f1b with the same number of micro batches."""
    kind = own["pp_schedule"]
    base = f"{BASE}, {own['grad_accum_steps']} micro"
    if not events:
        report.rows.append(Measurement(name, STEP, "ms", ()))
        return
    report.rows += [
        Measurement(name, STEP, "ms", tuple(e["step_ms"] for e in events)),
        Measurement(name, WAIT, "%", tuple(e["wait"] for e in events), "mean over the stages"),
        Measurement(name, THEORY, "%", (events[0]["theory"],)),
    ]
    losses = [(a["loss"], b["loss"]) for a, b in zip(events, found[base], strict=False)]
    wrong = sum(abs(a - b) > FAR for a, b in losses)
    if kind != "interleaved":
        wrong += sum(a["digest"] != b["digest"] for a, b in zip(events, found[base], strict=False))
    report.rows.append(
        Measurement(
            name, LOSS, "nat", tuple(e["loss"] for e in events), f"against {base}", wrong=wrong
        )
    )
    if name != base:
        report.compare(name, base, STEP, "paired by round")


# On every rank.


def train_rank(mesh: Mesh, order: dict[str, Any], emit: Callable[[Any], None]) -> None:
    """Run the rounds and emit one event per arm and round. (all ranks)

    It holds the times of the slowest stage and the waiting of all.
    """
    import torch

    from nanoray.bench.arm import Arm, gpt
    from nanoray.host.host import keep_freed_memory
    from nanoray.trace.log import share_idle
    from nanoray.trace.recorder import wait_for

    if mesh.device.type == "cpu":
        keep_freed_memory()
    arms = {name: Arm(mesh, configuration(order, own), gpt) for name, own in order["arms"].items()}
    emit({"recipe": next(iter(arms.values())).case.what})
    for turn in range(order["rounds"]):
        for name in rotated(list(arms), turn):
            arm = arms[name]
            mesh.barrier()
            start = time.perf_counter()
            phases = [phase for _ in range(order["steps"]) for phase in _traced_phases(arm)]
            wait_for(mesh.device)
            ms = torch.tensor(
                1e3 * (time.perf_counter() - start) / order["steps"], device=mesh.device
            )
            wait = torch.tensor(100 * share_idle(phases), device=mesh.device)
            event = {"arm": name, "round": turn, "loss": arm.loss.item()}
            event |= {
                "step_ms": mesh.all_reduce(ms, op="max").item(),
                "wait": mesh.all_reduce_mean(wait).item(),
            }
            event |= {"theory": 100 * arm.plan.flow.bubble, "digest": arm.digests()}
            emit(event)
    for arm in arms.values():
        arm.plan.close()


def _traced_phases(arm: Arm) -> list[Any]:
    """Train one step; return this stage's phases."""
    arm.recorder.begin(0)
    arm.step()
    arm.recorder.end()
    arm.plan.zero_grad()
    arm.recorder.clock.anchor()
    (notes,) = arm.recorder.read()
    return list(notes["phases"])

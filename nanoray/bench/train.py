"""`python -m nanoray.bench train`: what starting, running and watching a training costs.

Launchers, each running the same recipe with the same seed, round by round in rotating order:

    plain              nanoray train                        one process
    torchrun           torchrun --nproc-per-node W -m nanoray.train
    ray                python -m nanoray.launch                       on a running cluster
    ray-init           python -m nanoray.launch --ray_address local   with its own Ray
    torchtrainer       Ray Train's TorchTrainer around nanoray's recipe (peers/ray_train.py), on the same cluster
    torchtrainer-init  the same with its own Ray

And a plain DDP script without anything of nanoray (peers/plain_ddp.py), with a recipe of its own:

    torchrun-script    torchrun --nproc-per-node W plain_ddp.py
    run                nanoray run plain_ddp.py                       on the same cluster
    run-trace          nanoray run --trace plain_ddp.py               the same with its collectives noted
    run-init           nanoray run --ray_address local plain_ddp.py   with its own Ray

The cluster is a Ray head of the benchmark's own, which idles beside every arm. The ranks of `ray`
and `torchrun` run the same loop and write the same files; under Ray they also answer the driver's
questions and send it records and log lines. The cost of that traffic is the ratio of the two in CPU
time per step, paired by round: 1 % of a step is less than the noise of wall-clock time on a shared
machine.

And what measuring the collectives costs and shows:

    every-50           torchrun ... -m nanoray.train --comm_trace every=50
    always             torchrun ... -m nanoray.train --comm_trace always
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from typing import Any

from nanoray.bench.harness.benchmark import Benchmark, Number, part
from nanoray.bench.harness.figure import Figure, Panel, bars, measured
from nanoray.bench.harness.launchers import (
    LAUNCHERS,
    METRICS,
    NOT_LOGGED,
    SAME_LOSS,
    SCRIPT_LAUNCHERS,
    TOO_SHORT,
    Moments,
    run_once,
)
from nanoray.bench.harness.report import Record, Report, say
from nanoray.bench.harness.table import Table, TableColumn, names
from nanoray.bench.harness.trainings import (
    BenchPlan,
    add_arms_flag,
    add_training_flags,
    chosen,
    in_turns,
    planned,
    words,
)
from nanoray.errors import ConfigError
from nanoray.machine.atomic import read_json_lines
from nanoray.machine.gpus import discover_gpus
from nanoray.machine.host import available_cpus
from nanoray.machine.proc import session_members
from nanoray.machine.slots import local_slots

# Launchers that trace: -> their flags beside torchrun's
TRACED = {"every-50": {"comm_trace": "every=50"}, "always": {"comm_trace": "always"}}
ARMS = (*LAUNCHERS, *TRACED)
# Rows of earlier reports: blocks of steps of loops, which `bench step cpu` measures
WIDE = ("baseline-384", "engine-384")
LOOPS = ("baseline", "engine", "engine-2", *WIDE, "untraced", *TRACED)
ON_CLUSTER = {"ray", "torchtrainer", "run", "run-trace"}
# Of what follows the moment when rank 0 begins
LAST = ("group_s", "model_s", "warm_up_s", "one_step_s")
FIRST, WHOLE, STEP = (METRICS[name][0] for name in ("first_step_s", "whole_run_s", "step_ms"))
RANKS_CPU, ALL_CPU = (METRICS[name][0] for name in ("rank_cpu_ms", "all_cpu_ms"))
BLOCK = "compute: step"
BUSY = "comm: busy"
COMM = {  # metric of a traced run -> (row, unit)
    "comm/busy_ms": (BUSY, "ms"),
    "comm/exposed_ms": ("comm: exposed", "ms"),
    "comm/exposed_share": ("comm: exposed share", "%"),
    "comm/busbw_gbps": ("comm: busbw", "GB/s"),
}


PARTS = [METRICS[name][0] for name in ("imports_s", "until_rank_s", "until_step_s")]
OF_LAST = [METRICS[name][0] for name in LAST]


def _launched(report: Report) -> list[str]:
    return [arm for arm in ARMS if report.row(arm, FIRST)]


def _computed(report: Report) -> list[str]:
    return [arm for arm in LOOPS if report.row(arm, BLOCK) or report.row(arm, BUSY)]


def _column(metric: str, head: str, optional: bool = False) -> TableColumn:
    return TableColumn(head, metric, "range", optional=optional)


def _draw_starts(axes: Any, report: Report) -> None:
    """Draw the time to the first step by its parts.

    Each bar is a stack of medians, so its end need not be the median of the whole start.
    """
    started = [row.arm for row in measured(report, ARMS, FIRST)]
    begin = dict.fromkeys(started, 0.0)
    for metric in PARTS:
        rows = measured(report, started, metric)
        label = metric.removeprefix("of it: ") if rows else ""
        bars(axes, rows, left=[begin[row.arm] for row in rows], xerr=None, label=label)
        begin |= {row.arm: begin[row.arm] + row.median for row in rows}


def _draw_steps(axes: Any, report: Report) -> None:
    """Draw the step times, without WIDE, which needs another scale."""
    loops = [arm for arm in LOOPS if arm not in WIDE]
    bars(axes, measured(report, ARMS, STEP) + measured(report, loops, BLOCK), color="0.6")


class TrainBenchmark(Benchmark):
    """Start the same recipe in every way, and compare start, step time and CPU time."""

    numbers = (
        Number("rounds", "rounds of all launchers", usual=5, few=1),
        Number("steps", "optimizer steps of a launch", usual=300, few=30),
    )
    shows_rows = True
    tables = (
        # The launchers: start, whole run, step; then the parts of a start, first to last.
        Table(
            _launched,
            (
                names("started by"),
                _column(FIRST, "command to first step, s"),
                _column(WHOLE, "whole run, s"),
                _column(STEP, "step, ms"),
                _column(RANKS_CPU, f"{RANKS_CPU}, ms", optional=True),
                _column(ALL_CPU, f"{ALL_CPU}, ms", optional=True),
            ),
        ),
        Table(
            _launched,
            (
                names("of it, s"),
                *(_column(metric, metric.removeprefix("of it: ")) for metric in PARTS),
            ),
        ),
        Table(
            lambda r: _launched(r) if measured(r, _launched(r), OF_LAST[0]) else [],
            (names("of the last, s"), *(_column(metric, metric) for metric in OF_LAST)),
        ),
        # The traced arms, and the loops of earlier reports.
        Table(
            _computed,
            (
                names("loop, on CPU"),
                _column(BLOCK, "step, ms", optional=True),
                *(_column(name, f"{name}, {unit}", optional=True) for name, unit in COMM.values()),
            ),
        ),
    )
    figure = Figure(
        (
            Panel(
                _draw_starts,
                {"title": "command to first optimizer step", "xlabel": "seconds, medians"},
                {"fontsize": 8},
                down=True,
            ),
            Panel(
                _draw_steps,
                {"title": "optimizer step", "xlabel": "ms, median and range"},
                down=True,
            ),
        ),
    )

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Add this benchmark's flags."""
        add_arms_flag(parser, ARMS)
        add_training_flags(parser, preset="shakespeare-cpu", timeout_s=600)

    def measure(self, args: argparse.Namespace, report: Report) -> None:
        """Run every arm that was asked for and fill the report. Nothing that it starts outlives it."""
        arms = chosen(args.arms, ARMS)
        if args.steps < 2:
            raise ConfigError(f"steps = {args.steps}; at least 2 are needed")

        # All arms get the same devices, chosen once, so that no launcher can choose better ones.
        slots = local_slots(args.device, args.workers, discover_gpus(), available_cpus())
        with planned(args, report, arms, slots) as (plan, stack):
            recipe = (
                f"preset {args.preset}, {args.steps} steps, {slots.workers} rank(s), {plan.note}"
            )
            report.conditions["recipe"] = recipe
            plan.start_head([arm for arm in arms if arm in ON_CLUSTER], stack)

            # The parts run one after the other and never beside one another: they share the
            # cores.
            _measure_idle_head(plan)
            _measure_launchers(plan)
        _add_targets(report)


def _measure_idle_head(plan: BenchPlan) -> None:
    """Measure what the Ray head costs when it has nothing to do."""
    if plan.head is None:
        return

    # Its CPU time is taken twice with a pause between: what it uses then is no arm's work.
    wait_s = 0.5 if plan.args.quick else 5.0
    time.sleep(wait_s)  # its workers start
    before = session_members(plan.head.process.pid)
    start = time.monotonic()
    time.sleep(wait_s)
    after = session_members(plan.head.process.pid)
    seconds = time.monotonic() - start
    if after:
        busy = 100 * sum(after[pid] - before.get(pid, 0.0) for pid in after) / seconds
        plan.add("idle Ray head", "CPU use", "% of a core", busy, "it runs beside every arm")


def _measure_launchers(plan: BenchPlan) -> None:
    """Run the launchers, round by round, and add their rows."""
    arms = plan.arms
    steps = plan.args.steps
    found: dict[str, list[Moments]] = {arm: [] for arm in arms}
    traced: dict[str, list[Record]] = {arm: [] for arm in arms if arm in TRACED}

    # No checkpoint within a run: writing one takes longer than many steps.
    recipe = plan.recipe({"max_steps": steps, "checkpoint_every": 0, "log_every": 10})

    def run(arm: str, turn: int) -> None:
        folder = plan.folder / f"{arm}-{turn}"
        flags = words({"max_steps": steps}) if arm in SCRIPT_LAUNCHERS else recipe
        launcher = "torchrun" if arm in TRACED else arm
        argv = plan.command(launcher, flags + words(TRACED.get(arm, {})), folder)
        head = plan.head if arm in ON_CLUSTER else None
        found[arm].append(run_once(argv, plan.env, folder, plan.args.timeout_s, steps, head))
        if arm in TRACED:
            (path,) = folder.glob("*/metrics.jsonl")
            traced[arm] += read_json_lines(path)
        new = found[arm][-1]
        say(
            f"round {turn + 1}/{plan.args.rounds}  {arm:<17}  first step {new.first_step_s:.2f} s  "
            f"whole run {new.whole_run_s:.2f} s  step {new.step_ms:.1f} ms  loss {new.last_loss:.4f}"
        )

    def add_rows() -> None:
        _add_launcher_rows(plan, found)
        _add_communication_rows(plan, traced)

    with part(plan.report, add_rows):
        in_turns(arms, plan.args.rounds, plan.broken, run, plan.fail)


def _add_launcher_rows(plan: BenchPlan, found: dict[str, list[Moments]]) -> None:
    """Add the rows of the rounds that all launchers have run."""
    # A broken arm keeps only the rows that carry its error.
    for name, (metric, unit) in METRICS.items():
        for arm in found:
            if arm not in plan.broken or metric in (FIRST, WHOLE, STEP):
                values = [getattr(run, name) for run in found[arm]]
                reason = ""
                if None in values:
                    # Without the value of one round the other rounds would no longer pair up
                    values = []
                    reason = TOO_SHORT if unit == "ms" else NOT_LOGGED
                plan.add(arm, metric, unit, values, skipped=reason)

    # All launchers train the same recipe, or the same script, with the same seed, so their losses
    # must agree.
    last = {
        arm: runs[-1].last_loss for arm, runs in found.items() if runs and arm not in plan.broken
    }
    for arm, loss in last.items():  # wrong results, fast, are no results
        same = [other for other in last if (other in SCRIPT_LAUNCHERS) == (arm in SCRIPT_LAUNCHERS)]
        reference = last[same[0]]
        if abs(loss - reference) > SAME_LOSS * abs(reference):
            plan.report.failures.append(
                f"{arm}: wrong: loss {loss:.4f} after {plan.args.steps} steps, others {reference:.4f}"
            )


def _add_communication_rows(plan: BenchPlan, traced: Mapping[str, list[Record]]) -> None:
    """Add what the traced arms found out about their collectives: one value per record."""
    for arm, records in traced.items():
        for metric, (name, unit) in COMM.items():
            values = [r[metric] for r in records if metric in r]
            if values:  # a short run may have no traced step
                plan.add(arm, name, unit, values, "of a step, as the run itself recorded it")


def _add_targets(report: Report) -> None:
    """Add the ratios and the targets that the measured arms allow."""
    pairs = (
        ("ray", "torchrun", STEP, "<=", 1.02, ""),
        # The cost of the traffic between ranks and driver
        ("ray", "torchrun", RANKS_CPU, "<=", 1.01, ""),
        ("ray", "torchrun", ALL_CPU, "", 0.0, ""),
        ("ray", "torchrun", FIRST, "<=", 1.0, ""),
        ("ray", "torchtrainer", FIRST, "<=", 0.35, ""),
        ("ray-init", "torchtrainer-init", FIRST, "", 0.0, ""),
        ("run", "torchrun-script", FIRST, "<=", 0.85, ""),
        ("run-init", "torchrun-script", FIRST, "", 0.0, ""),
        ("run", "torchrun-script", STEP, "<=", 1.02, ""),
        ("run-trace", "run", STEP, "<=", 1.02, ""),
        # 1 % drowns in the noise of a wall clock
        ("every-50", "torchrun", RANKS_CPU, "<=", 1.01, ""),
        ("every-50", "torchrun", STEP, "", 0.0, ""),
        ("always", "torchrun", RANKS_CPU, "", 0.0, ""),
        ("always", "torchrun", STEP, "<=", 1.05, ""),
    )

    # A pair without a relation is shown and has no target.
    for upper, lower, metric, relation, limit, excuse in pairs:
        row = report.compare(upper, lower, metric)
        if row and relation:
            report.add_target(f"{metric}, {row.arm}", row, relation, limit, excuse)

"""`python -m nanoray.bench recovery`: how long a killed rank stops training, and goodput.

    in_place      nanoray.launch --recovery in_place --spares 0             only the lost rank is replaced
    spare         the same with --spares 1                                  by an actor that is warm already
    shrink        nanoray.launch --recovery shrink --replace_timeout 0      the survivors go on at once, with fewer
    restart       nanoray.launch --recovery restart                         all ranks, from the newest checkpoint
    torchtrainer  Ray Train's TorchTrainer around the same recipe, FailureConfig(max_failures=...)
    torchft       the same trainer with torchft: the survivors go on at once, only the lost rank is replaced
    torchft_defaults  the same, with the lighthouse of Ray's own example, which notices a loss after 5 s
    torchrun      torchrun --max-restarts ... -m nanoray.train

And a plain DDP script with checkpoints of its own (peers/plain_ddp.py), all of whose ranks start again:

    run              nanoray run plain_ddp.py                      in processes that have imported torch
    torchrun-script  torchrun --max-restarts ... plain_ddp.py

Part one: one run per arm and round, in rotating order; one rank gets a SIGKILL between two given
steps, late enough for a spare to be warm. All arms of a round lose the same rank after the same
step. Part two: one longer run per arm, in which kills arrive by a Poisson process, the same moments
and ranks for all arms. The arms on Ray share one head, which is up before any of them starts. The
records of the runs say what happened (killed.py).
"""

from __future__ import annotations

import argparse
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from nanoray.bench.harness.benchmark import Benchmark, Number, part
from nanoray.bench.harness.figure import Figure, Panel, bars, measured
from nanoray.bench.harness.launchers import SAME_LOSS
from nanoray.bench.harness.processes import ChildFailed
from nanoray.bench.harness.report import Report, say
from nanoray.bench.harness.table import Table, TableColumn, count_of_rounds, names, wrong_of
from nanoray.bench.harness.trainings import (
    BenchPlan,
    add_arms_flag,
    add_training_flags,
    chosen,
    in_turns,
    planned,
    words,
)
from nanoray.bench.killed import (
    Goodput,
    MeasuredFault,
    TrainingProcess,
    arrivals,
    goodput,
    outage,
    wrong_losses,
)
from nanoray.bench.peers.torchft import PEER_LIGHTHOUSE, missing
from nanoray.errors import ConfigError
from nanoray.machine.gpus import discover_gpus
from nanoray.machine.host import available_cpus
from nanoray.machine.slots import local_slots

ON_NANORAY = {  # arm -> flags of nanoray.launch
    "in_place": ["--recovery", "in_place", "--spares", "0"],
    "spare": ["--recovery", "in_place", "--spares", "1"],
    "shrink": ["--recovery", "shrink", "--replace_timeout", "0", "--spares", "0"],
    "restart": ["--recovery", "restart"],
}
PEER = "torchtrainer"
TORCHFT = "torchft"
TORCHFT_DEFAULTS = "torchft_defaults"
ON_TORCHFT = {TORCHFT: {}, TORCHFT_DEFAULTS: {PEER_LIGHTHOUSE: "defaults"}}  # arm -> environment
TORCHRUN = "torchrun"
RUN = "run"
TORCHRUN_SCRIPT = "torchrun-script"
OF_SCRIPT = (RUN, TORCHRUN_SCRIPT)
WITHOUT_RAY = (TORCHRUN, TORCHRUN_SCRIPT)
ARMS = (*ON_NANORAY, PEER, TORCHFT, TORCHFT_DEFAULTS, TORCHRUN, *OF_SCRIPT)
QUARTILES = "quartiles"
STANDSTILL = "standstill"
NOTICED = "of it: until noticed"
REPEATED = "steps repeated"
GOODPUT = "goodput"
HITS = "kills that hit"
REDONE = "steps repeated, all kills"
# The target: a kill costs TorchTrainer this many times as much as recovery in place
TIMES_FASTER = 5.0
# And a kill of a plain script's rank costs `nanoray run` this part of what it costs torchrun
PART_OF_TORCHRUN = 0.5
MAX_FAILURES = 1000
ENDLESS = 10**6  # steps of a run that is ended by us
WARM_STEPS = 50  # of a run under a plan of kills before anything is counted
CLEAN_FRACTION = 6  # the time with kills, in multiples of the time without


def start(plan: BenchPlan, arm: str, steps: int, name: str) -> TrainingProcess:
    """Start a run of an arm, on the plan's head. Leaving its `with` block ends it."""
    folder = plan.folder / name
    flags: dict[str, object] = {
        "max_steps": steps,
        "checkpoint_every": plan.args.checkpoint_every,
    }
    if arm in OF_SCRIPT:
        own = words(flags)
    else:
        flags |= {"log_every": 1, "tensorboard": "false", "placement_timeout_s": 30}
        own = plan.recipe(flags | {"max_failures": MAX_FAILURES}) + ON_NANORAY.get(arm, [])
    argv = plan.command(_starter_of(arm), own, folder, restarts=MAX_FAILURES)
    env = plan.env | ON_TORCHFT.get(arm, {})
    return TrainingProcess(argv, env, folder, plan.head)


def _starter_of(arm: str) -> str:
    """Return the launcher of an arm, by its name in launchers.py."""
    if arm in ON_NANORAY:
        return "ray"
    return TORCHFT if arm in ON_TORCHFT else arm


# What is shown.


def _with_any(*metrics: str) -> Callable[[Report], list[str]]:
    """Return the arms of a table: those that have one of these metrics, with values or without."""

    def arms(report: Report) -> list[str]:
        return [arm for arm in ARMS if any(report.row(arm, metric) for metric in metrics)]

    return arms


def _standstill(report: Report, arm: str, spread: str) -> str:
    """Return the standstill of an arm, or that its peer is not installed."""
    row = report.row(arm, STANDSTILL)
    return "skipped" if row and row.skipped else report.cell(arm, STANDSTILL, spread)


def _times_faster(report: Report, arm: str, spread: str) -> str:
    """Return how many times TorchTrainer's standstill an arm's is shorter."""
    return report.cell(f"{PEER} / {arm}", STANDSTILL, spread)


def _colour_of(arm: str) -> str:
    return "#2e86c1" if arm in ON_NANORAY or arm == RUN else "0.6"


def _draw_standstills(axes: Any, report: Report) -> None:
    """Draw the standstills with their quartiles and every kill."""
    rows = measured(report, ARMS, STANDSTILL)
    bars(axes, rows, quartiles=True, color=[_colour_of(r.arm) for r in rows])
    for row in rows:
        axes.plot(row.values, [row.arm] * row.n, "k.", ms=4, alpha=0.5)

    # Seconds until the launcher logged the kill, as a white mark within the bar.
    noticed = measured(report, [row.arm for row in rows], NOTICED)
    if noticed:
        medians = [row.median for row in noticed]
        axes.plot(medians, [r.arm for r in noticed], "w|", ms=14, mew=2, label="noticed")


def _draw_goodputs(axes: Any, report: Report) -> None:
    rows = measured(report, ARMS, GOODPUT)
    bars(axes, rows, xerr=None, color=[_colour_of(r.arm) for r in rows])
    for container in axes.containers:
        axes.bar_label(container, fmt="%.0f", padding=3)


def _note(report: Report) -> str:
    known = report.conditions
    return "\n".join(known[key] for key in ("recipe", "kills", "plan of kills") if key in known)


class RecoveryBenchmark(Benchmark):
    """Measure how long training stands still when a rank is killed."""

    # Wrong: steps whose loss is not that of a run without a kill
    numbers = (
        Number("kills", "rounds, with one kill per arm in each", 5, 1, zero=True),
        Number("steps", "optimizer steps of such a run", 1100),
        Number("goodput_s", "seconds of each arm under a plan of kills", 45.0, 0.0, zero=True),
        Number("mean_s", "mean seconds from kill to kill", 10.0),
        Number("checkpoint_every", "steps", 50),
        Number("seed", "of all moments and ranks", 1337, zero=True),
    )
    tables = (
        Table(
            _with_any(STANDSTILL, GOODPUT),
            (
                names("arm"),
                TableColumn(f"{STANDSTILL}, s", _standstill, QUARTILES),
                TableColumn("noticed after, s", NOTICED, QUARTILES),
                TableColumn(REPEATED, REPEATED, QUARTILES),
                TableColumn("times faster", _times_faster, QUARTILES),
                replace(count_of_rounds(STANDSTILL), head="kills"),
                wrong_of(STANDSTILL),
                TableColumn(f"{GOODPUT}, %", GOODPUT, QUARTILES),
            ),
        ),
    )
    figure = Figure(
        (
            Panel(
                _draw_standstills,
                {
                    "title": "training stands still after one SIGKILL",
                    "xlabel": "seconds: median, quartiles, every kill",
                },
                legend={"fontsize": 8, "facecolor": "0.6"},
                down=True,
            ),
            Panel(
                _draw_goodputs,
                {
                    "title": "goodput under a plan of kills",
                    "xlabel": "new steps, % of those without kills",
                    "xlim": (0, None),
                },
                down=True,
            ),
        ),
        note=_note,
    )

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Add this benchmark's flags."""
        add_arms_flag(parser, ARMS)
        parser.add_argument(
            "--between", default="800,950", metavar="A,B", help="kill between these steps [800,950]"
        )
        add_training_flags(parser, preset="tiny", timeout_s=120)

    def measure(self, args: argparse.Namespace, report: Report) -> None:
        """Run every arm that was asked for and fill the report. Nothing that it starts outlives it."""
        # Check all flags first: an error must not come after a Ray cluster has been started.
        arms = chosen(args.arms, ARMS)
        kills: int = args.kills
        window_s: float = args.goodput_s
        first, last = _parse_between(args)
        if not (kills or window_s):
            raise ConfigError(
                f"kills = {kills}, goodput_s = {window_s:g}: nothing to measure; leave them out for "
                "5 and 45"
            )
        slots = local_slots(args.device, args.workers, discover_gpus(), available_cpus())
        if slots.workers < 2:
            raise ConfigError(
                f"workers = {slots.workers}: no rank would be left after a kill; use --workers 2 or "
                "more"
            )

        # The plan follows from the seed alone, so every arm meets the same kills.
        plan_of_kills = arrivals(args.seed, args.mean_s, window_s, slots.workers)
        if window_s and not plan_of_kills:
            raise ConfigError(
                f"no kill within goodput_s = {window_s:g} at mean_s = {args.mean_s:g}; take another "
                "--seed"
            )
        # torchft is no dependency of nanoray: without it this arm is skipped, not failed.
        why = missing()
        for arm in ON_TORCHFT:
            if arm in arms and why:
                arms.remove(arm)
                report.add(arm, STANDSTILL, "s", (), skipped=why)
                say(f"skipped  {arm}: {why}")
        if not arms:
            return
        with planned(args, report, arms, slots) as (plan, stack):
            report.conditions["recipe"] = (
                f"preset {args.preset}, {slots.workers} ranks on {slots.kind}, a record every step, a "
                "checkpoint every "
                f"{args.checkpoint_every}, {plan.note}"
            )
            if kills:
                between = f"one SIGKILL between steps {first} and {last}, seed {args.seed}"
                report.conditions["kills"] = f"{kills} round(s) of {args.steps} steps, {between}"
            if kills or window_s:
                plan.start_head([arm for arm in arms if arm not in WITHOUT_RAY], stack)
            if kills:
                _measure_standstills(plan, (first, last))
            if window_s:
                report.conditions["plan of kills"] = (
                    f"{len(plan_of_kills)} in {window_s:g} s, "
                    + ", ".join(f"rank {rank} at {at:.1f} s" for at, rank in plan_of_kills)
                )
                _measure_goodputs(plan, plan_of_kills, window_s)
        _add_targets(report)


def _parse_between(args: argparse.Namespace) -> tuple[int, int]:
    try:
        first, last = (int(part) for part in args.between.split(","))
    except ValueError:
        raise ConfigError(
            f"between = {args.between}: not two steps; write A,B like 800,950"
        ) from None
    if not 1 <= first <= last < args.steps:
        raise ConfigError(
            f"between = {args.between}, steps = {args.steps}; 1 <= A <= B < steps is needed"
        )
    return first, last


# Part one: single kills.


def _measure_standstills(plan: BenchPlan, between: tuple[int, int]) -> None:
    """Kill a rank of every arm once per round, and add the rows."""

    # Losses of runs without kills, which every later run must repeat.
    scripts = [arm for arm in plan.arms if arm in OF_SCRIPT]
    recipes = [arm for arm in plan.arms if arm not in OF_SCRIPT]
    of_script = _train_reference(plan, scripts)
    of_recipe = _train_reference(plan, recipes)

    found: dict[str, list[MeasuredFault]] = {arm: [] for arm in plan.arms}
    rounds = plan.args.kills

    def run(arm: str, turn: int) -> None:
        # The same moment and rank for all arms of a round
        moment = random.Random(f"{plan.args.seed}/{turn}").uniform(*between)
        whom = (moment, turn % plan.slots.workers)
        reference = of_script if arm in OF_SCRIPT else of_recipe
        kill = _kill_once(plan, arm, turn, whom, reference)
        found[arm].append(kill)
        say(
            f"kill {turn + 1}/{rounds}  {arm:<12}  rank {kill.rank} after step "
            f"{kill.step}  stands still {kill.standstill_s:.2f} s  {kill.repeated} "
            f"steps repeated  {kill.wrong} wrong"
        )

    with part(plan.report, lambda: _add_kills(plan, found)):
        in_turns(plan.arms, rounds, plan.broken, run, plan.fail)


def _train_reference(plan: BenchPlan, arms: list[str]) -> dict[int, float]:
    """Return step -> loss of a run without kills, by the first of these arms that completes one."""
    for arm in arms:
        if arm in plan.broken:
            continue
        try:
            with start(plan, arm, plan.args.steps, f"reference-{arm}") as run:
                run.finish(plan.args.timeout_s)
                return run.losses()
        except ChildFailed as error:
            plan.fail(arm, error)
            shutil.rmtree(plan.folder / f"reference-{arm}")
    return {}


def _kill_once(
    plan: BenchPlan, arm: str, turn: int, whom: tuple[float, int], reference: dict[int, float]
) -> MeasuredFault:
    """Run an arm, kill a rank at a moment, and watch it to the end.

    A moment is a step and a part of it. Raises ChildFailed.
    """
    (moment, rank) = whom
    timeout_s = plan.args.timeout_s
    with start(plan, arm, plan.args.steps, f"{arm}-{turn}") as run:
        # Let the run come to the step, then wait for the given part of the next one: kills fall
        # anywhere between two steps, not always right after one.
        run.wait_until(lambda: run.step >= int(moment), timeout_s, f"step {int(moment)}")
        time.sleep(moment % 1 * run.step_s)
        killed = run.kill(rank)
        if killed is None:
            raise ChildFailed(
                f"rank {rank} has no process to kill after step {run.step}\n{run.child.tail()}"
            )

        # torchrun and Ray Train repeat steps from a checkpoint: a repeated step ends no
        # standstill.
        run.wait_until(
            lambda: outage(run.done, killed) is not None, timeout_s, "a new step after the kill"
        )
        run.finish(timeout_s)

        # A run that ends early, or that did not recover, gives no number.
        back = outage(run.done, killed)
        if back is None or run.step != plan.args.steps:
            raise ChildFailed(
                f"it ended at step {run.step} of {plan.args.steps}\n{run.child.tail()}"
            )
        exact = (
            arm not in ("shrink", *ON_TORCHFT) and not plan.slots.devices
        )  # another number of ranks, or a GPU, sums in another order
        wrong = wrong_losses(run.losses(), reference, 0.0 if exact else SAME_LOSS)
        noticed_s = run.noticed_s(arm, killed)
    return MeasuredFault(turn, rank, back.step, back.seconds, back.repeated, wrong, noticed_s)


def _add_kills(plan: BenchPlan, found: dict[str, list[MeasuredFault]]) -> None:
    """Add the standstills and repeated steps of each arm, with all that is known of each kill.

    A broken arm reports only its error: the kills that it survived are a biased sample.
    """
    for arm in plan.arms:
        kills = [] if arm in plan.broken else found[arm]
        wrong = sum(kill.wrong for kill in kills) if kills else None
        raw = {"kills": [kill._asdict() for kill in kills]}
        seconds = [kill.standstill_s for kill in kills]
        note = "kill to the next new step"
        plan.add(arm, STANDSTILL, "s", seconds, note, wrong=wrong, extra=raw)
        if kills:
            plan.add(arm, REPEATED, "steps", [float(kill.repeated) for kill in kills])
            noticed = [kill.noticed_s for kill in kills if kill.noticed_s is not None]
            skipped = "" if noticed else "its log does not say"
            plan.add(arm, NOTICED, "s", noticed, skipped=skipped)


# Part two: a plan of kills.


def _measure_goodputs(plan: BenchPlan, kills: list[tuple[float, int]], window_s: float) -> None:
    """Run every arm once under the same plan of kills, and add the rows."""

    # Each arm runs alone: the machine has room for one set of ranks.
    for arm in plan.arms:
        if arm not in plan.broken:
            try:
                found, hits = _train_under_kills(plan, arm, kills, window_s)
            except ChildFailed as error:
                plan.fail(arm, error)
        if arm in plan.broken:
            plan.add(arm, GOODPUT, "%", ())
            continue
        say(f"goodput  {arm:<12}  {found.percent:.1f} %  {sum(hits)} of {len(kills)} kills hit")

        # Keep every planned kill and whether it hit: it shows that all arms met the same ones.
        raw = found._asdict() | {
            "kills": [[at, rank, hit] for (at, rank), hit in zip(kills, hits, strict=True)]
        }
        note = f"{found.useful} new steps in {window_s:g} s, {found.clean_per_s:.1f} steps/s without kills"
        plan.add(arm, GOODPUT, "%", found.percent, note, extra=raw)
        missed = "" if all(hits) else "the others met a rank that was down already"
        plan.add(arm, HITS, f"of {len(kills)}", sum(hits), missed)
        plan.add(arm, REDONE, "steps", found.repeated)


def _train_under_kills(
    plan: BenchPlan, arm: str, kills: list[tuple[float, int]], window_s: float
) -> tuple[Goodput, list[bool]]:
    """Run an arm without and then with kills; return its goodput and the kills that hit.

    Raises ChildFailed.
    """
    with start(plan, arm, ENDLESS, f"{arm}-goodput") as run:
        run.wait_until(lambda: run.step >= WARM_STEPS, plan.args.timeout_s, f"step {WARM_STEPS}")

        # Speed without kills first, in the same process and on the same machine a moment earlier.
        clean = time.time()
        run.follow(clean + window_s / CLEAN_FRACTION)
        begin = time.time()

        # A kill whose rank is still down from the one before does not hit; it is counted as such.
        hits = []
        for at, rank in kills:
            run.follow(begin + at)
            hits.append(run.kill(rank) is not None)
        run.follow(begin + window_s)
        found = goodput(run.done, clean, begin, begin + window_s)
    if found is None:
        raise ChildFailed(
            f"no step within {window_s / CLEAN_FRACTION:g} s without kills; give a longer --goodput_s"
        )
    return found, hits


def _add_targets(report: Report) -> None:
    """Add the ratios to TorchTrainer, paired by round, and the target."""
    of_run = report.compare(RUN, TORCHRUN_SCRIPT, STANDSTILL, "of torchrun's")
    if of_run:
        report.add_target(f"{STANDSTILL}, {of_run.arm}", of_run, "<=", PART_OF_TORCHRUN)
    for arm in ARMS:
        if arm == PEER or arm in OF_SCRIPT:
            row = None
        else:
            row = report.compare(PEER, arm, STANDSTILL, f"how many times faster {arm} is")
        if row and arm in ("in_place", "spare"):
            report.add_target(f"{STANDSTILL}, {row.arm}", row, ">=", TIMES_FASTER)

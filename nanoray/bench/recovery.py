"""`python -m nanoray.bench recovery`: how long training stands still when a rank is killed, and goodput under kills.

    in_place      nanoray.launch --recovery in_place --spares 0             only the lost rank is replaced
    spare         the same with --spares 1                                  by an actor that is warm already
    shrink        nanoray.launch --recovery shrink --replace_timeout 0      the survivors go on at once, with fewer
    restart       nanoray.launch --recovery restart                         all ranks, from the newest checkpoint
    torchtrainer  Ray Train's TorchTrainer around the same recipe, FailureConfig(max_failures=...)
    torchrun      torchrun --max-restarts ... -m nanoray.train

Part one: one run per arm and round, in rotating order; one rank gets a SIGKILL between two given steps. All arms of a
round lose the same rank after the same step. Part two: one longer run per arm, in which kills arrive by a Poisson
process, the same moments and ranks for all arms. The arms on Ray share one head, which is up before any of them starts.
What happened is read from the records of the runs (killed.py).
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from nanoray.bench.killed import Goodput, Kill, Run, arrivals, goodput, outage, wrong_losses
from nanoray.bench.launchers import SAME_LOSS, command
from nanoray.bench.processes import Child, ChildFailed, arm_environment, ray_head
from nanoray.bench.report import Report, Row, Target, aligned, markdown, number
from nanoray.config import Config, load_config
from nanoray.data import prepare
from nanoray.devices import Slots, available_cpus, discover_gpus, local_slots
from nanoray.errors import ConfigError

ON_NANORAY = {  # arm -> flags of nanoray.launch
    "in_place": ["--recovery", "in_place", "--spares", "0"],
    "spare": ["--recovery", "in_place", "--spares", "1"],
    "shrink": ["--recovery", "shrink", "--replace_timeout", "0", "--spares", "0"],
    "restart": ["--recovery", "restart"],
}
PEER, TORCHRUN = "torchtrainer", "torchrun"
ARMS = (*ON_NANORAY, PEER, TORCHRUN)
STANDSTILL, NOTICED, REPEATED = "standstill", "of it: until noticed", "steps repeated"
GOODPUT, HITS, REDONE = "goodput", "kills that hit", "steps repeated, all kills"
WRONG = "steps whose loss is not that of a run without a kill"
TIMES_FASTER = 5.0  # the target: a kill costs TorchTrainer this many times as much as recovery in place
MAX_FAILURES = 1000
ENDLESS = 10**6  # steps of a run that is ended by us
WARM_STEPS = 50  # of a run under a plan of kills before anything is counted
CLEAN_SHARE = 6  # one part without a kill on so many parts with kills


@dataclass
class Plan:
    """What one call of this benchmark is going to do."""

    args: argparse.Namespace
    arms: list[str]
    kills: int
    slots: Slots
    folder: Path
    env: dict[str, str]
    address: str = ""
    head: Child | None = None
    broken: set[str] = field(default_factory=set)

    @property
    def data(self) -> dict[str, str]:
        return {"dataset": self.args.dataset} | ({"data_dir": self.args.data_dir} if self.args.data_dir else {})

    def command(self, arm: str, steps: int) -> list[str]:
        """Return the command line of an arm that trains so many steps; the recipe is the same for all."""
        flags = {"preset": self.args.preset, "max_steps": steps, "log_every": 1, "eval_every": 0}
        flags |= {"checkpoint_every": self.args.checkpoint_every, "sample_tokens": 0, "tensorboard": "false"}
        flags |= {"device": self.args.device, "max_failures": MAX_FAILURES, "placement_timeout_s": 30} | self.data
        recipe = [part for key, value in flags.items() for part in (f"--{key}", str(value))]
        starter = "ray" if arm in ON_NANORAY else arm
        argv = command(starter, self.slots.workers, recipe + ON_NANORAY.get(arm, []), self.address)
        if arm == TORCHRUN:
            argv[3:3] = [f"--max-restarts={MAX_FAILURES}"]
        return argv

    def run(self, arm: str, steps: int, name: str) -> Run:
        """Start a run of an arm; leaving its `with` block ends it."""
        return Run(self.command(arm, steps), self.env, self.folder / name, self.head)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's flags."""
    parser.add_argument("--arms", default="all", metavar="A,B", help=f"which of {', '.join(ARMS)} [all]")
    parser.add_argument("--kills", type=int, metavar="N", help="rounds, with one kill per arm in each [5; 1 --quick]")
    parser.add_argument("--between", default="100,250", metavar="A,B", help="kill between these steps [100,250]")
    parser.add_argument("--steps", type=int, default=400, metavar="N", help="optimizer steps of such a run [400]")
    parser.add_argument(
        "--goodput_s",
        type=float,
        metavar="S",
        help="seconds of each arm under a plan of kills, 0 = off [45; 0 --quick]",
    )
    parser.add_argument("--mean_s", type=float, default=10.0, metavar="S", help="mean seconds from kill to kill [10]")
    parser.add_argument("--checkpoint_every", type=int, default=50, metavar="N", help="steps [50]")
    parser.add_argument("--seed", type=int, default=1337, metavar="N", help="of all moments and ranks [1337]")
    parser.add_argument("--workers", type=int, metavar="W", help="ranks [every GPU or slice, else 2 on CPU]")
    parser.add_argument("--device", default="auto", help="as in nanoray.launch [auto]")
    parser.add_argument("--preset", default="tiny", help="the recipe [tiny]")
    parser.add_argument("--dataset", default="auto", help="as in nanoray.launch [auto]")
    parser.add_argument("--data_dir", default="", help="as in nanoray.launch")
    parser.add_argument("--timeout_s", type=float, default=120.0, help="a run that takes longer has failed [120]")


def measure(args: argparse.Namespace, report: Report) -> None:
    """Run every arm that was asked for and fill the report. Nothing that it starts outlives it."""
    if "RANK" in os.environ:
        raise ConfigError("bench recovery starts its own ranks, but RANK is set; run it without torchrun")
    arms = _chosen(args.arms)
    kills = (1 if args.quick else 5) if args.kills is None else args.kills
    window_s = (0.0 if args.quick else 45.0) if args.goodput_s is None else args.goodput_s
    first, last = _between(args)
    if kills < 0 or window_s < 0 or not (kills or window_s):
        raise ConfigError(f"kills = {kills}, goodput_s = {window_s:g}: nothing to measure; leave them out for 5 and 45")
    if args.checkpoint_every < 1 or args.mean_s <= 0:
        raise ConfigError(f"checkpoint_every = {args.checkpoint_every}, mean_s = {args.mean_s:g}; both must be above 0")
    slots = local_slots(args.device, args.workers, discover_gpus(), available_cpus())
    if slots.workers < 2:
        raise ConfigError(f"workers = {slots.workers}: with one rank nobody is left; use --workers 2 or more")
    plan_of_kills = arrivals(args.seed, args.mean_s, window_s, slots.workers)
    if window_s and not plan_of_kills:
        raise ConfigError(f"no kill within goodput_s = {window_s:g} at mean_s = {args.mean_s:g}; take another --seed")
    long = len(tempfile.gettempdir()) > 30  # Ray's sockets lie below it, and a socket's path has 107 characters
    folder = Path(tempfile.mkdtemp(prefix="nrb-", dir="/tmp" if long else None))
    (folder / "tmp").mkdir()  # torchrun and killed daemons leave things in TMPDIR
    plan = Plan(args, arms, kills, slots, folder, arm_environment() | {"TMPDIR": str(folder / "tmp")})
    try:
        with ExitStack() as stack:
            data = prepare(load_config(preset=args.preset, overrides=plan.data))  # now, and not in the first arm
            report.conditions["recipe"] = (
                f"preset {args.preset}, {slots.workers} ranks on {slots.kind}, a record every step, a checkpoint every "
                f"{args.checkpoint_every}, {data.note}"
            )
            if kills:
                between = f"one SIGKILL between steps {first} and {last}, seed {args.seed}"
                report.conditions["kills"] = f"{kills} round(s) of {args.steps} steps, {between}"
            _skip(plan, report)
            _start_cluster(plan, report, stack)
            if kills:
                _standstills(plan, report, (first, last))
            if window_s:
                report.conditions["plan of kills"] = f"{len(plan_of_kills)} in {window_s:g} s, " + ", ".join(
                    f"rank {rank} at {at:.1f} s" for at, rank in plan_of_kills
                )
                _goodputs(plan, report, plan_of_kills, window_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    _judge(report)


def _chosen(text: str) -> list[str]:
    names = list(ARMS) if text == "all" else [name.strip() for name in text.split(",")]
    if strangers := [name for name in names if name not in ARMS]:
        raise ConfigError(f"unknown arm {strangers[0]}; known: {', '.join(ARMS)}")
    return [arm for arm in ARMS if arm in names]


def _between(args: argparse.Namespace) -> tuple[int, int]:
    try:
        first, last = (int(part) for part in args.between.split(","))
    except ValueError:
        raise ConfigError(f"between = {args.between}: not two steps; write A,B like 100,250") from None
    if not 1 <= first <= last < args.steps:
        raise ConfigError(f"between = {args.between}, steps = {args.steps}; 1 <= A <= B < steps is needed")
    return first, last


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _fail(plan: Plan, report: Report, arm: str, error: Exception) -> None:
    plan.broken.add(arm)
    text = f"{arm}: {error}"
    if arm != TORCHRUN and plan.head and plan.head.process.poll() is not None:
        text += f"\nthe Ray head is gone, exit code {plan.head.process.returncode}\n{plan.head.tail()}"
    report.failures.append(text)
    _say(f"FAILED  {text}")


def _skip(plan: Plan, report: Report) -> None:
    """Leave out the arms that this nanoray has no flags for, and say so."""
    known = Config.model_fields
    for arm, there in (("spare", "spares" in known), ("shrink", "shrink" in get_args(known["recovery"].annotation))):
        if arm in plan.arms and not there:
            plan.arms.remove(arm)
            why = "this nanoray has no --recovery shrink" if arm == "shrink" else "this nanoray has no --spares"
            report.rows.append(Row(arm, STANDSTILL, "s", (), skipped=why))


def _start_cluster(plan: Plan, report: Report, stack: ExitStack) -> None:
    """Start the Ray that its arms share."""
    users = [arm for arm in plan.arms if arm != TORCHRUN]
    if not users:
        return
    try:
        plan.address, plan.head = stack.enter_context(ray_head(plan.folder / "ray", plan.env, plan.slots))
    except (ChildFailed, OSError) as error:
        for arm in users:
            _fail(plan, report, arm, error)


# Part one: single kills.


def _standstills(plan: Plan, report: Report, between: tuple[int, int]) -> None:
    """Kill a rank of every arm once per round, and add the rows."""
    reference = _reference(plan, report)
    found: dict[str, list[Kill]] = {arm: [] for arm in plan.arms}
    for turn in range(plan.kills):
        source = random.Random(f"{plan.args.seed}/{turn}")  # alike for all arms
        moment, rank = source.uniform(*between), turn % plan.slots.workers
        shift = turn % max(1, len(plan.arms))
        for arm in plan.arms[shift:] + plan.arms[:shift]:
            if arm in plan.broken:
                continue
            try:
                kill = _kill_once(plan, arm, turn, (moment, rank), reference)
            except ChildFailed as error:
                _fail(plan, report, arm, error)
                continue
            found[arm].append(kill)
            _say(
                f"round {turn + 1}/{plan.kills}  {arm:<12}  rank {rank} killed after step {kill.step}  stands still "
                f"{kill.standstill_s:.2f} s  {kill.repeated} steps repeated  {kill.wrong} wrong"
            )
    for arm in plan.arms:
        report.rows += _rows(arm, found[arm], arm in plan.broken)


def _reference(plan: Plan, report: Report) -> dict[int, float]:
    """Return step -> loss of a run that nobody disturbs, started in the way of the first arm that can."""
    for arm in plan.arms:
        if arm in plan.broken:
            continue
        try:
            with plan.run(arm, plan.args.steps, "reference") as run:
                run.finish(plan.args.timeout_s)
                return run.losses()
        except ChildFailed as error:
            _fail(plan, report, arm, error)
            shutil.rmtree(plan.folder / "reference")
    return {}


def _kill_once(plan: Plan, arm: str, turn: int, whom: tuple[float, int], reference: dict[int, float]) -> Kill:
    """Run an arm, kill a rank at a moment (a step and a part of it), and see it through. Raises ChildFailed."""
    (moment, rank), timeout_s = whom, plan.args.timeout_s
    with plan.run(arm, plan.args.steps, f"{arm}-{turn}") as run:
        run.until(lambda: run.step >= int(moment), timeout_s, f"step {int(moment)}")
        time.sleep(moment % 1 * run.step_s)
        killed = run.kill(rank)
        if killed is None:
            raise ChildFailed(f"rank {rank} has no process to kill after step {run.step}\n{run.child.tail()}")
        run.until(lambda: outage(run.done, killed) is not None, timeout_s, "a new step after the kill")
        run.finish(timeout_s)
        back = outage(run.done, killed)
        if back is None or run.step != plan.args.steps:
            raise ChildFailed(f"it ended at step {run.step} of {plan.args.steps}\n{run.child.tail()}")
        exact = arm != "shrink" and not plan.slots.devices  # another number of ranks, or a GPU, sums in another order
        wrong = wrong_losses(run.losses(), reference, 0.0 if exact else SAME_LOSS)
        noticed_s = run.noticed_s(arm, killed)
    return Kill(turn, rank, back.step, back.standstill_s, noticed_s, back.repeated, wrong)


def _rows(arm: str, kills: list[Kill], broken: bool) -> list[Row]:
    error = "see FAILED below" if broken else ""
    kills = [] if broken else kills
    raw = {"kills": [kill._asdict() for kill in kills]}
    wrong = sum(kill.wrong for kill in kills) if kills else None
    seconds = tuple(kill.standstill_s for kill in kills)
    rows = [Row(arm, STANDSTILL, "s", seconds, "kill to the next new step", error, wrong, extra=raw)]
    noticed = tuple(kill.noticed_s for kill in kills if kill.noticed_s is not None)
    if kills:
        rows.append(Row(arm, NOTICED, "s", noticed, skipped="" if noticed else "its log does not say"))
        rows.append(Row(arm, REPEATED, "steps", tuple(float(kill.repeated) for kill in kills)))
    return rows


# Part two: a plan of kills.


def _goodputs(plan: Plan, report: Report, kills: list[tuple[float, int]], window_s: float) -> None:
    """Run every arm once under the same plan of kills, and add the rows."""
    for arm in plan.arms:
        if arm in plan.broken:
            report.rows.append(Row(arm, GOODPUT, "%", (), error="see FAILED below"))
            continue
        try:
            found, hits = _under_kills(plan, arm, kills, window_s)
        except ChildFailed as error:
            _fail(plan, report, arm, error)
            report.rows.append(Row(arm, GOODPUT, "%", (), error="see FAILED below"))
            continue
        _say(f"goodput  {arm:<12}  {found.percent:.1f} %  {sum(hits)} of {len(kills)} kills hit")
        raw = found._asdict() | {"kills": [[at, rank, hit] for (at, rank), hit in zip(kills, hits, strict=True)]}
        note = f"{found.useful} new steps in {window_s:g} s, {found.clean_per_s:.1f} steps/s without kills"
        report.rows.append(Row(arm, GOODPUT, "%", (found.percent,), note, extra=raw))
        missed = "" if all(hits) else "the others met a rank that was down already"
        report.rows.append(Row(arm, HITS, f"of {len(kills)}", (float(sum(hits)),), missed))
        report.rows.append(Row(arm, REDONE, "steps", (float(found.repeated),)))


def _under_kills(plan: Plan, arm: str, kills: list[tuple[float, int]], window_s: float) -> tuple[Goodput, list[bool]]:
    """Let an arm run without and then with kills; return what it came to, and which kills hit. Raises ChildFailed."""
    with plan.run(arm, ENDLESS, f"{arm}-goodput") as run:
        run.until(lambda: run.step >= WARM_STEPS, plan.args.timeout_s, f"step {WARM_STEPS}")
        start = time.time()
        run.follow(start + window_s / CLEAN_SHARE)
        begin, hits = time.time(), []
        for at, rank in kills:
            run.follow(begin + at)
            hits.append(run.kill(rank) is not None)
        run.follow(begin + window_s)
        found = goodput(run.done, start, begin, begin + window_s)
    if found is None:
        raise ChildFailed(f"no step within {window_s / CLEAN_SHARE:g} s without kills; give a longer --goodput_s")
    return found, hits


def _judge(report: Report) -> None:
    """Add the ratios to TorchTrainer, paired by round, and the target."""
    for arm in ARMS:
        row = None if arm == PEER else report.compare(PEER, arm, STANDSTILL, f"{arm} is so many times faster")
        if row and arm in ("in_place", "spare"):
            report.targets.append(Target(f"{STANDSTILL}, {row.arm}", row, ">=", TIMES_FASTER))


# What is printed and drawn.

HEADER = (
    "arm",
    f"{STANDSTILL}, s",
    "noticed after, s",
    REPEATED,
    "times faster",
    "kills",
    "wrong",
    f"{GOODPUT}, %",
    "",
)


def _line(report: Report, arm: str) -> tuple[str, ...] | None:
    """Return an arm's texts under HEADER; None when it was not asked for."""

    def cell(row: Row | None) -> str:
        if row is None or not row.values:
            return "FAILED" if row and row.problem else ""
        low, high = row.quartiles
        return number(row.median) + (f" ({number(low)}–{number(high)})" if row.n > 1 else "")

    single, whole = report.row(arm, STANDSTILL), report.row(arm, GOODPUT)
    if single is None and whole is None:
        return None
    texts = [cell(report.row(arm, metric)) for metric in (STANDSTILL, NOTICED, REPEATED)]
    texts.append(cell(report.row(f"{PEER} / {arm}", STANDSTILL)))
    texts += [str(single.n), "" if single.wrong is None else str(single.wrong)] if single else ["", ""]
    return (arm, *texts, cell(whole), (single or whole).skipped if (single or whole) else "")  # type: ignore[union-attr]


def lines(report: Report) -> list[str]:
    """Return a table with a line per arm: medians with their quartiles."""
    found = [line for arm in ARMS if (line := _line(report, arm))]
    return aligned([HEADER, *found], right=set(range(1, 8)))


def paste(report: Report) -> list[str]:
    """Return a table for a README: medians with their quartiles."""
    return markdown(HEADER[:-1], [line[:-1] for arm in ARMS if (line := _line(report, arm)) and not line[-1]])


def draw(report: Report, path: Path) -> None:
    """Draw the standstills with their quartiles and every kill, and the goodputs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
    rows = [row for arm in ARMS if (row := report.row(arm, STANDSTILL)) and row.values]
    spread = [[r.median - r.quartiles[0] for r in rows], [r.quartiles[1] - r.median for r in rows]]
    names = [r.arm for r in rows]
    left.barh(names, [r.median for r in rows], xerr=spread, color=[_colour(a) for a in names], capsize=3)
    for row in rows:
        left.plot(row.values, [row.arm] * row.n, "k.", ms=4, alpha=0.5)
    noticed = [row for arm in names if (row := report.row(arm, NOTICED)) and row.values]
    if noticed:
        left.plot([r.median for r in noticed], [r.arm for r in noticed], "w|", ms=14, mew=2, label="noticed")
        left.legend(fontsize=8, facecolor="0.6")
    left.set(title="training stands still after one SIGKILL", xlabel="seconds: median, quartiles, every kill")
    rows = [row for arm in ARMS if (row := report.row(arm, GOODPUT)) and row.values]
    bars = right.barh([r.arm for r in rows], [r.median for r in rows], color=[_colour(r.arm) for r in rows])
    right.bar_label(bars, fmt="%.0f", padding=3)
    right.set(title="goodput under a plan of kills", xlabel="new steps, % of those without kills", xlim=(0, None))
    for axes in (left, right):
        axes.invert_yaxis()
    told = [report.conditions[key] for key in ("recipe", "kills", "plan of kills") if key in report.conditions]
    figure.supxlabel("\n".join(told), fontsize=6)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _colour(arm: str) -> str:
    return "#2e86c1" if arm in ON_NANORAY else "0.6"

"""`python -m nanoray.bench rarely`: how much loss does it cost not to communicate?

Every arm trains the same model on the same samples: with gradients that are averaged in each step
(ddp), and with replicas that average their weights after every H steps (--sync_every). Three parts:

    tuning   a seed of its own    which learning rate ddp takes, and which rates the others take
    loss     N seeds              validation loss after equal tokens, and on the way there
    time     links, thin to thin  seconds and bytes of a step, on real TCP that a relay slows down
                                  (harness/thin_links.py)

The loss after equal time on a link is computed from the last two: an arm has done as many steps as
fit, and its loss is that of its curve there. Its schedule would have gone on, so an arm that is far
from its end could have ended somewhat lower with a shorter one.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nanoray.base.atomic import read_json_lines
from nanoray.bench.engine import STEP, TIME_ENTRY, each, order_of
from nanoray.bench.harness.benchmark import Benchmark, Number, ranks_for
from nanoray.bench.harness.figure import Figure, Panel
from nanoray.bench.harness.plan import (
    add_arms_flag,
    add_data_flags,
    add_settings_flag,
    chosen,
    data_flags,
    numbers_of,
    settings_of,
)
from nanoray.bench.harness.processes import scratch_folder
from nanoray.bench.harness.rank_pool import RankFailed, RankPool
from nanoray.bench.harness.ranks import Where
from nanoray.bench.harness.report import Emit, Record, Report, number, say
from nanoray.bench.harness.table import Cell, Table, TableColumn, names
from nanoray.bench.harness.thin_links import LinkSpeed, parse_links, why_not
from nanoray.checkpoint.run import RunSpec
from nanoray.config import Config, load_config
from nanoray.data.prepare import prepare
from nanoray.errors import ConfigError, TrainingDiverged
from nanoray.mesh.rendezvous import Rendezvous

if TYPE_CHECKING:
    from nanoray.mesh.mesh import Mesh

DDP = "ddp"
AVERAGED = {"outer_lr": 1.0, "outer_momentum": 0.0}
# An arm without a rate of its own takes the tuned ones.
ARMS: dict[str, Record] = {
    DDP: {},
    "ddp int8": {"grad_compress": "int8"},
    "H 1 averaged": {"sync_every": 1} | AVERAGED,
    "H 10": {"sync_every": 10},
    "H 50 averaged": {"sync_every": 50} | AVERAGED,
    "H 50": {"sync_every": 50},
    "H 50 8 bits": {"sync_every": 50, "sync_bits": 8},
    "H 50 2 fragments": {"sync_every": 50, "sync_fragments": 2},
    "H 100": {"sync_every": 100},
}
# Of a training that is watched and not recorded
QUIET = {"tensorboard": False, "sample_tokens": 0, "checkpoint_every": 0}
# The arms whose outer optimizer is tuned; the others with the same H take its rates
TUNED = ("H 10", "H 50", "H 100")
FIRST_TUNED = "H 50"  # whose learning rate all of them take
# A model that learns in a minute: 0.1 M parameters, 8 sequences of each of four replicas
RECIPE = {"n_layer": 2, "n_head": 4, "n_embd": 64, "global_batch_size": 32, "warmup_steps": 50}
LINKS = "0.1/1000,1/100,20/100,100/10"
LRS = "6e-3,12e-3,24e-3"
RARE_LRS = "3e-3,6e-3,12e-3"
OUTERS = "1:0,1:0.3,0.7:0.6,0.7:0.9"
TUNING_SEED = 1000
EVALUATIONS = 8  # on the way to the last step
WINDOWS = 3  # that are timed on each link
LEAST_STEPS = 4  # of a window

Curve = dict[int, float]  # loss by step

LOSS = "validation loss"
OFF = "loss - ddp's"
TUNING = "tuning: validation loss"
SENT = "sent"
SENT_FORMULA = "sent, formula"
IN_TIME = "loss in equal time"


# How it is shown.


def _links_of(report: Report) -> list[str]:
    """Return the links of a report, from fast to thin."""
    links = []
    for row in report.rows:
        metric, _, link = row.metric.partition(", ")
        if metric == STEP and row.values:
            links.append(link)
    return list(dict.fromkeys(links))


def _arms_of(report: Report) -> list[str]:
    return [row.arm for row in report.rows if row.metric == LOSS]


def _sent_kb(report: Report, arm: str) -> float | None:
    """Return the kB that a rank sends in a step, the median over all links."""
    values: list[float] = []
    for row in report.rows:
        if row.arm == arm and row.metric.startswith(f"{SENT}, ") and row.unit == "kB":
            values += row.values
    return statistics.median(values) if values else None


def _sent(report: Report, arm: str, spread: str) -> str:
    sent = _sent_kb(report, arm)
    return "" if sent is None else number(sent)


def _loss(metric: str, sign: str = "") -> Cell:
    """Return the cell of a mean over seeds, with its range."""

    def cell(report: Report, arm: str, spread: str) -> str:
        row = report.row(arm, metric)
        if row is None or not row.values:
            return "FAILED" if row and row.problem else ""
        text = f"{statistics.mean(row.values):{sign}.3f}"
        if row.n > 1:
            text += f" ({min(row.values):{sign}.3f}–{max(row.values):{sign}.3f})"
        return text

    return cell


def _tried(report: Report, arm: str, spread: str) -> str:
    row = report.row(arm, TUNING)
    if row is None or not row.values:
        return row.skipped if row else ""
    return f"{row.median:.4f}"


def _columns_by_link(report: Report) -> list[TableColumn]:
    links = _links_of(report)
    steps = [TableColumn(f"step, ms: {link}", f"{STEP}, {link}") for link in links]
    losses = [TableColumn(f"loss: {link}", _loss(f"{IN_TIME}, {link}")) for link in links]
    return [names("arm"), *steps, *losses]


def _draw_loss_over_bytes(axes: Any, report: Report) -> None:
    for i, arm in enumerate(_arms_of(report)):
        sent = _sent_kb(report, arm)
        row = report.row(arm, LOSS)
        if sent is None or row is None or not row.values:
            continue
        mean = statistics.mean(row.values)
        spread = [[mean - min(row.values)], [max(row.values) - mean]]
        axes.errorbar(sent, mean, yerr=spread, fmt="o", capsize=3, color=f"C{i}", label=arm)


def _draw_steps(axes: Any, report: Report) -> None:
    links = _links_of(report)
    for i, arm in enumerate(_arms_of(report)):
        rows = [report.row(arm, f"{STEP}, {link}") for link in links]
        known = [(link, row.median) for link, row in zip(links, rows, strict=True) if row]
        axes.plot([link for link, _ in known], [ms for _, ms in known], "o-", color=f"C{i}")
    axes.tick_params(axis="x", labelsize=7)


def _draw_loss_over_time(axes: Any, report: Report) -> None:
    """Draw the curves of all arms on the thinnest link."""
    links = _links_of(report)
    if not links:
        axes.set_axis_off()
        return
    link = links[-1]
    longest = 0.0
    for i, arm in enumerate(_arms_of(report)):
        row = report.row(arm, LOSS)
        step = report.row(arm, f"{STEP}, {link}")
        in_time = report.row(arm, f"{IN_TIME}, {link}")
        if row is None or step is None or in_time is None or not row.values:
            continue
        curves = row.extra["curves"]
        steps = sorted(int(key) for key in curves[0])
        seconds = [n * step.median / 1e3 for n in steps]
        losses = [statistics.mean(curve[str(n)] for curve in curves) for n in steps]
        axes.plot(seconds, losses, "-", color=f"C{i}")
        longest = in_time.extra["seconds"]
    axes.set(xlim=(0, 3 * longest), title=f"over time: {link}")


class RarelyBenchmark(Benchmark):
    """Compare loss, bytes and step time of replicas that rarely communicate with ddp."""

    numbers = (
        Number("steps", "steps of each training", usual=800, few=20),
        Number("seeds", "trainings of each arm", usual=3, few=1),
        Number("tuning_seeds", "trainings of each rate that is tried, none reported", 2),
        Number("workers", "ranks", 4),
        Number("timeout_s", "seconds after which a run has failed", 900.0),
    )
    tables = (
        Table(
            _arms_of,
            (
                names("arm"),
                TableColumn("loss, equal tokens", _loss(LOSS)),
                TableColumn("loss - ddp's", _loss(OFF, "+")),
                TableColumn("sent, kB a step", _sent),
                TableColumn("formula", SENT_FORMULA),
            ),
        ),
        Table(lambda report: _arms_of(report) if _links_of(report) else [], _columns_by_link),
        Table(TUNING, (names("tried on other seeds"), TableColumn("loss", _tried))),
    )
    figure = Figure(
        (
            Panel(
                _draw_loss_over_bytes,
                {
                    "xscale": "log",
                    "xlabel": "kB a rank sends in a step",
                    "ylabel": "validation loss, nat",
                    "title": "after equal tokens",
                },
                {"fontsize": 7},
                grid=True,
            ),
            Panel(
                _draw_steps,
                {"yscale": "log", "ylabel": "step, ms, median", "title": "on thinner links"},
                grid=True,
            ),
            Panel(
                _draw_loss_over_time,
                {"xlabel": "seconds, computed", "ylabel": "validation loss, nat"},
                grid=True,
            ),
        ),
        size=(14, 4.6),
        note=("recipe",),
    )

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Add this benchmark's flags."""
        parser.add_argument(
            "--preset", default="shakespeare-cpu", help="the recipe of all arms [%(default)s]"
        )
        add_arms_flag(parser, ARMS)
        parser.add_argument(
            "--links",
            metavar="MS/MBIT,...",
            default=LINKS,
            help="delay and speed of each rank's link [%(default)s]; none: no times",
        )
        parser.add_argument(
            "--lrs",
            metavar="LR,...",
            default=LRS,
            help="learning rates to try for ddp [%(default)s]",
        )
        parser.add_argument(
            "--rare_lrs",
            metavar="LR,...",
            default=RARE_LRS,
            help="learning rates to try for the others [%(default)s]",
        )
        parser.add_argument(
            "--outers",
            metavar="LR:MOMENTUM,...",
            default=OUTERS,
            help="rates and momenta to try for the outer optimizer [%(default)s]",
        )
        add_data_flags(parser)
        add_settings_flag(parser, "the recipe's")

    def measure(self, args: argparse.Namespace, report: Report) -> None:
        """Tune, train and time every arm, and fill the report."""
        if args.workers < 2:
            raise ConfigError(
                f"workers = {args.workers}: one rank communicates with no other; use --workers 2 "
                "or more"
            )
        # Each arm is compared with ddp.
        arms = [DDP, *(arm for arm in chosen(args.arms, list(ARMS)) if arm != DDP)]
        speeds = [link for link in parse_links(args.links, LINKS) if link]
        lrs = numbers_of(args.lrs, "lrs", LRS)
        rare_lrs = numbers_of(args.rare_lrs, "rare_lrs", RARE_LRS)
        outers = _parse_outers(args.outers)
        if args.quick:
            lrs = lrs[:1]
            rare_lrs = rare_lrs[:1]
            outers = outers[:1]
        reason = why_not() if speeds else None

        recipe = RECIPE | {"preset": args.preset, "device": "cpu", "max_steps": args.steps}
        recipe |= data_flags(args) | settings_of(args)
        config = configuration(recipe, {})
        # Refuse what cannot be trained before a process is started.
        for arm in arms:
            configuration(recipe, ARMS[arm])

        where = Where(args.workers, "processes", "cpu", "gloo", "local", args.timeout_s, False)
        with scratch_folder() as folder:
            note = prepare(config).note
            report.conditions["recipe"] = (
                f"preset {args.preset}, GPT of {_parameters_of(config):,} parameters, "
                f"{config.global_batch_size} sequences of {config.block_size} tokens a step, "
                f"{args.steps} steps, {args.seeds} seed(s), {note}"
            )
            curves: dict[str, list[Curve]] = {arm: [] for arm in arms}
            rates = Rates(
                lrs[0], rare_lrs[0], {ARMS[arm]["sync_every"]: outers[0] for arm in TUNED}
            )
            with ranks_for(report, where, lambda: add_loss_rows(report, curves)) as pool:
                trainings = Trainings(pool, recipe, folder)
                rates = tune(
                    trainings, report, arms, Grid(lrs, rare_lrs, outers, args.tuning_seeds)
                )
                train_all(trainings, report, rates, args.seeds, curves)
            add_formula_rows(report, arms, recipe, args.workers)

            times: dict[tuple[str, str], float] = {}
            if speeds and not reason:
                report.conditions["links"] = (
                    f"{', '.join(map(str, speeds))}: of each rank to one switch, in both "
                    "directions; real TCP in network namespaces, in packets of 9,000 bytes, which "
                    "a relay delays and never loses"
                )
                configs = {arm: configuration(recipe, ARMS[arm] | rates.of(arm)) for arm in arms}
                times = time_all(args, report, configs, speeds)
            elif reason:
                for arm in arms:
                    report.add(arm, f"{STEP}, {speeds[0]}", "ms", (), skipped=reason)
            add_equal_time_rows(report, curves, times, args.steps)

    def finding(self, report: Report) -> list[str]:
        """Return the answer in sentences: what the rarest arms cost in loss and save in time."""
        lines = []
        arms = [arm for arm in _arms_of(report) if "H " in arm]
        ddp = report.row(DDP, LOSS)
        offs = {arm: row for arm in arms if (row := report.row(arm, OFF)) and row.values}
        if ddp is None or not ddp.values or not offs:
            return []
        spread = max(ddp.values) - min(ddp.values)
        for arm, row in offs.items():
            sent = _sent_kb(report, arm)
            of_ddp = _sent_kb(report, DDP)
            fewer = ""
            if sent and of_ddp and of_ddp > 1.5 * sent:
                fewer = f" for {of_ddp / sent:.0f} x fewer bytes"
            lines.append(
                f"{arm}: {statistics.mean(row.values):+.3f} nat after equal tokens{fewer} (ddp's "
                f"own {ddp.n} seed(s) differ by {spread:.3f})"
            )
        for link in _links_of(report):
            own = {}
            for arm in _arms_of(report):
                in_time = report.row(arm, f"{IN_TIME}, {link}")
                if in_time and in_time.values:
                    own[arm] = statistics.mean(in_time.values)
            if DDP not in own:
                continue
            best = min(own, key=lambda arm: own[arm])
            lines.append(
                f"{link}: lowest loss in equal time {best}, {own[best]:.3f}; ddp {own[DDP]:.3f}"
            )
        return lines


# What is asked.


def _parse_outers(text: str) -> list[tuple[float, float]]:
    outers = []
    for pair in text.split(","):
        try:
            lr, momentum = map(float, pair.split(":"))
        except ValueError:
            raise ConfigError(
                f"outers = {text}: {pair} is no LR:MOMENTUM; write for example {OUTERS}"
            ) from None
        outers.append((lr, momentum))
    return outers


def configuration(recipe: Mapping[str, Any], own: Mapping[str, Any]) -> Config:
    """Return the configuration of an arm. Raises ConfigError for one that cannot be."""
    values = dict(recipe) | dict(own)
    preset = values.pop("preset")
    return load_config(preset=preset, overrides=values)


# Trainings.


@dataclass(frozen=True)
class Rates:
    """What the tuning has chosen."""

    ddp_lr: float
    rare_lr: float
    # Rate and momentum of the outer optimizer, by H
    outers: dict[int, tuple[float, float]]

    def of(self, arm: str) -> dict[str, float]:
        """Return the rates of an arm."""
        every = ARMS[arm].get("sync_every", 0)
        if not every:
            return {"lr": self.ddp_lr, "min_lr": self.ddp_lr / 10}
        rates = {"lr": self.rare_lr, "min_lr": self.rare_lr / 10}
        if has_outer(arm):
            rates["outer_lr"], rates["outer_momentum"] = self.outers[every]
        return rates

    def __str__(self) -> str:
        outers = []
        for every, (lr, momentum) in self.outers.items():
            outers.append(f"H {every}: outer_lr {lr:g}, outer_momentum {momentum:g}")
        inner = f"ddp: lr {self.ddp_lr:g}; H: lr {self.rare_lr:g}"
        return "; ".join([inner, *outers])


def has_outer(arm: str) -> bool:
    """Return whether an arm takes the tuned rates of an outer optimizer."""
    return "sync_every" in ARMS[arm] and "outer_lr" not in ARMS[arm]


def _parameters_of(config: Config) -> int:
    from nanoray.models.costs import count_parameters
    from nanoray.models.gpt import ModelShape

    return count_parameters(ModelShape.of(config, prepare(config).vocab_size))


@dataclass
class Trainings:
    """Trains on ranks that stay alive from one training to the next."""

    pool: RankPool
    recipe: Record
    folder: Path

    def train(self, arm: str, more: Mapping[str, Any]) -> Curve | str:
        """Train to the end; return the curve of the losses, or why there is none."""
        order = {"settings": self.recipe | ARMS[arm] | dict(more), "folder": str(self.folder)}
        (event,) = self.pool.run("nanoray.bench.rarely:train_rank", order)
        if "error" in event:
            return str(event["error"])
        return {int(step): loss for step, loss in event["curve"].items()}


@dataclass(frozen=True)
class Grid:
    """What the tuning tries."""

    lrs: list[float]
    rare_lrs: list[float]
    outers: list[tuple[float, float]]
    seeds: int


def tune(trainings: Trainings, report: Report, arms: Sequence[str], grid: Grid) -> Rates:
    """Choose the rates with the lowest loss on seeds that are not reported; add what was tried.

    One key after the other: the learning rate of ddp; that of one arm with averaged weights; and
    with it the outer optimizer for each H. What has only one value is not tried.
    """

    def lowest(arm: str, tried: Mapping[str, Record], more: Mapping[str, Any]) -> str:
        if len(tried) == 1:
            return next(iter(tried))
        means = {}
        for name, own in tried.items():
            losses = []
            for seed in range(TUNING_SEED, TUNING_SEED + grid.seeds):
                curve = trainings.train(arm, dict(more) | own | {"seed": seed})
                # A rate at which training diverges is an answer, too.
                losses.append(math.inf if isinstance(curve, str) else last_of(curve))
            means[name] = statistics.mean(losses)
            finite = [loss for loss in losses if loss < math.inf]
            if finite:
                note = "a value per seed that ended well"
                report.add(f"{arm}, {name}", TUNING, "nat", finite, note)
            else:
                report.add(f"{arm}, {name}", TUNING, "nat", (), skipped="it diverged")
            say(f"tuning  {arm}, {name}: {means[name]:.4f}")
        return min(means, key=lambda name: means[name])

    def with_lr(lrs: Sequence[float]) -> dict[str, Record]:
        return {f"lr {lr:g}": {"lr": lr, "min_lr": lr / 10} for lr in lrs}

    ddp_lr = with_lr(grid.lrs)
    of_ddp = ddp_lr[lowest(DDP, ddp_lr, {})]

    rare_lr = with_lr(grid.rare_lrs)
    of_rare = next(iter(rare_lr.values()))
    if any("sync_every" in ARMS[arm] for arm in arms):
        of_rare = rare_lr[lowest(FIRST_TUNED, rare_lr, AVERAGED)]

    outers = {}
    for arm in TUNED:
        every = ARMS[arm]["sync_every"]
        if not any(has_outer(a) and ARMS[a]["sync_every"] == every for a in arms):
            continue
        tried = {}
        for lr, momentum in grid.outers:
            outer = {"outer_lr": lr, "outer_momentum": momentum}
            tried[f"outer {lr:g}:{momentum:g}"] = outer
        best = tried[lowest(arm, tried, of_rare)]
        outers[every] = best["outer_lr"], best["outer_momentum"]

    rates = Rates(of_ddp["lr"], of_rare["lr"], outers)
    report.conditions["rates"] = str(rates)
    return rates


def train_all(
    trainings: Trainings,
    report: Report,
    rates: Rates,
    seeds: int,
    curves: dict[str, list[Curve]],
) -> None:
    """Train each arm of `curves` with each seed, and put the curves there."""
    for seed in range(1, seeds + 1):
        for arm, of_arm in curves.items():
            curve = trainings.train(arm, rates.of(arm) | {"seed": seed})
            if isinstance(curve, str):
                report.failures.append(f"{arm}, seed {seed}: {curve}")
                continue
            of_arm.append(curve)
            say(f"seed {seed}  {arm:<20} loss {last_of(curve):.4f}")


def last_of(curve: Curve) -> float:
    """Return the loss of a curve's last step."""
    return curve[max(curve)]


def add_loss_rows(report: Report, curves: Mapping[str, Sequence[Curve]]) -> None:
    """Add the last losses of each arm, and how far they are from ddp's with the same seed."""
    for arm, of_arm in curves.items():
        losses = [last_of(curve) for curve in of_arm]
        extra = {"curves": [{str(step): loss for step, loss in c.items()} for c in of_arm]}
        report.add(arm, LOSS, "nat", losses, "a value per seed", extra=extra)
        base = report.row(DDP, LOSS)
        if arm != DDP and base is not None:
            # The same seed draws the same weights and samples for both.
            pairs = zip(losses, base.values, strict=False)
            off = [own - of_ddp for own, of_ddp in pairs]
            report.add(arm, OFF, "nat", off, "paired by seed")


def add_formula_rows(
    report: Report, arms: Sequence[str], recipe: Mapping[str, Any], ranks: int
) -> None:
    """Add the bytes that a rank sends in a step by the forecast, where it has a prediction."""
    from nanoray.bench.simulate import communication_of

    for arm in arms:
        config = configuration(recipe, ARMS[arm])
        if config.grad_compress != "none":
            continue
        talks, layout = communication_of(config, ranks, prepare(config).vocab_size)
        sent = sum(talk.sent(layout.size_of(talk.axis)) for talk in talks)
        report.add(arm, SENT_FORMULA, "kB", sent / 1e3, "without headers")


# Time and bytes on thin links.


def time_all(
    args: argparse.Namespace,
    report: Report,
    configs: Mapping[str, Config],
    speeds: Sequence[LinkSpeed],
) -> dict[tuple[str, str], float]:
    """Time each arm on each link; add rows, and return the seconds of a step by arm and link.

    Each rank is a node of its own, and no other arm shares the links: what an exchange in the
    background still sends after a window would be counted to another arm.
    """
    times = {}
    for (arm, config), speed in itertools.product(configs.items(), speeds):
        steps = max(LEAST_STEPS, config.sync_every)  # a window is a round of replicas that meet
        order = order_of({arm: config}, 1 + WINDOWS, steps, model="gpt on text")
        where = Where(
            args.workers, device="cpu", timeout_s=args.timeout_s, nodes=args.workers, speed=speed
        )
        try:
            with RankPool(where) as pool:
                events = list(pool.run(TIME_ENTRY, order))
        except RankFailed as error:
            report.failures.append(f"{arm}, on {speed}: {error}")
            continue
        # The first window has the first step, which allocates
        windows = [event for event in events if "step_ms" in event][1:]
        ms = each(windows, "step_ms")
        kb = [window["crossed"] / steps / args.workers / 1e3 for window in windows]
        note = f"windows of {steps} steps"
        report.add(arm, f"{STEP}, {speed}", "ms", ms, note)
        report.add(arm, f"{SENT}, {speed}", "kB", kb, "a rank and step, all bytes")
        times[arm, str(speed)] = statistics.median(ms) / 1e3
        say(f"{speed!s:<20} {arm:<20} {statistics.median(ms):.1f} ms, {min(kb):.1f} kB")
    return times


def add_equal_time_rows(
    report: Report,
    curves: Mapping[str, Sequence[Curve]],
    times: Mapping[tuple[str, str], float],
    steps: int,
) -> None:
    """Add for each link the losses after the time in which the fastest arm has done all steps."""
    for link in dict.fromkeys(link for _, link in times):
        own = {arm: step_s for (arm, at), step_s in times.items() if at == link}
        seconds = steps * min(own.values())
        for arm, step_s in own.items():
            done = min(float(steps), seconds / step_s)
            losses = [loss_at(curve, done) for curve in curves[arm]]
            note = f"after {seconds:.0f} s it has done {done:.0f} of {steps} steps"
            extra = {"seconds": seconds, "steps": done}
            report.add(arm, f"{IN_TIME}, {link}", "nat", losses, note, extra=extra)


def loss_at(curve: Curve, step: float) -> float:
    """Return the loss of a curve at a step, on straight lines between its points."""
    steps = sorted(curve)
    return float(np.interp(step, steps, [curve[each] for each in steps]))


# On every rank.


def train_rank(mesh: Mesh, order: Record, emit: Emit) -> None:
    """Train as `python -m nanoray.train` does, in the group of the pool; emit the curve. (all
    ranks)
    """
    import torch

    from nanoray.start.folder import open_run
    from nanoray.train.rank import train

    settings = dict(order["settings"])
    steps = int(settings["max_steps"])
    every = max(1, steps // EVALUATIONS)
    settings |= QUIET | {"eval_every": every, "log_every": every, "out_dir": order["folder"]}
    # Rank 0 opens the folder of the run.
    opened: Record = {}
    if mesh.rank == 0:
        config = configuration(settings, {})
        opened = open_run(config, prepare(config), time.time()).to_dict()
    spec = RunSpec.from_dict(mesh.broadcast(opened))
    rendezvous = Rendezvous(
        rank=mesh.rank,
        world_size=mesh.world_size,
        local_rank=mesh.local_rank,
        local_world_size=mesh.world_size,
        device=str(mesh.device),
        backend=mesh.backend,
        threads=torch.get_num_threads(),
    )
    try:
        train(spec, rendezvous, meet=lambda *_, layout: replace(mesh, layout=layout))
    except TrainingDiverged as error:
        emit({"error": str(error).splitlines()[0]})
        return
    if mesh.rank == 0:
        records = read_json_lines(spec.folder / "metrics.jsonl")
        curve = {1: records[0]["train/loss"]}
        for record in records:
            if "val/loss" in record:
                curve[record["step"]] = record["val/loss"]
        emit({"curve": curve})

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
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanoray.bench.harness.benchmark import Benchmark
from nanoray.bench.harness.figure import figure
from nanoray.bench.harness.plan import (
    add_data_flags,
    add_settings_flag,
    chosen,
    count_of,
    data_flags,
    settings_of,
    words,
)
from nanoray.bench.harness.processes import (
    Child,
    ChildFailed,
    arm_environment,
    free_port,
    scratch_folder,
)
from nanoray.bench.harness.report import Report, Row, aligned, markdown, number, say
from nanoray.bench.harness.thin_links import Speed, ThinLinks, environment_of, why_not
from nanoray.config import Config, load_config
from nanoray.data.prepare import prepare
from nanoray.errors import ConfigError

DDP = "ddp"
AVERAGED = {"outer_lr": 1.0, "outer_momentum": 0.0}
# An arm without a rate of its own takes the tuned ones.
ARMS: dict[str, dict[str, Any]] = {
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
TUNED = "H 50"  # whose rates all arms with an outer optimizer take
# A model that learns in a minute: 0.1 M parameters, 8 sequences of each of four replicas
RECIPE = {"n_layer": 2, "n_head": 4, "n_embd": 64, "global_batch_size": 32, "warmup_steps": 50}
LINKS = "0.1/1000,1/100,20/100,100/10"
LRS = "2e-3,4e-3,8e-3"
OUTERS = "1:0,0.7:0.5,0.7:0.9,0.5:0.8"
TUNING_SEED = 1000
EVALUATIONS = 10  # on the way to the last step
WINDOWS = 3  # that are timed on each link
LEAST_STEPS = 4  # of a window

LOSS = "validation loss"
OFF = "loss - ddp's"
TUNING = "tuning: validation loss"
SENT = "sent"
SENT_FORMULA = "sent, formula"
STEP = "step"
IN_TIME = "loss in equal time"
POLL_S = 0.2


class RarelyBenchmark(Benchmark):
    """Compare loss, bytes and step time of replicas that rarely communicate with ddp."""

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Add this benchmark's flags."""
        parser.add_argument("--workers", type=int, default=4, metavar="N", help="ranks [4]")
        parser.add_argument(
            "--preset", default="shakespeare-cpu", help="the recipe of all arms [%(default)s]"
        )
        parser.add_argument(
            "--arms", default="all", metavar="A,B", help=f"some of {', '.join(ARMS)} [%(default)s]"
        )
        parser.add_argument(
            "--steps", type=int, metavar="N", help="steps of each training [1000; 20 with --quick]"
        )
        parser.add_argument(
            "--seeds", type=int, metavar="N", help="trainings of each arm [3; 1 with --quick]"
        )
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
            help="learning rates to try for ddp and for the others [%(default)s]",
        )
        parser.add_argument(
            "--outers",
            metavar="LR:MOMENTUM,...",
            default=OUTERS,
            help="rates and momenta to try for the outer optimizer [%(default)s]",
        )
        parser.add_argument(
            "--timeout_s", type=float, default=900.0, help="seconds after which a run has failed"
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
        speeds = parse_links(args.links)
        steps = count_of(args.steps, args.quick, few=20, usual=1000)
        seeds = count_of(args.seeds, args.quick, few=1, usual=3)
        lrs = _parse_numbers(args.lrs, "lrs")
        outers = _parse_outers(args.outers)
        if min(steps, seeds) < 1:
            raise ConfigError(f"steps = {steps}, seeds = {seeds}; both must be above 0")
        if args.quick:
            lrs = lrs[:1]
            outers = outers[:1]
        reason = why_not() if speeds else ""

        recipe = RECIPE | {"preset": args.preset, "device": "cpu", "max_steps": steps}
        recipe |= data_flags(args) | settings_of(args)
        config = configuration(recipe, {})
        # Refuse what cannot be trained before a process is started.
        for arm in arms:
            configuration(recipe, ARMS[arm])

        with scratch_folder() as folder:
            note = prepare(config).note
            bench = _Trainings(args, recipe, folder, report)
            parameters = bench.parameters()
            report.conditions["ranks"] = {"world size": args.workers, "backend": "gloo"}
            report.conditions["recipe"] = (
                f"preset {args.preset}, GPT of {parameters:,} parameters, "
                f"{config.global_batch_size} sequences of {config.block_size} tokens a step, "
                f"{steps} steps, {seeds} seed(s), {note}"
            )
            if speeds:
                report.conditions["links"] = (
                    f"{', '.join(map(str, speeds))}: of each rank to one switch, in both "
                    "directions; real TCP in network namespaces, in packets of 9,000 bytes, which "
                    "a relay delays and never loses"
                )

            rates = tune(bench, report, arms, lrs, outers)
            curves = train_all(bench, report, arms, rates, seeds)
            times = {}
            if speeds and not reason:
                times = time_all(bench, report, arms, rates, speeds)
            elif speeds:
                for arm in arms:
                    report.rows.append(Row(arm, f"{STEP}, {speeds[0]}", "ms", (), skipped=reason))
            _add_equal_time_rows(report, curves, times, steps)

    def format_text(self, report: Report) -> list[str]:
        """Return the tables for the terminal, and what was found."""
        lines: list[str] = []
        for head, *body in _tables(report):
            rows = [(*line, "") for line in (head, *body)]
            lines += [*aligned(rows, right=set(range(1, len(head)))), ""]
        return [*lines, *finding(report)]

    def format_markdown(self, report: Report) -> list[str]:
        """Return the tables for a page, and what was found."""
        lines: list[str] = []
        for head, *body in _tables(report):
            lines += [*markdown(head, body), ""]
        return [*lines, *finding(report)]

    def draw(self, report: Report, path: Path) -> None:
        """Draw loss over bytes, step time over links, and loss over time on the thinnest link."""
        note = report.conditions.get("recipe", "")
        with figure(report, path, (14, 4.6), (1, 3), note=note) as (left, middle, right):
            _draw_loss_over_bytes(report, left)
            _draw_steps(report, middle)
            _draw_loss_over_time(report, right)


# What is asked.


def parse_links(text: str) -> list[Speed]:
    """Return the links of MS/MBIT,... in the order from fast to thin. Raises ConfigError."""
    if text == "none":
        return []
    speeds = []
    for part in text.split(","):
        try:
            delay_ms, mbit_per_s = map(float, part.split("/"))
        except ValueError:
            raise ConfigError(
                f"links = {text}: {part} is no MS/MBIT; write for example {LINKS}"
            ) from None
        if not (0 <= delay_ms < math.inf and 0 < mbit_per_s < math.inf):
            raise ConfigError(
                f"links = {text}: {part} is no link; a delay is at least 0 ms, and a speed above 0"
            )
        speeds.append(Speed(delay_ms, mbit_per_s))
    return speeds


def _parse_numbers(text: str, flag: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{flag} = {text}: not numbers; write for example {LRS}") from None
    if not all(0 < each < math.inf for each in numbers):
        raise ConfigError(f"{flag} = {text}: a learning rate is above 0; write for example {LRS}")
    return numbers


def _parse_outers(text: str) -> list[tuple[float, float]]:
    outers = []
    for part in text.split(","):
        try:
            lr, momentum = map(float, part.split(":"))
        except ValueError:
            raise ConfigError(
                f"outers = {text}: {part} is no LR:MOMENTUM; write for example {OUTERS}"
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
    outer_lr: float
    outer_momentum: float

    def of(self, arm: str) -> dict[str, float]:
        """Return the rates of an arm."""
        own = ARMS[arm]
        if "sync_every" not in own or own["sync_every"] == 1:
            return {"lr": self.ddp_lr, "min_lr": self.ddp_lr / 10}
        rates = {"lr": self.rare_lr, "min_lr": self.rare_lr / 10}
        if "outer_lr" not in own:
            rates |= {"outer_lr": self.outer_lr, "outer_momentum": self.outer_momentum}
        return rates


@dataclass
class _Trainings:
    """Starts the ranks of one training after the other, all on this machine."""

    args: argparse.Namespace
    recipe: dict[str, Any]
    folder: Path
    report: Report
    number: int = 0
    env: dict[str, str] = field(default_factory=arm_environment)

    def parameters(self) -> int:
        """Return the number of parameters of the model."""
        from nanoray.models.costs import count_parameters
        from nanoray.models.gpt import ModelShape

        config = configuration(self.recipe, {})
        return count_parameters(ModelShape.of(config, prepare(config).vocab_size))

    @contextmanager
    def started(
        self, flags: Mapping[str, object], links: ThinLinks | None = None
    ) -> Iterator[tuple[list[Child], Path]]:
        """Start the ranks of a training; yield them and its folder. They end with the block."""
        self.number += 1
        folder = self.folder / str(self.number)
        folder.mkdir()
        argv = [sys.executable, "-m", "nanoray.train", *words(flags), "--out_dir", str(folder)]
        argv += ["--tensorboard", "false", "--sample_tokens", "0", "--checkpoint_every", "0"]
        ranks = self.args.workers
        port = free_port()
        with ExitStack() as stack:
            children = []
            for rank in range(ranks):
                env = self.env | environment_of(rank, ranks, port)
                command = argv
                if links is None:
                    env |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
                else:
                    command = links.command(rank, argv)
                log = folder / f"output{rank}.log"
                children.append(stack.enter_context(Child(command, env, log)))
            try:
                yield children, folder
            finally:
                # Nothing of a training that is still running is wanted.
                for child in children:
                    if child.process.poll() is None:
                        child.process.kill()

    def train(self, arm: str, more: Mapping[str, Any]) -> dict[int, float]:
        """Train to the end; return the loss by step: of step 1, and of each validation."""
        steps = int(self.recipe["max_steps"])
        every = _evaluated_every(steps)
        flags = self.recipe | ARMS[arm] | {"eval_every": every, "log_every": every} | dict(more)
        with self.started(flags) as (children, folder):
            deadline = time.monotonic() + self.args.timeout_s
            for child in children:
                child.wait(max(1.0, deadline - time.monotonic()))
            records = _records_in(folder)
        curve = {1: records[0]["train/loss"]}
        for record in records:
            if "val/loss" in record:
                curve[record["step"]] = record["val/loss"]
        if steps not in curve:
            raise ChildFailed(f"it has no validation loss of step {steps}")
        return curve


def _evaluated_every(steps: int) -> int:
    """Return the steps between two evaluations: at the end of a round of most arms."""
    return max(1, steps // EVALUATIONS)


def _records_in(folder: Path) -> list[dict[str, Any]]:
    """Return the complete records of the only run in a folder; [] before it has any."""
    records = []
    for path in folder.glob("*/metrics.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n"):
                records.append(json.loads(line))
    return records


def tune(
    bench: _Trainings,
    report: Report,
    arms: Sequence[str],
    lrs: Sequence[float],
    outers: Sequence[tuple[float, float]],
) -> Rates:
    """Choose the rates with the lowest loss on a seed that is not reported; add what was tried.

    One key after the other: the learning rate of ddp, then at that rate the outer optimizer of one
    arm, then the learning rate of that arm. What has only one value is not tried.
    """

    def lowest(arm: str, tried: Mapping[str, dict[str, Any]]) -> str:
        if len(tried) == 1:
            return next(iter(tried))
        losses = {}
        for name, more in tried.items():
            try:
                curve = bench.train(arm, more | {"seed": TUNING_SEED})
            except ChildFailed as error:
                # A rate at which training diverges is an answer, too.
                say(f"tuning  {arm}, {name}: {error}")
                report.rows.append(
                    Row(f"{arm}, {name}", TUNING, "nat", (), skipped="it did not end well")
                )
                continue
            losses[name] = curve[max(curve)]
            report.rows.append(Row(f"{arm}, {name}", TUNING, "nat", (losses[name],)))
            say(f"tuning  {arm}, {name}: {losses[name]:.4f}")
        if not losses:
            raise ConfigError(f"{arm} trained with none of {', '.join(tried)}; give others")
        return min(losses, key=lambda name: losses[name])

    by_lr = {f"lr {lr:g}": {"lr": lr, "min_lr": lr / 10} for lr in lrs}
    ddp_lr = by_lr[lowest(DDP, by_lr)]
    rare_lr = ddp_lr
    outer_lr, outer_momentum = outers[0]
    if any(arm.startswith("H ") and "outer_lr" not in ARMS[arm] for arm in arms):
        by_outer = {}
        for lr, momentum in outers:
            by_outer[f"outer {lr:g}:{momentum:g}"] = ddp_lr | {
                "outer_lr": lr,
                "outer_momentum": momentum,
            }
        best = by_outer[lowest(TUNED, by_outer)]
        outer_lr = best["outer_lr"]
        outer_momentum = best["outer_momentum"]
        own = {"outer_lr": outer_lr, "outer_momentum": outer_momentum}
        with_outer = {name: more | own for name, more in by_lr.items()}
        rare_lr = with_outer[lowest(TUNED, with_outer)]
    rates = Rates(ddp_lr["lr"], rare_lr["lr"], outer_lr, outer_momentum)
    report.conditions["rates"] = (
        f"ddp and H = 1: lr {rates.ddp_lr:g}; H above 1: lr {rates.rare_lr:g}, outer_lr "
        f"{rates.outer_lr:g}, outer_momentum {rates.outer_momentum:g}"
    )
    return rates


def train_all(
    bench: _Trainings, report: Report, arms: Sequence[str], rates: Rates, seeds: int
) -> dict[str, list[dict[int, float]]]:
    """Train each arm with each seed; add the rows of losses, and return the curves by seed."""
    curves: dict[str, list[dict[int, float]]] = {arm: [] for arm in arms}
    failed = set()
    for seed in range(1, seeds + 1):
        for arm in arms:
            if arm in failed:
                continue
            try:
                curve = bench.train(arm, rates.of(arm) | {"seed": seed})
            except ChildFailed as error:
                failed.add(arm)
                report.failures.append(f"{arm}, seed {seed}: {error}")
                continue
            curves[arm].append(curve)
            say(f"seed {seed}  {arm:<20} loss {curve[max(curve)]:.4f}")

    for arm in arms:
        losses = [curve[max(curve)] for curve in curves[arm]]
        extra = {"curves": [{str(step): loss for step, loss in c.items()} for c in curves[arm]]}
        report.rows.append(Row(arm, LOSS, "nat", tuple(losses), "a value per seed", extra=extra))
        base = report.row(DDP, LOSS)
        if arm != DDP and base is not None:
            # The same seed draws the same weights and samples for both.
            pairs = zip(losses, base.values, strict=False)
            off = tuple(own - of_ddp for own, of_ddp in pairs)
            report.rows.append(Row(arm, OFF, "nat", off, "paired by seed"))
    return curves


# Time and bytes on thin links.


def time_all(
    bench: _Trainings,
    report: Report,
    arms: Sequence[str],
    rates: Rates,
    speeds: Sequence[Speed],
) -> dict[tuple[str, str], float]:
    """Time each arm on each link; add rows, and return the seconds of a step by arm and link."""
    times = {}
    for arm in arms:
        try:
            found = _time_arm(bench, arm, rates, speeds)
        except ChildFailed as error:
            report.failures.append(f"{arm}, on thin links: {error}")
            continue
        for speed, windows in found.items():
            ms = tuple(1e3 * window.step_s for window in windows)
            kb = tuple(window.sent / 1e3 for window in windows)
            steps = windows[0].steps
            note = f"windows of {steps} steps"
            report.rows.append(Row(arm, f"{STEP}, {speed}", "ms", ms, note))
            report.rows.append(Row(arm, f"{SENT}, {speed}", "kB", kb, "a rank and step, all bytes"))
            times[arm, str(speed)] = statistics.median(ms) / 1e3
            say(f"{speed!s:<20} {arm:<20} {statistics.median(ms):.1f} ms, {min(kb):.1f} kB")
    return times


@dataclass(frozen=True)
class _Window:
    """Some steps of a run on one link."""

    steps: int
    step_s: float
    sent: float  # bytes, of a rank in a step


def _time_arm(
    bench: _Trainings, arm: str, rates: Rates, speeds: Sequence[Speed]
) -> dict[Speed, list[_Window]]:
    """Train one arm while its links get thinner; return what was timed on each."""
    # Replicas meet at logged steps, too, so a window is a round.
    every = max(LEAST_STEPS, ARMS[arm].get("sync_every", 0))
    flags = bench.recipe | ARMS[arm] | rates.of(arm)
    flags |= {"log_every": every, "eval_every": 0, "max_steps": 10**6}
    found = {}
    deadline = time.monotonic() + bench.args.timeout_s
    with (
        ThinLinks(bench.args.workers, speeds[0], bench.folder) as links,
        bench.started(flags, links) as (children, folder),
    ):
        for speed in speeds:
            links.speed = speed
            seen = len(_records_in(folder))
            # The first window begins with step 1, or on the link before.
            first = max(2, seen + 1)
            records = _wait_for(first + 1 + WINDOWS, folder, children, deadline)[first:]
            windows = []
            for before, after in itertools.pairwise(records):
                steps = after["step"] - before["step"]
                sent = links.sent_between(before["time"], after["time"])
                step_s = (after["time"] - before["time"]) / steps
                windows.append(_Window(steps, step_s, sent / steps / bench.args.workers))
            found[speed] = windows[:WINDOWS]
    return found


def _wait_for(
    count: int, folder: Path, children: Sequence[Child], deadline: float
) -> list[dict[str, Any]]:
    """Wait until a run has `count` records, and return all of them. Raises ChildFailed."""
    while True:
        records = _records_in(folder)
        if len(records) >= count:
            return records
        for rank, child in enumerate(children):
            if child.process.poll() is not None:
                raise ChildFailed(f"rank {rank} ended\n{child.tail()}")
        if time.monotonic() > deadline:
            raise ChildFailed(f"{len(records)} records of {count} in time\n{children[0].tail()}")
        time.sleep(POLL_S)


def _add_equal_time_rows(
    report: Report,
    curves: Mapping[str, Sequence[Mapping[int, float]]],
    times: Mapping[tuple[str, str], float],
    steps: int,
) -> None:
    """Add for each link the losses after the time in which the fastest arm has done all steps."""
    for link in dict.fromkeys(link for _, link in times):
        own = {arm: step_s for (arm, at), step_s in times.items() if at == link}
        seconds = steps * min(own.values())
        for arm, step_s in own.items():
            done = min(float(steps), seconds / step_s)
            losses = tuple(loss_at(curve, done) for curve in curves[arm])
            note = f"after {seconds:.0f} s it has done {done:.0f} of {steps} steps"
            extra = {"seconds": seconds, "steps": done}
            report.rows.append(Row(arm, f"{IN_TIME}, {link}", "nat", losses, note, extra=extra))


def loss_at(curve: Mapping[int, float], step: float) -> float:
    """Return the loss of a curve at a step, on straight lines between its points."""
    points = sorted(curve.items())
    if step <= points[0][0]:
        return points[0][1]
    for (left, loss), (right, next_loss) in itertools.pairwise(points):
        if step <= right:
            return loss + (next_loss - loss) * (step - left) / (right - left)
    return points[-1][1]


# How it is shown.


def _links_of(report: Report) -> list[str]:
    """Return the links of a report, from fast to thin."""
    names = []
    for row in report.rows:
        metric, _, link = row.metric.partition(", ")
        if metric == STEP and row.values:
            names.append(link)
    return list(dict.fromkeys(names))


def _arms_of(report: Report) -> list[str]:
    return [row.arm for row in report.rows if row.metric == LOSS]


def _sent_kb(report: Report, arm: str) -> float | None:
    """Return the kB that a rank sends in a step, the median over all links."""
    values: list[float] = []
    for row in report.rows:
        if row.arm == arm and row.metric.startswith(f"{SENT}, ") and row.unit == "kB":
            values += row.values
    return statistics.median(values) if values else None


def _tables(report: Report) -> list[list[tuple[str, ...]]]:
    """Return two tables: loss after equal tokens with bytes, and step and loss by link."""
    arms = _arms_of(report)
    links = _links_of(report)
    loss = [("arm", "loss, equal tokens", "loss - ddp's", "sent, kB a step", "formula")]
    for arm in arms:
        sent = _sent_kb(report, arm)
        loss.append(
            (
                arm,
                _loss_cell(report, arm, LOSS),
                _loss_cell(report, arm, OFF, "+"),
                "" if sent is None else number(sent),
                report.cell(arm, SENT_FORMULA, "none"),
            )
        )
    tables: list[list[tuple[str, ...]]] = [list(loss)]
    if links:
        by_link: list[tuple[str, ...]] = [
            (
                "arm",
                *(f"step, ms: {link}" for link in links),
                *(f"loss: {link}" for link in links),
            )
        ]
        for arm in arms:
            steps = [report.cell(arm, f"{STEP}, {link}", "none") for link in links]
            losses = [_loss_cell(report, arm, f"{IN_TIME}, {link}") for link in links]
            by_link.append((arm, *steps, *losses))
        tables.append(by_link)
    tried = [row for row in report.rows if row.metric == TUNING]
    if tried:
        body = [(row.arm, f"{row.median:.4f}" if row.values else row.skipped) for row in tried]
        tables.append([("tried on another seed", "loss"), *body])
    return tables


def _loss_cell(report: Report, arm: str, metric: str, sign: str = "") -> str:
    """Write the mean of a row over its seeds, with its range."""
    row = report.row(arm, metric)
    if row is None:
        return ""
    if not row.values:
        return "FAILED" if row.problem else ""
    text = f"{statistics.mean(row.values):{sign}.3f}"
    if row.n > 1:
        text += f" ({min(row.values):{sign}.3f}–{max(row.values):{sign}.3f})"
    return text


def finding(report: Report) -> list[str]:
    """Return the answer in sentences: what the rarest arms cost in loss and save in time."""
    lines = []
    links = _links_of(report)
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
        if sent and of_ddp:
            fewer = f" for {of_ddp / sent:.0f} x fewer bytes"
        lines.append(
            f"{arm}: {statistics.mean(row.values):+.3f} nat after equal tokens{fewer} (ddp's own "
            f"{ddp.n} seed(s) differ by {spread:.3f})"
        )
    for link in links:
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


def _draw_loss_over_bytes(report: Report, axes: Any) -> None:
    for i, arm in enumerate(_arms_of(report)):
        sent = _sent_kb(report, arm)
        row = report.row(arm, LOSS)
        if sent is None or row is None or not row.values:
            continue
        mean = statistics.mean(row.values)
        spread = [[mean - min(row.values)], [max(row.values) - mean]]
        axes.errorbar(sent, mean, yerr=spread, fmt="o", capsize=3, color=f"C{i}", label=arm)
    axes.set(xscale="log", xlabel="kB a rank sends in a step", ylabel="validation loss, nat")
    axes.set_title("after equal tokens")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=7)


def _draw_steps(report: Report, axes: Any) -> None:
    links = _links_of(report)
    for i, arm in enumerate(_arms_of(report)):
        rows = [report.row(arm, f"{STEP}, {link}") for link in links]
        known = [(link, row.median) for link, row in zip(links, rows, strict=True) if row]
        names = [link for link, _ in known]
        axes.plot(names, [ms for _, ms in known], "o-", color=f"C{i}", label=arm)
    axes.set(yscale="log", ylabel="step, ms, median")
    axes.set_title("on thinner links")
    axes.tick_params(axis="x", labelsize=7)
    axes.grid(alpha=0.25)


def _draw_loss_over_time(report: Report, axes: Any) -> None:
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
        axes.plot(seconds, losses, "-", color=f"C{i}", label=arm)
        longest = in_time.extra["seconds"]
    axes.set(xlim=(0, 3 * longest), xlabel="seconds, computed", ylabel="validation loss, nat")
    axes.set_title(f"over time: {link}")
    axes.grid(alpha=0.25)

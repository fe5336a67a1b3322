"""`python -m nanoray.bench scaling`: fit what communication costs, predict steps, check them.

    fit        the backend's all-reduces at --workers ranks (2)          -> alpha and beta
    parts      forward, backward and optimizer there, without exchange   -> compute (step_parts.py)
    predict    the simulated step of DDP at 2, 3 and 4 ranks, next to the measured one, round by round
    topologies the same simulation from 1 to 16,384 ranks, on links that a YAML file describes

What the model assumes of this machine. All ranks are equal. Ranks on CPU share the cores fairly:
compute keeps a core per thread busy, a collective as many as its CPU seconds over its time, both
measured at 2 ranks. Where that is more than the cores, everything slows down in proportion. The
model leaves out task switches, caches, unequal ranks and other users of the machine: their effect
is in the printed error. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nanoray.bench.algorithms import BACKEND
from nanoray.bench.algorithms import ENTRY as SWEEP
from nanoray.bench.engine import TIME_ENTRY, order_of
from nanoray.bench.harness.benchmark import Benchmark, Number, part
from nanoray.bench.harness.figure import Figure, Panel, with_values
from nanoray.bench.harness.rank_pool import RankPool, add_where_flags, describe, where_from
from nanoray.bench.harness.report import Record, Report, number, say, table
from nanoray.bench.harness.table import Table, TableColumn, names
from nanoray.bench.harness.trainings import numbers_of, rotated
from nanoray.bench.simulate import (
    MEASURED,
    PREDICTED,
    Work,
    add_error_target,
    add_step_rows,
    cost_of,
    draw_steps,
    model_work,
    percent_of_error,
    scaling,
    shape_of,
    work_of,
)
from nanoray.bench.step_parts import (
    COLLECTIVES,
    COMPUTE,
    PARTS,
    PLAIN,
    fastest_turns,
    one_micro_batch,
    seconds_of,
)
from nanoray.cli.forecast.fit import Fit, fit
from nanoray.cli.forecast.links import LANES, MODELS, Topology, best, load_topology, topology_names
from nanoray.cli.forecast.simulate import SimulatedStep, simulate
from nanoray.config import Config, load_config
from nanoray.errors import ConfigError, PlacementError
from nanoray.machine.host import available_cpus

PRESET = "shakespeare-cpu"  # whose step is measured
RANKS = [2**i for i in range(15)]
SHOWN = (1, 8, 64, 512, 4096, 16384)
CPU_BYTES = (1 << 12, 1 << 18, 1 << 22)  # of the all-reduces whose CPU time is measured
TURNS = 6  # of all arms in a round


# How it is shown.


def _steps_of(report: Report) -> dict[tuple[str, str, int], dict[str, float]]:
    """Return (topology, mode, ranks) -> milliseconds by algorithm."""
    steps_ms = {}
    for row in report.rows:
        if "topology" in row.extra:
            key = (row.extra["topology"], row.extra["mode"], row.extra["ranks"])
            steps_ms[key] = row.extra["step_ms"]
    return steps_ms


def _curves_of(report: Report) -> list[str]:
    """Return the lines of the overview: topology, mode and algorithm."""
    curves = dict.fromkeys((name, mode) for name, mode, _ in _steps_of(report))
    return [f"{name}, {mode}, {how}" for name, mode in curves for how in ("best", "ring")]


def _predicted_at(ranks: int) -> TableColumn:
    """Return the column of the predicted steps at a number of ranks."""

    def cell(report: Report, curve: str, spread: str) -> str:
        name, mode, algorithm = curve.rsplit(", ", 2)
        steps_ms = _steps_of(report)
        if (name, mode, ranks) not in steps_ms:
            return "-"
        # Ideally weak scaling keeps the time of a step, and strong scaling divides it
        alone_ms = steps_ms[name, mode, 1][algorithm]
        step_ms = steps_ms[name, mode, ranks][algorithm]
        ideal_ms = alone_ms / ranks if mode == "strong" else alone_ms
        return f"{number(step_ms)} ({100 * ideal_ms / step_ms:.0f})"

    return TableColumn(str(ranks), cell)


CHECK = Table(
    lambda report: [row.arm for row in with_values(report, MEASURED)],
    (
        names("step, ms", lambda arm: f"{arm} ranks"),
        TableColumn("measured", MEASURED),
        TableColumn("predicted", PREDICTED),
        TableColumn("error", percent_of_error),
    ),
)
OVERVIEW = Table(_curves_of, (names("step ms (efficiency %) at ranks"), *map(_predicted_at, SHOWN)))


def _draw_schedule(axes: Any, report: Report) -> None:
    """Draw a bar per event of a predicted schedule, on a track each for compute and links."""
    colours = {"forward": "tab:blue", "backward": "tab:cyan", "optimizer": "tab:green"}
    rows = [row for row in report.rows if row.metric == PREDICTED]
    events = rows[-1].extra["events"] if rows else []
    for track, name, start_s, end_s in events:
        width_ms = 1e3 * (end_s - start_s)
        colour = colours.get(name, "tab:orange")
        axes.barh(track, width_ms, left=1e3 * start_s, color=colour, edgecolor="white")

        # Only wide bars have room for a name
        if end_s - start_s > 0.03 * events[-1][3]:
            middle_ms = 500 * (start_s + end_s)
            style = {"ha": "center", "va": "center", "fontsize": 6, "rotation": 90}
            axes.text(middle_ms, track, name, **style)
    axes.set_title(f"predicted schedule, {rows[-1].arm if rows else ''} ranks")


def _draw_curves(what: str, axes: Any, report: Report) -> None:
    """Draw the best algorithm's step, or the efficiency, over the ranks."""
    curves: dict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
    for row in report.rows:
        if "topology" in row.extra:
            key = row.extra["topology"], row.extra["mode"]
            value = row.extra["step_ms"]["best"] if what == "step" else row.median
            curves[key].append((row.extra["ranks"], value))
    colours = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(name for name, _ in curves))}
    for (name, mode), points in curves.items():
        line = "-" if mode == "weak" else "--"
        axes.plot(*zip(*points, strict=True), line, color=colours[name], label=f"{name}, {mode}")
    axes.set_xscale("log", base=2)


class ScalingBenchmark(Benchmark):
    """Fit a model of the step time, check it at 3 and 4 ranks, and predict up to 4096."""

    numbers = (
        Number("rounds", "rounds of all steps", usual=7, few=2),
        Number("steps", "steps of a turn", usual=4),
        Number("global_batch", "sequences of strong scaling", 4096),
    )
    tables = (CHECK, OVERVIEW)
    figure = Figure(
        (
            Panel(
                partial(draw_steps, across=False),
                {
                    "title": "this machine: step, median and middle half",
                    "ylabel": "ms",
                    "ylim": (0, None),
                },
                {"fontsize": 8},
            ),
            Panel(_draw_schedule, {"xlabel": "ms"}, down=True),
            Panel(
                partial(_draw_curves, "step"),
                {
                    "title": "predicted step, best algorithm",
                    "xlabel": "ranks",
                    "ylabel": "ms",
                    "yscale": "log",
                },
            ),
            Panel(
                partial(_draw_curves, "efficiency"),
                {
                    "title": "predicted efficiency",
                    "xlabel": "ranks",
                    "ylabel": "%",
                    "ylim": (0, 105),
                },
                {"fontsize": 7},
            ),
        ),
        size=(11, 7.4),
        rows=2,
    )

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Add this benchmark's flags."""
        add_where_flags(parser)
        parser.add_argument(
            "--check",
            metavar="N,M",
            help="ranks at which the model is checked [one and two more: 3,4]",
        )
        parser.add_argument(
            "--topology",
            default="all",
            metavar="NAME|FILE",
            help="a preset of nanoray/config/topologies or a YAML file [all]",
        )
        parser.add_argument(
            "--model",
            default="gpt2-124m",
            help="preset whose size topologies with a peak run [gpt2-124m]",
        )

    def measure(self, args: argparse.Namespace, report: Report) -> None:
        """Fit, predict and measure; then predict the topologies."""
        where = where_from(args)
        if not args.workers:
            where = replace(where, workers=2)
        checks = _checks(args.check, where.workers)
        wanted = topology_names() if args.topology == "all" else [args.topology]
        topologies = {Path(name).stem: load_topology(name) for name in wanted}
        model = load_config(preset=args.model)

        # Fit what an all-reduce costs, at the base ranks
        with RankPool(where) as pool:
            describe(report, pool)
            link = _fit_backend(pool, report, args.quick)

        # Measure steps, at the base ranks and, if they fit on this machine, at more
        there = replace(where, threads=max(1, int(available_cpus()) // max(where.workers, *checks)))
        pools = {}
        for n in (where.workers, *checks):
            try:
                pools[n] = RankPool(replace(there, workers=n))
            except PlacementError as error:
                report.add(f"{n} ranks", MEASURED, "ms", (), skipped=str(error))
        turns = 1 if args.quick else TURNS
        here = MachineSteps(where.workers, load_config(preset=PRESET, overrides=PLAIN))
        with part(report, lambda: _compare(report, here, link)), ExitStack() as stack:
            # On this machine all of them live as long as it takes; a cluster may have room for one.
            living = {}
            if where.launcher == "processes":
                living = {n: stack.enter_context(pool) for n, pool in pools.items()}

            def pool_of(n: int) -> AbstractContextManager[RankPool]:
                return nullcontext(living[n]) if living else RankPool(replace(there, workers=n))

            here.measure(list(pools), pool_of, args.rounds, turns, args.steps)
        if not report.failures:
            _predict(args, report, topologies, link, model, here)

    def format_text(self, report: Report) -> list[str]:
        """Return the measured rows, then a line per topology, mode and algorithm."""
        measured = [row for row in report.rows if "topology" not in row.extra]
        return [*table(measured), "", *OVERVIEW.format_text(report)]


def _checks(text: str | None, base: int) -> list[int]:
    """Return the numbers of ranks at which the model is checked. Raises ConfigError."""
    if text is None:
        text = f"{base + 1},{base + 2}"
    checks = numbers_of(text, "check", "3,4", int)
    if base < 2 or min(checks) <= base:
        raise ConfigError(
            f"workers = {base}, check = {text}; fit at 2 ranks or more, and check at more than "
            "that: 3,4"
        )
    return checks


def _fit_backend(pool: RankPool, report: Report, quick: bool) -> Fit:
    """Measure the backend's all-reduce at the pool's ranks, and add the rows of the fitted link."""
    order: Record = {"algorithms": [BACKEND], "dtype": "float32", "iters": 5 if quick else 25}
    order["sizes"] = [1 << 10, 1 << 16, 1 << 22] if quick else [4**i << 10 for i in range(8)]
    points = []
    wrong = 0
    for event in pool.run(SWEEP, order):
        points.append((event["bytes"], 1e-6 * statistics.median(event["time_us"])))
        wrong += event["wrong"]
    ranks = len(pool.facts)
    link = fit(points, BACKEND, ranks)
    arm = f"fit {BACKEND}"
    alpha_us = 1e6 * link.alpha_s
    errors = [100 * abs(residual) for residual in link.residuals]
    note = f"{ranks} ranks, {link.smallest_bytes} .. {link.largest_bytes} bytes"
    report.add(arm, "alpha", "us", alpha_us, note, wrong=wrong, extra=asdict(link))
    report.add(arm, "beta", "us/MB", 1e12 * link.beta_s_per_byte)
    residual = report.add(arm, "residual", "%", errors, "one per size", extra={"points": points})
    say(f"{arm}  alpha {alpha_us:.1f} us  residual {number(residual.median)} %")
    return link


@dataclass
class MachineSteps:
    """The steps of this machine, round by round, and what they ran on."""

    base: int  # ranks whose compute and links are known
    config: Config
    cores: float = math.inf  # of all ranks together; no limit on GPUs
    threads: int = 1
    lanes: int = 1
    bucket_mb: float = 0.0  # of DDP
    # By sequences of a rank, one per round
    compute: dict[int, list[Record]] = field(default_factory=lambda: defaultdict(list))
    # By (ranks, sequences of each), seconds, one per round
    steps: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    cpu: Fit | None = None  # CPU seconds of an all-reduce on each rank

    @property
    def batch(self) -> int:
        """Sequences of each rank in weak scaling."""
        return self.config.global_batch_size // self.base

    def measure(
        self,
        ranks: Sequence[int],
        pool_of: Callable[[int], AbstractContextManager[RankPool]],
        rounds: int,
        turns: int,
        steps: int,
    ) -> None:
        """Measure compute at the base ranks, and steps at every number of ranks, in each round."""
        from nanoray.parallel.ddp import default_bucket_mb

        def run(n: int, function: str, order: Record) -> list[Record]:
            with pool_of(n) as pool:
                return list(pool.run(function, order))

        with pool_of(max(ranks)) as most:
            facts = most.facts
            self.lanes = LANES[most.backend]
        device = torch.device(facts[0]["device"])
        self.bucket_mb = default_bucket_mb(device)
        common = {"preset": PRESET, "micro": self.batch}
        if device.type == "cpu":
            self.cores = available_cpus() * len({fact["host"] for fact in facts})
            self.threads = facts[0]["threads"]
            calls = {"ops": ["all_reduce"], "sizes": CPU_BYTES, "calls": 10 * steps, "turns": turns}
            spent = [
                (event["nbytes"], event["cpu_s"])
                for event in run(self.base, COLLECTIVES, common | calls)
            ]
            self.cpu = fit(spent, "backend", self.base)

        # Sequences of each rank: as many as at the base (weak scaling), and where the total divides
        # evenly also a share of it (strong scaling)
        orders = {}
        for n in ranks:
            batches = [self.batch]
            if n != self.base and self.config.global_batch_size % n == 0:
                batches.append(self.config.global_batch_size // n)
            self.steps |= {(n, batch): [] for batch in batches}
            arms = {
                str(batch): self.config.model_copy(update=one_micro_batch(batch))
                for batch in batches
            }
            orders[n] = order_of(arms, turns, steps)

        cases = [(1, batch) for batch in sorted({batch for _, batch in self.steps})]
        compute = common | {"turns": max(1, turns // 2), "steps": steps, "cases": cases}
        for turn in range(rounds):
            # Compute before and after the steps: other load on the machine may begin in between.
            alone = run(self.base, COMPUTE, compute)
            for n in rotated(ranks, turn):
                for batch, step_s in fastest_turns(run(n, TIME_ENTRY, orders[n])).items():
                    self.steps[n, int(batch)].append(step_s)
                    say(f"round {turn}  {n} ranks x {batch} sequences  {1e3 * step_s:.1f} ms")
            alone += run(self.base, COMPUTE, compute)
            for _, micro in cases:
                turns_of = [event for event in alone if event["micro"] == micro]
                self.compute[micro].append(min(turns_of, key=seconds_of))

    def work(self, batch: int, turn: int | None = None) -> Work:
        """Return the compute of a rank with `batch` sequences: of a round, or of the median one."""
        rounds = self.compute[batch]
        if turn is None:
            rounds = sorted(rounds, key=seconds_of)
            turn = len(rounds) // 2
        forward_s, backward_s, update_s = (rounds[turn][part] for part in PARTS)
        passes = (forward_s / batch, backward_s / batch)
        return work_of(shape_of(self.config), self.bucket_mb, batch, *passes, update_s)

    def predict(self, ranks: int, batch: int, turn: int, link: Fit) -> SimulatedStep:
        """Simulate a step of `ranks` ranks from the compute measured in the same round."""
        return simulate(
            self.work(batch, turn).step(batch),
            lambda nbytes: cost_of(ranks, nbytes, link, self.cpu),
            self.lanes,
            self.cores / ranks,
            self.threads,
        )


def _compare(report: Report, here: MachineSteps, link: Fit) -> None:
    """Add predicted and measured steps with their error.

    Targets apply to more ranks than the model was fitted at.
    """
    if here.cpu:
        values = [100 * abs(r) for r in here.cpu.residuals]
        note = "CPU seconds of the backend's all-reduce, fitted in the same way"
        report.add("fit CPU", "residual", "%", values, note, extra=asdict(here.cpu))
    for (ranks, batch), found in here.steps.items():
        # A round that was interrupted may have steps, and no compute yet
        measured = found[: len(here.compute[batch])]
        if not measured:
            continue
        mode = "weak" if batch == here.batch else "strong"
        arm = f"{mode} {ranks}"
        plans = [here.predict(ranks, batch, turn, link) for turn in range(len(measured))]

        # The row keeps one schedule: that of the median step
        extra: Record = {"mode": mode, "ranks": ranks, "sequences": batch}
        middle = sorted(plans, key=lambda plan: plan.step_s)[len(plans) // 2]
        shares = {
            "exposed_ms": 1e3 * middle.exposed_s,
            "busy_ms": 1e3 * middle.busy_s,
            "events": middle.events,
        }
        exposed = f"{1e3 * middle.exposed_s:.1f} of {1e3 * middle.busy_s:.1f} ms exposed"
        note = f"{batch} sequences a rank; {exposed}"

        # Sizes outside of the fitted range
        for nbytes in sorted({bucket.nbytes for bucket in here.work(batch).buckets}):
            remark = link.outside(nbytes)
            if remark:
                note += f"; {remark}"

        notes = (f"{batch} sequences a rank", note)
        predicted = [plan.step_s for plan in plans]
        error = add_step_rows(report, arm, measured, predicted, notes, extra, shares)
        if ranks != here.base:
            add_error_target(report, error, f"{arm} ranks")


def _predict(
    args: argparse.Namespace,
    report: Report,
    topologies: dict[str, Topology],
    link: Fit,
    model: Config,
    here: MachineSteps,
) -> None:
    """Add a row of efficiency per topology, mode and number of ranks.

    Its extra keys hold the steps of every algorithm.
    """
    for name, given in topologies.items():
        topology = given.filled(link.link)
        # A topology with a peak runs the model of --model, one without it this machine's step
        if given.peak_tflops:
            work = model_work(model, given)
            preset = args.model
        else:
            work = here.work(here.batch)
            preset = PRESET
        what = f"{preset}, {work.micro} sequences a rank at once"
        compute_ms = 1e3 * (work.forward_s + work.backward_s) * work.micro
        report.conditions[name] = f"{given.note}; {what}, forward and backward {compute_ms:.1f} ms"
        largest = max(b.nbytes for b in work.buckets)
        for mode, total in (("weak", None), ("strong", args.global_batch)):
            points = {}
            for algorithm in ("best", *MODELS):
                points[algorithm] = scaling(topology, work, RANKS, algorithm, total)

            for i, point in enumerate(points["best"]):
                chosen = best(topology, point.ranks, largest)
                extra: Record = {"topology": name, "mode": mode, "algorithm": chosen}
                extra |= point._asdict()
                extra["step_ms"] = {
                    algorithm: 1e3 * own[i].step_s for algorithm, own in points.items()
                }
                arm = f"{name} {mode} {point.ranks}"
                percent = 100 * point.efficiency
                note = f"best: {chosen}"
                report.add(arm, "efficiency", "%", percent, note, extra=extra)
        say(f"predicted  {name}")

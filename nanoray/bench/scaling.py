"""`python -m nanoray.bench scaling`: fit what communication costs, predict steps, check them.

    fit        the backend's all-reduces at --workers ranks (2)          -> alpha and beta
    parts      forward, backward and optimizer there, without exchange   -> compute (step_parts.py)
    predict    the predicted step of DDP at 2, 3 and 4 ranks, next to the measured one, round by round
    topologies the same prediction from 1 to 16,384 ranks, on the links of nanoray/config/topologies

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
from typing import Any

import torch

from nanoray.bench.algorithms import BACKEND
from nanoray.bench.algorithms import ENTRY as SWEEP
from nanoray.bench.engine import TIME_ENTRY, order_of
from nanoray.bench.fit import Fit, fit
from nanoray.bench.harness.benchmark import Benchmark, Number, part
from nanoray.bench.harness.figure import Figure, Panel, with_values
from nanoray.bench.harness.rank_pool import RankPool, add_where_flags, describe, where_from
from nanoray.bench.harness.report import Record, Report, number, say
from nanoray.bench.harness.table import Table, TableColumn, names
from nanoray.bench.harness.trainings import numbers_of, rotated
from nanoray.bench.predicted import (
    MEASURED,
    PREDICTED,
    FittedLinks,
    OneAlgorithm,
    add_error_target,
    add_step_rows,
    draw_steps,
    percent_of_error,
    predict_step,
    speed_of,
)
from nanoray.bench.step_parts import (
    COLLECTIVES,
    COMPUTE,
    PLAIN,
    fastest_turns,
    one_micro_batch,
    seconds_of,
)
from nanoray.cli.forecast.links import (
    MODELS,
    Link,
    Topology,
    best,
    load_topology,
    topology_names,
)
from nanoray.cli.forecast.predict import Prediction, Speed
from nanoray.config import Config, load_config
from nanoray.config.layout import Layout
from nanoray.errors import ConfigError, PlacementError
from nanoray.machine.host import available_cpus
from nanoray.parallel.ddp import default_bucket_mb

THIS_MACHINE = "this-machine"  # a topology that is measured
PRESET = "shakespeare-cpu"  # whose step is measured
MODEL = "gpt2-124m"  # whose step is predicted on GPUs
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
        size=(13, 3.8),
    )

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Add this benchmark's flags."""
        add_where_flags(parser)
        parser.add_argument(
            "--check",
            metavar="N,M",
            help="ranks at which the model is checked [one and two more: 3,4]",
        )

    def measure(self, args: argparse.Namespace, report: Report) -> None:
        """Fit, predict and measure; then predict the topologies."""
        where = where_from(args)
        if not args.workers:
            where = replace(where, workers=2)
        checks = _checks(args.check, where.workers)
        topologies = {name: load_topology(name) for name in topology_names()}

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
            topologies[THIS_MACHINE] = this_machine(link.link)
            _predict(report, topologies, here, args.global_batch)


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
    device: str = "cpu"  # its kind
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

        def run(n: int, function: str, order: Record) -> list[Record]:
            with pool_of(n) as pool:
                return list(pool.run(function, order))

        with pool_of(max(ranks)) as most:
            facts = most.facts
        device = torch.device(facts[0]["device"])
        self.device = device.type
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

    def speed(self, batch: int, turn: int | None = None) -> Speed:
        """Return how fast a rank with `batch` sequences computes: in a round, or in the median one."""
        rounds = self.compute[batch]
        if turn is None:
            rounds = sorted(rounds, key=seconds_of)
            turn = len(rounds) // 2
        return speed_of(self.config, rounds[turn], batch)

    def predict(self, ranks: int, batch: int, turn: int, link: Fit) -> Prediction:
        """Predict a step of `ranks` ranks from the compute measured in the same round."""
        cpu = {"all_reduce": self.cpu} if self.cpu else {}
        network = FittedLinks({"all_reduce": link}, cpu)
        share = {"cores": self.cores / ranks, "threads": self.threads}
        speed = replace(self.speed(batch, turn), **share)
        return predict_step(self.config, Layout(dp=ranks), batch, network, speed, self.device)


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

        extra: Record = {"mode": mode, "ranks": ranks, "sequences": batch}
        middle = sorted(plans, key=lambda plan: plan.step_s)[len(plans) // 2]
        exposed_ms = 1e3 * middle.parts["dp"]
        note = f"{batch} sequences a rank; {exposed_ms:.1f} ms exposed"

        # Buckets outside of the fitted range
        remark = link.outside(round(default_bucket_mb(torch.device(here.device)) * 2**20))
        if remark:
            note += f"; {remark}"

        notes = (f"{batch} sequences a rank", note)
        predicted = [plan.step_s for plan in plans]
        of_prediction = {"exposed_ms": exposed_ms}
        error = add_step_rows(report, arm, measured, predicted, notes, extra, of_prediction)
        if ranks != here.base:
            add_error_target(report, error, f"{arm} ranks")


def this_machine(link: Link) -> Topology:
    """Return a topology of copies of this machine, one rank each, on links as fast as those here."""
    return Topology(
        note="copies of the machine at hand, one rank each, that talk as fast as its ranks talk to "
        "each other now",
        ranks_per_node=1,
        intra=link,
        inter=link,
    )


@dataclass(frozen=True)
class PredictedTraining:
    """The training of a model on equal nodes, as a dry run predicts it."""

    topology: Topology
    config: Config
    micro: int  # the most sequences of a rank at once
    speed: Speed
    device: str

    def step(self, ranks: int, sequences: int, algorithm: str) -> Prediction:
        """Predict a step of some ranks, which share these sequences."""
        # As many sequences at once as fit, and as divide a rank's own
        own = max(m for m in range(1, self.micro + 1) if sequences // ranks % m == 0)
        network = OneAlgorithm(self.topology, algorithm)
        layout = Layout(dp=ranks)
        return predict_step(self.config, layout, own, network, self.speed, self.device, sequences)


def _predict(
    report: Report, topologies: dict[str, Topology], here: MachineSteps, global_batch: int
) -> None:
    """Add a row of efficiency per topology, mode and number of ranks.

    Its extra keys hold the steps of every algorithm.
    """
    model = load_config(preset=MODEL)
    for name, topology in topologies.items():
        # A topology with a peak runs MODEL on GPUs, one without it this machine's step
        if topology.peak_tflops:
            preset, micro = MODEL, model.micro_batch_size or model.global_batch_size
            case = PredictedTraining(topology, model, micro, Speed.of(topology), "cuda")
        else:
            preset, micro = PRESET, here.batch
            case = PredictedTraining(topology, here.config, micro, here.speed(micro), here.device)
        bucket_mb = case.config.bucket_mb or default_bucket_mb(torch.device(case.device))
        bucket = round(bucket_mb * 2**20)

        alone_s = case.step(1, micro, "best").step_s
        what = f"{preset}, {micro} sequences a rank at once"
        report.conditions[name] = f"{topology.note}; {what}, alone in {1e3 * alone_s:.1f} ms"
        for mode, total in (("weak", None), ("strong", global_batch)):
            alone_s = case.step(1, total or micro, "best").step_s
            # In strong scaling all ranks share the batch, each at least a sequence
            for ranks in (n for n in RANKS if not total or total % n == 0):
                sequences = total or ranks * micro
                steps = {how: case.step(ranks, sequences, how) for how in ("best", *MODELS)}
                step = steps["best"]
                efficiency = alone_s / step.step_s / (ranks if total else 1)
                chosen = best(topology, ranks, bucket)
                extra: Record = {"topology": name, "mode": mode, "algorithm": chosen}
                extra |= {"ranks": ranks, "sequences": sequences // ranks, "step_s": step.step_s}
                extra |= {
                    "efficiency": efficiency,
                    "exposed_share": step.parts["dp"] / step.step_s,
                    "step_ms": {how: 1e3 * each.step_s for how, each in steps.items()},
                }
                arm = f"{name} {mode} {ranks}"
                note = f"best: {chosen}"
                report.add(arm, "efficiency", "%", 100 * efficiency, note, extra=extra)
        say(f"predicted  {name}")

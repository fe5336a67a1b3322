"""`python -m nanoray.bench scaling`: fit what communication costs, predict steps, check them.

    sweep      all-reduces of every algorithm at --workers ranks (2)     -> alpha and beta of each
    parts      forward, backward up to each bucket, optimizer, there     -> compute without waiting
    predict    the simulated step at 2, 3 and 4 ranks, next to the measured one, round by round; a round's value is the
               fastest of several turns, of parts and of steps: other load on the machine only adds time
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
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from nanoray.bench.harness.benchmark import Benchmark, Count, part
from nanoray.bench.harness.figure import Figure, Panel, with_values
from nanoray.bench.harness.rank_pool import RankPool, add_where_flags, describe, where_from
from nanoray.bench.harness.report import Emit, Record, Report, number, say, table
from nanoray.bench.harness.table import Table, TableColumn, names
from nanoray.bench.simulate import (
    MEASURED,
    PREDICTED,
    VOCAB,
    Work,
    add_error_target,
    add_step_rows,
    cost_of,
    draw_steps,
    model_work,
    percent_of_error,
    scaling,
)
from nanoray.config import Config, load_config
from nanoray.errors import ConfigError, PlacementError
from nanoray.forecast.fit import Fit, fit
from nanoray.forecast.links import LANES, MODELS, Topology, best, load_topology, topology_names
from nanoray.forecast.simulate import SimulatedBucket, SimulatedStep, Step, simulate
from nanoray.host.host import available_cpus
from nanoray.mesh.mesh import Mesh

STEP_ENTRY = "nanoray.bench.scaling:step_rank"
PRESET = "shakespeare-cpu"  # whose step is measured
SWEEP = ("backend", "ring", "tree", "double_tree", "recursive_doubling", "halving_doubling", "flat")
RANKS = [2**i for i in range(15)]
SHOWN = (1, 8, 64, 512, 4096, 16384)
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

    counts = (
        Count("rounds", "rounds of all steps", usual=7, few=2),
        Count("steps", "steps of a turn", usual=4, few=4),
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
            help="a preset of nanoray/topologies or a YAML file [all]",
        )
        parser.add_argument(
            "--model",
            default="gpt2-124m",
            help="preset whose size topologies with a peak run [gpt2-124m]",
        )
        parser.add_argument(
            "--compute_ms",
            type=float,
            help="forward and backward of its micro batch [from peak and MFU]",
        )
        parser.add_argument(
            "--global_batch", type=int, default=4096, help="sequences of strong scaling [4096]"
        )

    def measure(self, args: argparse.Namespace, report: Report) -> None:
        """Sweep, fit, predict and measure; then predict the topologies."""
        where = where_from(args)
        if where.launcher == "torchrun":
            raise ConfigError(
                "torchrun starts one number of ranks, this bench needs several; run it without torchrun"
            )
        if not args.workers:
            where = replace(where, workers=2)
        checks = _checks(args.check, where.workers)
        no_compute = args.compute_ms is not None and args.compute_ms <= 0
        if args.global_batch < 1 or no_compute:
            raise ConfigError(
                f"global_batch = {args.global_batch}, compute_ms = {args.compute_ms}; all must be "
                "above 0"
            )
        wanted = topology_names() if args.topology == "all" else [args.topology]
        topologies = {Path(name).stem: load_topology(name) for name in wanted}
        model = load_config(preset=args.model)

        # Fit what an all-reduce costs, at the base ranks
        with RankPool(where) as pool:
            describe(report, pool)
            fits = _sweep(pool, report, args.quick)

        # Measure steps, at the base ranks and, if they fit on this machine, at more
        try:
            most = RankPool(replace(where, workers=max(where.workers, *checks)))
        except PlacementError as error:
            for n in checks:
                report.add(f"{n} ranks", MEASURED, "ms", (), skipped=str(error))
            most = RankPool(where)
            checks = []
        turns = 1 if args.quick else TURNS
        here = _MachineSteps(where.workers, load_config(preset=PRESET).global_batch_size)
        with part(report, lambda: _compare(report, here, fits["backend"])), most as pool:
            _measure_steps(pool, here, checks, (args.rounds, turns, args.steps))
        if not report.failures:
            _predict(args, report, topologies, fits["backend"], model, here)

    def format_text(self, report: Report) -> list[str]:
        """Return the measured rows, then a line per topology, mode and algorithm."""
        measured = [row for row in report.rows if "topology" not in row.extra]
        return [*table(measured), "", *OVERVIEW.format_text(report)]


def _checks(text: str | None, base: int) -> list[int]:
    """Return the numbers of ranks at which the model is checked. Raises ConfigError."""
    if text is None:
        text = f"{base + 1},{base + 2}"
    try:
        checks = [int(part) for part in text.split(",")]
    except ValueError:
        checks = []
    if base < 2 or not checks or min(checks) <= base:
        raise ConfigError(
            f"workers = {base}, check = {text}; fit at 2 ranks or more, and check at more than "
            "that: 3,4"
        )
    return checks


def _sweep(pool: RankPool, report: Report, quick: bool) -> dict[str, Fit]:
    """Measure every all-reduce at the pool's ranks; add the rows of what could be fitted."""
    order: Record = {"algorithms": SWEEP, "dtype": "float32", "iters": 5 if quick else 25}
    order["sizes"] = [1 << 10, 1 << 16, 1 << 22] if quick else [4**i << 10 for i in range(8)]
    points: dict[str, list[tuple[int, float]]] = defaultdict(list)
    skipped = set[str]()
    wrong: dict[str, int] = defaultdict(int)
    for event in pool.run("nanoray.bench.algorithms:sweep_rank", order):
        name = event["algorithm"]
        if "skipped" in event:
            if name not in skipped:
                report.add(f"fit {name}", "alpha", "us", (), skipped=event["skipped"])
            skipped.add(name)
            continue
        points[name].append((event["bytes"], 1e-6 * statistics.median(event["time_us"])))
        wrong[name] += event["wrong"]
    ranks = len(pool.facts)
    fits = {name: fit(own, name, ranks) for name, own in points.items()}
    for name, fitted in fits.items():
        arm = f"fit {name}"
        alpha_us = 1e6 * fitted.alpha_s
        beta_us_per_mb = 1e12 * fitted.beta_s_per_byte
        errors = [100 * abs(residual) for residual in fitted.residuals]
        note = f"{ranks} ranks, {fitted.smallest_bytes} .. {fitted.largest_bytes} bytes"
        extra = asdict(fitted)
        report.add(arm, "alpha", "us", alpha_us, note, wrong=wrong[name], extra=extra)
        report.add(arm, "beta", "us/MB", beta_us_per_mb)
        sizes = {"points": points[name]}
        residual = report.add(arm, "residual", "%", errors, "one per size", extra=sizes)
        say(f"fit    {name:<19} alpha {alpha_us:.1f} us  residual {number(residual.median)} %")
    return fits


@dataclass
class _MachineSteps:
    """The steps of this machine, round by round, and what they ran on."""

    base: int  # ranks whose parts and links are known
    total: int  # sequences of strong scaling, all ranks together
    cores: float = math.inf  # of all ranks together; no limit on GPUs
    threads: int = 1
    lanes: int = 1
    # (ranks, sequences of each, silent) -> one per round
    steps: dict[tuple[int, int, bool], list[Record]] = field(
        default_factory=lambda: defaultdict(list)
    )
    cpu: Fit | None = None  # CPU seconds of an all-reduce on each rank

    @property
    def batch(self) -> int:
        """Sequences of each rank in weak scaling."""
        return self.total // self.base

    def predict(self, ranks: int, batch: int, turn: int, link: Fit) -> SimulatedStep:
        """Simulate a step of `ranks` ranks from the parts measured in the same round."""
        parts = self.steps[self.base, batch, True][turn]

        return simulate(
            _step(parts),
            lambda nbytes: cost_of(ranks, nbytes, link, self.cpu),
            self.lanes,
            self.cores / ranks,
            self.threads,
        )

    def work(self) -> Work:
        """Return the median step of weak scaling as compute per sequence."""
        rounds = sorted(self.steps[self.base, self.batch, True], key=lambda parts: parts["step_s"])
        step = _step(rounds[len(rounds) // 2])
        buckets = tuple(SimulatedBucket(b.ready_s / self.batch, b.nbytes) for b in step.buckets)
        return Work(
            step.forward_s / self.batch,
            step.backward_s / self.batch,
            step.optimizer_s,
            buckets,
            self.batch,
        )


def _step(parts: Record) -> Step:
    buckets = tuple(map(SimulatedBucket, parts["ready_s"], parts["nbytes"]))
    return Step(parts["forward_s"], parts["backward_s"], parts["optimizer_s"], buckets)


def _measure_steps(
    pool: RankPool, here: _MachineSteps, checks: list[int], counts: tuple[int, int, int]
) -> None:
    """Measure the parts at the base ranks, and whole steps at every number of ranks.

    `counts`: rounds, turns of each, steps.
    """
    from nanoray.models.gpt import ModelShape

    config = load_config(preset=PRESET)
    base = here.base
    on_cpu = pool.facts[0]["device"] == "cpu"
    cores = available_cpus() * len({f["host"] for f in pool.facts})
    here.lanes = LANES[pool.backend]
    if on_cpu:
        here.cores = cores
        here.threads = max(1, int(cores) // len(pool.facts))

    # Sequences of each rank, by the number of ranks: as many as at the base (weak scaling), and
    # where the total divides evenly also a share of it (strong scaling)
    batches = {base: [here.batch]}
    for n in checks:
        batches[n] = [here.batch]
        if here.total % n == 0:
            batches[n].append(here.total // n)

    # The parts of a step are measured by silent arms at the base ranks, one for every batch
    all_batches = sorted({batch for own in batches.values() for batch in own})
    arms = [(base, batch, True) for batch in all_batches]
    arms += [(n, batch, False) for n, own in batches.items() for batch in own]
    rounds, turns, steps = counts
    order = {
        "arms": arms,
        "base": base,
        "threads": here.threads,
        "rounds": rounds,
        "turns": turns,
        "steps": steps,
        "shape": ModelShape.of(config, VOCAB[config.tokenizer]).to_dict(),
        "cpu_bytes": [1 << 12, 1 << 18, 1 << 22] if on_cpu else [],
        "cpu_calls": 10 * steps,
    }
    spent = []
    for event in pool.run(STEP_ENTRY, order):
        if "cpu_s" in event:
            spent.append((event["nbytes"], event["cpu_s"]))
            continue
        if spent and here.cpu is None:  # all of them come before the first step
            here.cpu = fit(spent, "backend", base)
        arm = event["ranks"], event["batch"], event["silent"]
        events = here.steps[arm]
        events.append(event)
        if len(events) == rounds:
            median_ms = 1e3 * statistics.median(event["step_s"] for event in events)
            kind = "parts" if event["silent"] else "step "
            ranks = f"{event['ranks']} ranks x {event['batch']} sequences"
            say(f"{kind}  {ranks}  {median_ms:.1f} ms")


def _compare(report: Report, here: _MachineSteps, link: Fit) -> None:
    """Add predicted and measured steps with their error.

    Targets apply to more ranks than the model was fitted at.
    """
    if here.cpu:
        values = [100 * abs(r) for r in here.cpu.residuals]
        note = "CPU seconds of the backend's all-reduce, fitted in the same way"
        report.add("fit CPU", "residual", "%", values, note, extra=asdict(here.cpu))
    for (ranks, batch, silent), events in here.steps.items():
        if silent:
            continue
        mode = "weak" if batch == here.batch else "strong"
        arm = f"{mode} {ranks}"
        measured = [event["step_s"] for event in events]
        plans = [here.predict(ranks, batch, turn, link) for turn in range(len(events))]

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

        # Sizes outside of the fitted range; only a silent arm records the sizes of its buckets
        for nbytes in sorted(set(here.steps[here.base, batch, True][0]["nbytes"])):
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
    here: _MachineSteps,
) -> None:
    """Add a row of efficiency per topology, mode and number of ranks.

    Its extra keys hold the steps of every algorithm.
    """
    for name, given in topologies.items():
        topology = given.filled(link.link)
        # A topology with a peak runs the model of --model, one without it this machine's step
        if given.peak_tflops:
            work = model_work(model, given, args.compute_ms)
            preset = args.model
        else:
            work = here.work()
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


# The ranks' side.


def step_rank(mesh: Mesh, order: Record, emit: Emit) -> None:
    """Run rounds of the arms [ranks, batch, silent]. (all ranks)

    Emits the CPU time of communication, then the times of each arm. A round is several turns of all
    arms, and the fastest turn of each counts: other load on the machine only adds time.

    The first `ranks` ranks run an arm in a group of their own while the others wait. A silent arm
    is DDP with a hook that exchanges nothing: it shows compute, and when each bucket is ready.
    """
    import torch
    import torch.distributed as dist

    torch.set_num_threads(order["threads"])
    arms = [tuple(arm) for arm in order["arms"]]
    groups = {n: dist.new_group(range(n)) for n in sorted({n for n, _, _ in arms})}
    own_arms = {}
    for ranks, batch, silent in arms:
        if mesh.rank < ranks:
            group = groups[ranks]
            own_arms[ranks, batch, silent] = _Arm(mesh, order["shape"], group, batch, silent)

    # CPU seconds of an all-reduce at the base ranks: cores that training cannot use meanwhile
    for nbytes in order["cpu_bytes"]:
        spent = None
        if mesh.rank < order["base"]:
            tensor = torch.zeros(nbytes // 4)
            start = time.process_time()
            for _ in range(order["cpu_calls"]):
                dist.all_reduce(tensor, group=groups[order["base"]])
            spent = (time.process_time() - start) / order["cpu_calls"]
        values = [cpu_s for cpu_s in mesh.gather(spent) or [] if cpu_s is not None]
        if mesh.rank == 0:
            emit({"nbytes": nbytes, "cpu_s": statistics.fmean(values)})

    # Steps: of each round the fastest turn counts
    for _ in range(order["rounds"]):
        fastest: dict[Any, Record] = {}
        for _ in range(order["turns"]):
            for arm in arms:
                mesh.barrier()
                own_times = None
                if arm in own_arms:
                    own_times = own_arms[arm].run(order["steps"])
                everyone = mesh.gather(own_times)
                if everyone is None:
                    continue  # not rank 0
                ranks, batch, silent = arm
                turn = {"ranks": ranks, "batch": batch, "silent": silent}
                turn |= _across([times for times in everyone if times])
                if arm not in fastest or turn["step_s"] < fastest[arm]["step_s"]:
                    fastest[arm] = turn
        for event in fastest.values():
            emit(event)


def _across(ranks: list[Record]) -> Record:
    """Join the times of the ranks: the slowest step, and the mean of each part."""
    joined: Record = {}
    for key in ("forward_s", "backward_s", "optimizer_s"):
        joined[key] = statistics.fmean(times[key] for times in ranks)
    by_bucket = zip(*(times["ready_s"] for times in ranks), strict=True)
    joined["ready_s"] = [statistics.fmean(moments) for moments in by_bucket]
    joined["nbytes"] = ranks[0]["nbytes"]
    joined["step_s"] = max(times["step_s"] for times in ranks)
    return joined


class _Arm:
    """A model under DDP that runs steps and times their parts.

    Losses mean nothing here: the tokens are random.
    """

    def __init__(self, mesh: Mesh, shape: Record, group: Any, batch: int, silent: bool) -> None:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        from nanoray.models.gpt import GPT, ModelShape
        from nanoray.parallel.ddp import default_bucket_mb

        torch.manual_seed(0)
        self.device = mesh.device
        self.ready = list[tuple[Any, int]]()
        size = ModelShape(**shape)
        self.model = DistributedDataParallel(
            GPT(size).to(mesh.device),
            device_ids=[mesh.device.index] if mesh.device.type == "cuda" else None,
            process_group=group,
            bucket_cap_mb=default_bucket_mb(mesh.device),
            gradient_as_bucket_view=True,
        )
        if silent:
            self.model.register_comm_hook(
                group.size(), lambda ranks, bucket: self._stay_silent(ranks, bucket)
            )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        tokens = (batch, size.block_size)
        self.tokens = torch.randint(size.vocab_size, tokens, device=mesh.device)  # (B, T)
        self.run(1)  # after its first backward DDP regroups its buckets
        self.run(2)  # memory and caches settle

    def _stay_silent(self, ranks: int, bucket: Any) -> Any:
        import torch

        buffer = bucket.buffer().div_(ranks)  # as DDP does, when it has no hook
        self.ready.append((self._mark(), buffer.nbytes))
        devices: list[Any] = [self.device] if self.device.type == "cuda" else []
        future: Any = torch.futures.Future(devices=devices)
        future.set_result(buffer)
        return future

    def _mark(self) -> Any:
        """Return a moment: of the clock, or of the GPU's stream, which the host runs ahead of."""
        import torch

        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def run(self, steps: int) -> Record:
        """Run steps; return the median step and the medians of its parts.

        The moments of buckets count from the end of forward.
        """
        import torch

        # Per step: start, end of forward, each bucket ready, end of backward, end
        moments: list[list[Any]] = []
        for _ in range(steps):
            self.ready = []
            start = self._mark()
            loss = self.model(self.tokens, self.tokens)
            forward = self._mark()
            loss.backward()
            backward = self._mark()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            moments.append([start, forward, *(at for at, _ in self.ready), backward, self._mark()])
        if self.device.type == "cuda":
            torch.cuda.synchronize()

        # The median of every span between two moments; backward's spans end at the buckets
        spans = [[_seconds(begin, end) for begin, end in pairwise(step)] for step in moments]
        medians = [statistics.median(part) for part in zip(*spans, strict=True)]
        forward_s, *backward_spans, optimizer_s = medians
        ends = list(accumulate(backward_spans))
        return {
            "forward_s": forward_s,
            "ready_s": ends[:-1],
            "backward_s": ends[-1],
            "optimizer_s": optimizer_s,
            "nbytes": [nbytes for _, nbytes in self.ready],
            "step_s": statistics.median(_seconds(step[0], step[-1]) for step in moments),
        }


def _seconds(start: Any, end: Any) -> float:
    if isinstance(start, float):
        return end - start
    return start.elapsed_time(end) / 1e3  # CUDA events, in milliseconds

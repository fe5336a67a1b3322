"""`python -m nanoray.bench mig`: what the MIG slices of a card promise, and what they deliver.

    bandwidth   one slice with an eighth of the memory against one with two: how much of a step is bandwidth?
    slices      1 to 7 equal slices of one card, one rank on each: n times the throughput of one would be ideal
    backend     two slices of one card over gloo, and over NCCL where the NCCL in force allows it
    whole       a whole card against its slices, where both exist

Every arm times training steps of a preset's GPT under DDP, copies in the device's memory, and an
all-reduce. Without slices each arm says why it is not run, and a stand-in runs: ranks that share
one plain GPU, or the CPU. That shows what sharing costs, and nothing about the isolation of MIG.
`nanoray check mig` plans slices, shows those that are there, and prints the commands that make them.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

from nanoray.bench import collectives
from nanoray.bench.engine import BITS, STEP, each, order_of
from nanoray.bench.engine import TIME_ENTRY as ENTRY
from nanoray.bench.harness.benchmark import Benchmark, Number
from nanoray.bench.harness.figure import Figure, Panel, dots, measured, with_values
from nanoray.bench.harness.rank_pool import RankFailed, RankPool, Where
from nanoray.bench.harness.report import Measurement, Record, Report, say
from nanoray.bench.harness.table import Table, TableColumn, names
from nanoray.bench.harness.trainings import SEE_FAILED
from nanoray.cli.mig import CARDS, peak_text, peaks, plan
from nanoray.config import Config, load_config
from nanoray.errors import ConfigError
from nanoray.machine.device import Device
from nanoray.machine.environment import environment
from nanoray.machine.gpus import discover_gpus
from nanoray.machine.host import available_cpus
from nanoray.machine.metrics import algbw_gbps, busbw_factor
from nanoray.machine.slots import local_slots
from nanoray.parallel.rendezvous import RankDevice, choose_backend, runtime_nccl_version

MAX_SLICES = 7
THROUGHPUT = "throughput"
OF_FLOPS = "of peak FLOP/s"
OF_BANDWIDTH = "of peak bandwidth"


@dataclass(frozen=True)
class Experiment:
    """One line of the experiment matrix: ranks on devices, or why it is not run."""

    experiment: str
    name: str
    ranks: int
    devices: tuple[Device, ...] = ()  # of one kind: one per rank, or one that all share; none: CPU
    backend: str = "auto"
    skipped: str = ""

    @property
    def extra(self) -> Record:
        """Return the keys that its rows have in the JSON file."""
        keys: Record = {
            "experiment": self.experiment,
            "ranks": self.ranks,
            "uuids": [device.uuid for device in self.devices],
        }
        if self.devices:
            keys["profile"] = self.devices[0].profile
            keys |= peaks(self.devices[0])
        return keys


def matrix(
    card: str, found: list[Device], most: int, nccl: tuple[int, int, int] | None
) -> list[Experiment]:
    """Return the experiments with up to `most` ranks on slices of `card`.

    The slices of one arm lie on one card. The series of slices takes the profile of which one card
    has the most.
    """
    single, double = (part.slice.profile for part in plan(card)[:2])
    slices = [d for d in found if d.kind == "mig" and d.name.startswith(f"{card} MIG ")]

    # One slice of the smallest profile, and one of the profile with twice its bandwidth
    arms = [_on_slices("bandwidth", slices, 1, profile) for profile in (single, double)]

    # 1, 2, ... equal slices; one of these two profiles is measured already
    commonest = Counter((d.parent_uuid, d.profile) for d in slices).most_common(1)
    series = commonest[0][0][1] if commonest else single
    first = 2 if series in (single, double) else 1
    for ranks in range(first, most + 1):
        arms.append(_on_slices("slices", slices, ranks, series))

    for backend in ("gloo", "nccl"):
        arms.append(_over(backend, _on_slices("backend", slices, 2, series), nccl))
    arms = [arm for arm in arms if arm.ranks <= most]

    whole = tuple(d for d in found if (d.kind, d.name, d.mig_mode) == ("cuda", card, False))[:1]
    missing = ""
    if not whole or not slices:
        missing = f"needs a whole {card}, out of MIG mode, beside the slices of another"
    arms.append(Experiment("whole", f"whole {card}", 1, whole, skipped=missing))
    return arms


def _on_slices(experiment: str, slices: list[Device], ranks: int, profile: str) -> Experiment:
    """Return the arm of `ranks` slices of a profile, on the card that has the most of them."""
    equal = [d for d in slices if d.profile == profile]
    card = Counter(d.parent_uuid for d in equal).most_common(1)
    on_card = [d for d in equal if d.parent_uuid == card[0][0]]
    missing = ""
    if len(on_card) < ranks:
        missing = f"needs {ranks} × {profile} on one card, found {len(on_card)}"
    return Experiment(
        experiment, f"{ranks} × {profile}", ranks, tuple(on_card[:ranks]), skipped=missing
    )


def _over(backend: str, arm: Experiment, nccl: tuple[int, int, int] | None) -> Experiment:
    """Return the arm with a backend, skipped if that refuses two slices of one card."""
    refused = arm.skipped
    try:
        choose_backend([RankDevice("mig", "", "")] * 2, backend, nccl)
    except ConfigError as error:
        refused = "; ".join(filter(None, (refused, str(error))))
    return Experiment(
        arm.experiment, f"{arm.name} over {backend}", arm.ranks, arm.devices, backend, refused
    )


# How it is shown.


def _series(report: Report) -> list[Measurement]:
    """Return the throughput of 1, 2, ... ranks: of the stand-in, or of equal slices of one card."""
    by_experiment: dict[str, list[Measurement]] = defaultdict(list)
    for row in with_values(report, THROUGHPUT):
        by_experiment[row.extra["experiment"]].append(row)
    if by_experiment["stand-in"]:
        return by_experiment["stand-in"]

    # The experiment "bandwidth" may have measured one slice of the series' profile
    profiles = {row.extra["profile"] for row in by_experiment["slices"]}
    rows = by_experiment["bandwidth"] + by_experiment["slices"]
    return [row for row in rows if row.extra["profile"] in profiles]


def ideal(row: Measurement) -> int:
    """Return the ideal throughput relative to one rank: slices add up, sharers do not."""
    return 1 if row.extra["experiment"] == "stand-in" else row.extra["ranks"]


def _draw_series(axes: Any, report: Report) -> None:
    """Draw throughput over ranks, beside the ideal that follows from the first row."""
    series = _series(report)
    if not series:
        return
    first = series[0]
    ranks = [row.extra["ranks"] for row in series]
    dots(axes, ranks, series, quartiles=False, fmt="-o", capsize=3, label="measured, median")
    best = [first.median * ideal(row) / ideal(first) for row in series]
    axes.plot(ranks, best, "--", color="0.5", label="ideal, from the first")

    title = f"slices {first.extra.get('profile')} of one {report.conditions['card']}"
    shared = report.conditions.get("stand-in")
    if shared:
        title = f"stand-in:\n{shared}"
    axes.set_title(title, fontsize=9)
    axes.set(xlabel=f"ranks (a device: {peak_text(first.extra)})", ylabel="tok/s of all ranks")
    axes.set(xticks=ranks)
    axes.set_ylim(bottom=0)


def _arms_of(report: Report) -> list[str]:
    """Return the arms that ran: a line each on a page; what was planned stands in the rows."""
    rows = (row for row in report.rows if row.metric == THROUGHPUT and row.unit == "tok/s")
    return [row.arm for row in rows if not row.skipped]


class MIGBenchmark(Benchmark):
    """Show the MIG slices of this machine, and what they gain."""

    # Wrong: ranks whose weights are not finite or not rank 0's; of all_reduce, elements that are not exact
    numbers = (Number("timeout_s", "seconds of silence after which ranks have failed", 600.0),)
    shows_rows = True
    tables = (
        Table(
            _arms_of,
            (
                names("ranks"),
                TableColumn("tok/s", THROUGHPUT),
                TableColumn("step, ms", STEP),
                TableColumn("% of peak FLOP/s", OF_FLOPS),
                TableColumn("copy, GB/s", collectives.COPY),
            ),
            missing="–",
        ),
    )
    figure = Figure(
        (Panel(_draw_series, legend={"fontsize": 8}),),
        size=(6, 4),
    )

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Add this benchmark's flags."""
        parser.add_argument(
            "--workers",
            type=int,
            metavar="N",
            help="at most N ranks [7; on CPU 4 to 7; with --quick 2]",
        )
        parser.add_argument(
            "--device",
            default="auto",
            choices=("auto", "mig", "cuda", "cpu"),
            help="what to run on [auto]",
        )
        parser.add_argument(
            "--preset",
            help="whose GPT to train, global_batch_size per rank [shakespeare-char; CPU: tiny]",
        )

    def measure(self, args: argparse.Namespace, report: Report) -> None:
        """Run what this machine can run, and say why the rest is not run."""
        if args.workers is not None and args.workers < 1:
            raise ConfigError(f"workers = {args.workers}; give 1 or more")

        # What is here: slices, or a device (none: the CPU) that ranks share in place of slices
        found = discover_gpus()
        cpus = available_cpus()
        slots = local_slots(args.device, None, found, cpus)  # refuses a device that is not there
        slices = []
        if args.device in ("auto", "mig"):
            slices = [d for d in found if d.kind == "mig"]
        card = _card(slices, found)
        shared = () if slices else slots.devices[:1]
        on_cpu = not (slices or shared)

        # How many ranks
        if args.workers:
            most = args.workers
        elif args.quick:
            most = 2
        elif on_cpu:
            most = min(MAX_SLICES, max(4, int(cpus)))
        else:
            most = MAX_SLICES
        if on_cpu:
            local_slots("cpu", most, [], cpus)  # refuses more ranks than the CPUs can run

        # What they train
        default = "tiny" if on_cpu else "shakespeare-char"
        preset = args.preset or default
        bf16 = not on_cpu and all(d.bf16 for d in (*slices, *shared))
        config = load_config(preset=preset, overrides={"precision": "bf16" if bf16 else "fp32"})
        report.conditions["recipe"] = (
            f"preset {preset}, {config.precision}, {config.global_batch_size} sequences per rank"
        )
        nccl = runtime_nccl_version()
        report.conditions["card"] = card
        report.conditions["slices"] = [f"{d.profile or d.name} {d.uuid}" for d in slices]

        # Without slices the matrix shows what it would run, and ranks that share a device stand in
        if slices:
            arms = matrix(card, found, most, nccl)
        else:
            arms = matrix(card, [], MAX_SLICES, nccl)
            what = shared[0].name if shared else f"{cpus:g} CPU cores"
            report.conditions["stand-in"] = (
                f"1 to {most} ranks share {what}, which MIG would keep apart"
            )
            for ranks in range(1, most + 1):
                name = f"stand-in: {ranks} rank(s) share {what}"
                arms.append(Experiment("stand-in", name, ranks, shared))

        for arm in arms:
            blank = (arm.name, THROUGHPUT, "tok/s", ())
            if arm.skipped:
                report.add(*blank, skipped=arm.skipped, extra=arm.extra)
                continue
            try:
                _run(arm, args, report, config)
            except RankFailed as error:
                report.failures.append(f"{arm.name}: {error}")
                report.add(*blank, error=SEE_FAILED, extra=arm.extra)
            say(f"{arm.name}  {report.cell(arm.name, THROUGHPUT, 'none')} tok/s")
        _compare(report)


def _card(slices: list[Device], found: list[Device]) -> str:
    """Return the card of the slices, else one that is here, else one to show what would be run.

    Raises ConfigError for slices of a card that is not known.
    """
    names = [d.name.partition(" MIG ")[0] for d in slices or found]
    card = next((name for name in names if slices or name in CARDS), "NVIDIA H200")
    if card not in CARDS:
        raise ConfigError(
            f"the slices here are of {card}, which is not known; known: {', '.join(CARDS)}"
        )
    return card


def time_steps(pool: RankPool, config: Config, blocks: int, block_s: float) -> Record:
    """Time blocks of steps in which each rank has `global_batch_size` sequences.

    `wrong`: the ranks whose weights are not rank 0's after the last step, or all where the loss is not
    finite.
    """
    sizes = {"micro_batch_size": config.global_batch_size, "grad_accum_steps": 1}
    own = config.model_copy(update=sizes | {"global_batch_size": 0})

    def run(blocks: int, steps: int) -> list[Record]:
        # The first block has the first step, in which buckets, caches and clocks settle.
        order = order_of({STEP: own}, 1 + blocks, steps, [BITS])
        return [event for event in pool.run(ENTRY, order) if "arm" in event][1:]

    (trial,) = run(1, 2)
    events = run(blocks, max(2, round(1e3 * block_s / trial["step_ms"])))
    digests = events[-1]["digests"]
    wrong = sum(digest != digests[0] for digest in digests)
    if not math.isfinite(events[-1]["losses"][-1]):
        wrong = len(digests)
    return {"step_ms": each(events, "step_ms"), "sms": pool.facts[0]["sms"], "wrong": wrong}


def _run(arm: Experiment, args: argparse.Namespace, report: Report, config: Config) -> None:
    """Run one arm and add its rows. Raises RankFailed."""
    devices = len(arm.devices)
    kind = arm.devices[0].kind if devices else "cpu"
    shared = 0 < devices < arm.ranks
    where = Where(
        arm.ranks, "processes", kind, arm.backend, timeout_s=args.timeout_s, shared=shared
    )
    blocks = 3 if args.quick else 7
    block_s = 0.2 if args.quick else 1.0
    reduce = {
        "ops": ["all_reduce"] if arm.ranks > 1 else [],
        "dtypes": ["float32"],
        "sizes": [1 << 22],
        "rounds": blocks,
        "budget_s": block_s,
        "timeout_s": args.timeout_s,
        "sharing": [arm.ranks // max(1, devices)] * arm.ranks,
    }
    # Only the arm's devices are visible, because a pool takes the first that it finds
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(d.uuid for d in arm.devices)}
    with environment(visible), RankPool(where) as pool:
        events = [time_steps(pool, config, blocks, block_s), *pool.run(collectives.ENTRY, reduce)]
        backend = {"backend": pool.backend, "backend_reason": pool.backend_reason}
        add_rows(report, arm, config, events, backend)


def add_rows(
    report: Report,
    arm: Experiment,
    config: Config,
    events: list[Record],
    backend: dict[str, str],
) -> None:
    """Add the rows of one arm: steps, copies, all-reduces.

    A share of the peak is one of the peak of its slices.
    """
    from nanoray.bench.predicted import shape_of
    from nanoray.models.costs import flops_per_token

    timed, copied, *reduced = events
    extra = arm.extra | {"sms": timed["sms"]} | backend

    def add(metric: str, unit: str, values: list[float], note: str = "", **more: Any) -> None:
        keys = {"extra": extra} | more
        report.add(arm.name, metric, unit, values, note, **keys)

    tokens = arm.ranks * config.global_batch_size * config.block_size
    rates = [1e3 * tokens / ms for ms in timed["step_ms"]]
    reason = f"{backend['backend']}: {backend['backend_reason']}"
    add(STEP, "ms", timed["step_ms"], reason, wrong=timed["wrong"])
    note = "of all ranks"
    if timed["sms"]:
        note += f", {timed['sms']} SMs per rank"
    add(THROUGHPUT, "tok/s", rates, note)
    note = "copied per rank while all copy, slowest rank"
    add(collectives.COPY, "GB/s", copied["copy_gbps"], note)

    # Shares of the peaks: compute by the model's operations, bandwidth by the copies
    if "peak_gbps" in extra:
        flops = flops_per_token(shape_of(config))
        peak = 1e12 * extra["peak_tflops"] * len(arm.devices)
        add(OF_FLOPS, "%", [100 * rate * flops / peak for rate in rates], peak_text(extra))
        sharers = arm.ranks / len(arm.devices)
        used = [100 * 2 * gbps * sharers / extra["peak_gbps"] for gbps in copied["copy_gbps"]]
        add(OF_BANDWIDTH, "%", used, "of those copies, read and written")
    for event in reduced:
        factor = busbw_factor("all_reduce", arm.ranks) or 1.0
        size = event["bytes"]
        busbw = [factor * algbw_gbps(size, us / 1e6) for us in event.get("pipelined_us", [])]
        if busbw:
            blocking = f"busbw; one blocking call {statistics.median(event['blocking_us']):.0f} us"
        else:
            blocking = ""
        result = {key: event[key] for key in ("wrong", "skipped", "error") if key in event}
        keys = {"op": "all_reduce", "dtype": event["dtype"], "bytes": size}
        add(
            f"all_reduce of {size >> 20} MiB", "GB/s", busbw, blocking, **result, extra=extra | keys
        )


def _compare(report: Report) -> None:
    """Add the ratios that the experiments are for, with what they would ideally be."""
    series = _series(report)
    card = report.conditions["card"]
    single, double = (f"1 × {p.slice.profile}" for p in plan(card)[:2])
    pairs = []
    for row in series[1:]:
        note = f"{ideal(row)} if sharing costs nothing, and one rank leaves nothing idle"
        pairs.append((row.arm, series[0].arm, THROUGHPUT, note))
    for row in series[-1:]:
        pairs.append((row.arm, f"whole {card}", THROUGHPUT, ""))
    note = "1: compute is the limit, 2: bandwidth; mind the SMs of both"
    pairs.append((double, single, THROUGHPUT, note))
    pairs.append((double, single, collectives.COPY, "ideal: 2"))
    for upper, lower, metric, note in pairs:
        if len(measured(report, (upper, lower), metric)) == 2:
            report.compare(upper, lower, metric, note)

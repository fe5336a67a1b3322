"""`python -m nanoray.bench layouts strategies`: time, memory and communication of each mode.

DDP, DDP by hand, ZeRO-1, ZeRO-2 and FSDP, each with and without activation checkpointing, ZeRO and
FSDP in two groups of ranks (hybrid sharding), DDP by hand with gradients in 16 bits, context, tensor and
pipeline parallelism, train one model on the same batches; the same model with experts in place of
its MLPs is trained with and without expert parallelism. Times: every round runs a few steps of
each arm in turn, on ranks that hold them all, so a slow minute of the machine hits all arms;
communication comes from one more step of each round, traced. Memory: fresh ranks for every arm,
beside what the formulas of `nanoray.cli.forecast.memory` and `nanoray.models.costs` say.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from nanoray.bench.engine import (
    BUSY,
    COMMUNICATION,
    EXPOSED,
    MEMORY_ENTRY,
    STEP,
    TIME_ENTRY,
    Found,
    collect,
    each,
    note_of_sent,
    order_of,
)
from nanoray.bench.harness.benchmark import Benchmark, Number, ranks_for
from nanoray.bench.harness.figure import Figure, Panel, dots, measured, with_values
from nanoray.bench.harness.rank_pool import (
    RankFailed,
    RankPool,
    add_where_flags,
    where_from,
)
from nanoray.bench.harness.ranks import Where
from nanoray.bench.harness.report import Record, Report, say
from nanoray.bench.harness.table import SPREAD, Table, TableColumn, names
from nanoray.bench.harness.trainings import add_arms_flag, add_settings_flag, chosen, settings_of
from nanoray.config import Config, load_config, resolve_batch
from nanoray.config.layout import Layout
from nanoray.config.mesh import CUTS_MODEL, IN_REPLICA

MODES: dict[str, Record] = {
    mode: {"dp_mode": mode} for mode in ("ddp", "ddp_by_hand", "zero1", "zero2")
}
MODES |= {f"fsdp {how}": {"dp_mode": "fsdp", "fsdp_reshard": how} for how in ("full", "grad_op")}
# In a run --mirror decides; here a mode without the word mirrors nothing, to compare.
DATA_ARMS = MODES | {
    f"{mode} mirrored": MODES[mode] | {"mirrored": True} for mode in ("zero1", "zero2", "fsdp full")
}
# Hybrid sharding: two groups of ranks that each hold the whole state, and shard it
HYBRID: dict[str, Record] = {
    f"{mode} hybrid": MODES[mode] | {"replicas": 2} for mode in ("zero1", "zero2", "fsdp full")
}
# Gradients in 16 bits; their losses are others by design
COMPRESSED: dict[str, Record] = {
    f"ddp_by_hand in {kind}": MODES["ddp_by_hand"] | {"grad_compress": kind}
    for kind in ("bf16", "fp16")
}
EXPERTS = "experts"
_EXPERTS = {"dp_mode": "ddp_by_hand", "experts": 4}
AXES: dict[str, Record] = {
    "cp 2": {"cp": 2},
    "cp 2 zero1": {"cp": 2, "dp_mode": "zero1"},
    "cp 4": {"cp": 4},
    "cp 2 tp 2": {"cp": 2, "tp": 2},
    "cp 2 pp 2": {"cp": 2, "pp": 2, "dp_mode": "ddp_by_hand"},
    "tp 2": {"tp": 2},
    "tp 2 sequence": {"tp": 2, "sequence_parallel": True},
    "pp 2": {"dp_mode": "ddp_by_hand", "pp": 2},
    EXPERTS: _EXPERTS,
    f"{EXPERTS} ep 2": _EXPERTS | {"ep": 2},
}
ARMS = DATA_ARMS | HYBRID | COMPRESSED | AXES
P95 = "p95 step"
SAMPLES = "samples"
TOKENS = "tokens"
BYTES = "bytes a step"
LOSS = "final loss"
STATE = "state"
STATE_FORMULA = "state, formula"
STATE_ERROR = "state, error"
PEAK = "peak"
PEAK_FORMULA = "peak, formula"
PEAK_ERROR = "peak, error"
KEPT = ("parameters", "gradients", "optimizer", "mirror")  # between two steps
LARGE_MIB = 16  # of state: what resident memory is judged from
SAME_LOSS = 1e-3  # relative: all arms learn from the same batches
WORST = "worst arm"


def base_of(arm: str) -> str:
    """Return the arm with the same model and activation checkpointing that splits the batch only."""
    if EXPERTS in arm:
        return EXPERTS
    how = arm.partition(" + ")[2]
    return f"ddp + {how}" if how else "ddp"


def _draw_over(metric: str, axes: Any, report: Report) -> None:
    """Draw step time over a memory metric; hollow points use activation checkpointing."""
    for row in with_values(report, metric):
        step = report.row(row.arm, STEP)
        mode = row.arm.partition(" + ")[0]
        if mode not in ARMS or step is None or not step.values:
            continue
        color = f"C{list(ARMS).index(mode)}"
        marker = "s" if mode in AXES else "o"
        fill = color if row.arm == mode else "white"
        dots(axes, [row.median], [step], label=row.arm, color=color, fmt=marker, mfc=fill)


def _panel(metric: str, title: str, legend: Mapping[str, Any] | None = None) -> Panel:
    axes = {"xlabel": "MiB per rank", "ylabel": "step, ms, median and quartiles", "title": title}
    limits = {"xlim": (0, None), "ylim": (0, None)}
    return Panel(partial(_draw_over, metric), axes | limits, legend, grid=True)


class StrategiesBenchmark(Benchmark):
    """Compare step time and memory of DDP, ZeRO and FSDP."""

    # Wrong: arms whose final loss is not that of the first with the same model, to 0.1 %
    numbers = (
        Number("rounds", "rounds of all arms", usual=10, few=2),
        Number("steps", "steps of an arm per round", usual=4, few=2),
    )
    tables = (
        Table(
            STEP,
            (
                names("mode"),
                TableColumn("step / base", STEP, SPREAD, over=base_of),
                TableColumn("step, ms", STEP, SPREAD),
                TableColumn("p95, ms", P95),
                TableColumn("samples/s", SAMPLES),
                TableColumn("exposed, ms", EXPOSED, SPREAD),
                TableColumn("MB sent", BYTES),
                TableColumn("state, MiB", STATE),
                TableColumn("formula", STATE_FORMULA),
                TableColumn("peak, MiB", PEAK),
                TableColumn("formula", PEAK_FORMULA),
                TableColumn("loss", LOSS),
            ),
        ),
    )
    figure = Figure(
        (
            _panel(STATE, "weights + gradients + optimizer", {"fontsize": 6, "ncols": 2}),
            _panel(PEAK, "peak of a step"),
        ),
        size=(11, 4.6),
        note=("recipe", "backend"),
    )

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Add this benchmark's flags."""
        add_where_flags(parser)
        parser.add_argument(
            "--preset", help="sizes, batch and optimizer [shakespeare-cpu; on GPU gpt2-124m]"
        )
        add_settings_flag(parser, "the preset's")
        add_arms_flag(parser, ARMS)
        how = (
            "activation checkpointing of every arm's second run [%(default)s; none: no second runs]"
        )
        parser.add_argument(
            "--checkpointing", choices=("block", "selective", "none"), default="block", help=how
        )

    def measure(self, args: argparse.Namespace, report: Report) -> None:
        """Time all arms on the same ranks, measure memory on fresh ones, and fill the report."""
        where = where_from(args, least=2)
        arms = _arms_of(args, where.workers, report)

        def configs(preset: str) -> dict[str, Config]:
            given = settings_of(args)
            return {
                arm: configuration(preset, given, own, where.workers) for arm, own in arms.items()
            }

        # Refuse impossible settings now, before a rank is started
        trained = configs(args.preset or "shakespeare-cpu")
        mirrored = [arm for arm, own in arms.items() if "mirrored" in own]

        # Step times, on ranks that hold all arms
        found: Found = {arm: [] for arm in arms}

        def add_time_rows() -> None:
            # A loss is compared with that of the first arm with the same model: with or without
            # experts.
            for arm, events in found.items():
                first = next(other for other in arms if (EXPERTS in other) == (EXPERTS in arm))
                _add_time_rows(report, arm, events, [] if arm in COMPRESSED else found[first])

        with ranks_for(report, where, add_time_rows) as pool:
            if not args.preset and pool.facts[0]["device"] != "cpu":
                trained = configs("gpt2-124m")
            order = order_of(trained, args.rounds, args.steps, [COMMUNICATION], mirrored)
            rounds = f"{args.rounds} rounds of {args.steps} steps, random data"
            collect(pool.run(TIME_ENTRY, order), report, found, rounds)

        # Memory, on fresh ranks for every arm
        for arm, config in trained.items():
            order = order_of({arm: config}, mirrored=mirrored)
            add_memory_rows(report, where, order, arm)
        _add_targets(report, list(arms))

    def notes(self, report: Report) -> list[str]:
        """Return the bytes of each collective; activation checkpointing changes none."""
        rows = with_values(report, BYTES)
        return [f"{row.arm}: {row.note}" for row in rows if " + " not in row.arm]


def _arms_of(args: argparse.Namespace, workers: int, report: Report) -> dict[str, Record]:
    """Return the settings of every arm that the flags ask for. Raises ConfigError.

    The condition "left out" lists what `--arms all` cannot run on `workers` ranks.
    """
    modes = chosen(args.arms, list(ARMS))
    if args.arms == "all":
        modes = [mode for mode in modes if _fits(mode, workers)]
        left_out = [mode for mode in ARMS if mode not in modes]
        if left_out:
            reason = f"they do not divide {workers} ranks"
            report.conditions["left out"] = f"{', '.join(left_out)}: {reason}"

    # A second arm of each mode that only splits the batch, with activation checkpointing
    arms = {mode: ARMS[mode] for mode in modes}
    if args.checkpointing != "none":
        for mode in modes:
            if mode in MODES:
                settings = {"activation_checkpointing": args.checkpointing}
                arms[f"{mode} + {args.checkpointing}"] = MODES[mode] | settings
    return arms


def _add_time_rows(report: Report, arm: str, events: list[Record], first: list[Record]) -> None:
    """Add an arm's rows.

    `first` are the events of the first arm with this model, which has seen the same batches; none
    for an arm whose loss is not compared.
    """
    report.add(arm, STEP, "ms", each(events, "step_ms"))
    if not events:
        return
    last = events[-1]

    # Times, and what they mean in samples and tokens
    times = [ms for event in events for ms in event["times_ms"]]
    p95 = times[0]
    if len(times) > 1:
        p95 = statistics.quantiles(times, n=20, method="inclusive")[-1]
    report.add(arm, P95, "ms", p95, f"of {len(times)} steps")
    for metric in (SAMPLES, TOKENS):
        rates = [1e3 * event[metric] / event["step_ms"] for event in events]
        report.add(arm, metric, "1/s", rates)
    report.add(arm, BUSY, "ms", each(events, "busy_ms"))
    report.add(arm, EXPOSED, "ms", each(events, "exposed_ms"))

    # Bytes of a step, the same in every round
    sent = {name: {"n": n, "bytes": size} for name, (n, size) in last["collectives"].items()}
    total = sum(each["bytes"] for each in sent.values()) / 1e6
    note = note_of_sent(last["collectives"])
    report.add(arm, BYTES, "MB", total, note, extra={"collectives": sent})

    # Losses are compared after the same round: the last one of an interrupted benchmark lacks some
    # arms. Which expert a token goes to is a choice between numbers that may be nearly equal. After
    # some thirty steps rounding decides one of them, and then losses part; so they are compared before.
    rounds = 1 if EXPERTS in arm else min(len(events), len(first or events))
    compared = events[rounds - 1]
    loss = compared["losses"][-1]
    differs = False
    if first:
        differs = not math.isclose(loss, first[rounds - 1]["losses"][-1], rel_tol=SAME_LOSS)
    steps = f"after {compared['trained']} steps"
    report.add(arm, LOSS, "", loss, steps, wrong=int(differs))


def add_memory_rows(report: Report, where: Where, order: Record, arm: str) -> None:
    """Measure one arm on fresh ranks: what another arm has freed would hide what this one takes."""
    say(f"memory  {arm}")
    try:
        with RankPool(where) as pool:
            (event,) = pool.run(MEMORY_ENTRY, order)
    except RankFailed as error:
        report.add(arm, STATE, "MiB", (), error=str(error))
        report.add(arm, PEAK, "MiB", (), error=str(error))
        return
    # The formulas: the state is what stays between steps, the peak holds activations as well
    parts = event["formula"]
    state_bytes = sum(parts.get(name, 0) for name in KEPT)
    peak_bytes = event["at_peak"]
    formula = " + ".join(
        f"{name.replace('_', ' ')} {size / 2**20:.3g}" for name, size in parts.items() if size
    )

    # The measurements, one of each step
    states = [sum(held.values()) for held in event["held"]]
    peaks = event["peak"]
    last = event["held"][-1]
    measured = " + ".join(f"{name} {size / 2**20:.3g}" for name, size in last.items())

    def add(metric: str, sizes: Sequence[float], expected: int, note: str, formula: str) -> None:
        mib = [size / 2**20 for size in sizes]
        percent_off = [100 * (size / expected - 1) for size in sizes]
        more = of_state if metric == STATE else {}
        report.add(arm, metric, "MiB", mib, note, extra=more)
        report.add(arm, f"{metric}, formula", "MiB", expected / 2**20, formula)
        report.add(arm, f"{metric}, error", "%", percent_off)

    of_state = {"formula_bytes": parts, "held_bytes": last}
    add(STATE, states, state_bytes, measured, "")
    add(PEAK, peaks, peak_bytes, event["what"], formula)


def _add_targets(report: Report, arms: list[str]) -> None:
    """Add the ratios to torch's DDP and the targets.

    Peaks of experts are not judged on a CPU: each new number of an expert's tokens leaves kernels
    in memory for good.
    """
    limits = {"ddp_by_hand": 1.05, "zero1": 1.10}
    for arm in arms:
        if arm == base_of(arm):
            continue
        row = report.compare(arm, base_of(arm), STEP, "paired by round")
        if row and arm in limits:
            report.add_target(f"{row.arm}, step", row, "<=", limits[arm])
    gpu = "(cuda)" in str(report.conditions.get("devices"))
    for metric in (STATE_ERROR, PEAK_ERROR):
        judged = [arm for arm in arms if gpu or metric == STATE_ERROR or EXPERTS not in arm]
        rows = measured(report, judged, metric)
        if not rows:
            continue

        # The largest difference of all arms, step by step
        by_step = zip(*(row.values for row in rows), strict=True)
        worst = [max(abs(percent) for percent in percents) for percents in by_step]
        note = "largest difference of all arms, per step"
        report.add(WORST, metric, "%", worst, note)

        # On a CPU the peak is resident memory, which also holds what libraries allocate
        largest = max((row.median for row in measured(report, arms, STATE)), default=0.0)
        excuse = ""
        if metric == PEAK_ERROR and not gpu and largest < LARGE_MIB:
            excuse = (
                f"with less than {LARGE_MIB} MiB of state, buffers of libraries are the larger part"
            )
        text = f"{metric.partition(',')[0]} memory, measured against the formula, {WORST}, %"
        report.add_target(text, report.rows[-1], "<=", 10.0, excuse)


def _fits(mode: str, workers: int) -> bool:
    ranks = math.prod(ARMS[mode].get(axis, 1) for axis in {*IN_REPLICA, *CUTS_MODEL})
    if mode in HYBRID:
        ranks = 2 * ARMS[mode]["replicas"]  # a group of one rank shards nothing
    return workers % ranks == 0


def configuration(preset: str, given: Record, own: Record, workers: int) -> Config:
    """Return the configuration of an arm on `workers` ranks. `given`: keys of all arms.

    Raises ConfigError for a key or value that is impossible there. A pipeline gets two micro
    batches for each stage, where the batch per rank is not given.
    """
    settings = given | {key: value for key, value in own.items() if key != "mirrored"}

    def load(**more: int) -> tuple[Config, int]:
        config = load_config(preset=preset, overrides=settings | more)
        return config, resolve_batch(config, Layout.of(config, workers).dp).accum

    config, accum = load()
    if accum < 2 * config.pp and config.pp > 1 and not config.micro_batch_size:
        config, _ = load(grad_accum_steps=2 * config.pp)
    return config

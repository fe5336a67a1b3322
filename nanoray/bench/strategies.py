"""`python -m nanoray.bench strategies`: time, memory and communication of each mode.

DDP, DDP by hand, ZeRO-1, ZeRO-2 and FSDP, each with and without activation checkpointing, ZeRO and
FSDP in two groups of ranks (hybrid sharding), context, tensor and pipeline parallelism, train one
model on the same batches; the same model with experts in place of its MLPs is trained with and
without expert parallelism. Times: every round runs a few steps of each arm in turn, on ranks that
hold them all, so a slow minute of the machine hits all arms; communication comes from one more step
of each round, traced. Memory: fresh ranks for every arm, beside what the formulas of
`nanoray.forecast.memory` and `nanoray.models.costs` say.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoray.bench.harness.benchmark import Benchmark
from nanoray.bench.harness.figure import figure, measured, whiskers
from nanoray.bench.harness.plan import (
    add_settings_flag,
    chosen,
    count_of,
    rotated,
    settings_of,
)
from nanoray.bench.harness.rank_pool import (
    RankFailed,
    RankPool,
    add_where_flags,
    describe,
    where_from,
)
from nanoray.bench.harness.report import Measurement, Report, Target, aligned, markdown, say
from nanoray.config import Config, load_config, make_config, resolve_batch
from nanoray.config.mesh import CUTS_MODEL, IN_REPLICA
from nanoray.errors import ConfigError
from nanoray.mesh.layout import Layout

if TYPE_CHECKING:
    from nanoray.bench.arm import Arm
    from nanoray.mesh.mesh import Mesh

MODES: dict[str, dict[str, Any]] = {
    mode: {"dp_mode": mode} for mode in ("ddp", "ddp_by_hand", "zero1", "zero2")
}
MODES |= {f"fsdp {how}": {"dp_mode": "fsdp", "fsdp_reshard": how} for how in ("full", "grad_op")}
# In a run --mirror decides; here a mode without the word mirrors nothing, to compare.
DATA_ARMS = MODES | {
    f"{mode} mirrored": MODES[mode] | {"mirrored": True} for mode in ("zero1", "zero2", "fsdp full")
}
# Hybrid sharding: two groups of ranks that each hold the whole state, and shard it
HYBRID: dict[str, dict[str, Any]] = {
    f"{mode} hybrid": MODES[mode] | {"replicas": 2} for mode in ("zero1", "zero2", "fsdp full")
}
# Replicas that average their weights: in each step here, so that each step is like the others
ROUNDS_OF_ONE: dict[str, Any] = {"sync_every": 1, "outer_lr": 1.0, "outer_momentum": 0.0}
ROUNDS: dict[str, dict[str, Any]] = {
    "rounds": ROUNDS_OF_ONE,
    "rounds 8 bits": ROUNDS_OF_ONE | {"sync_bits": 8},
}
EXPERTS = "experts"
_EXPERTS = {"dp_mode": "ddp_by_hand", "experts": 4}
AXES: dict[str, dict[str, Any]] = {
    "cp 2": {"cp": 2},
    "cp 2 gathered": {"cp": 2, "cp_attention": "all_gather"},
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
ARMS = DATA_ARMS | HYBRID | ROUNDS | AXES
ONLY_GPT = ROUNDS | AXES
STEP = "step"
P95 = "p95 step"
SAMPLES = "samples"
TOKENS = "tokens"
BUSY = "collectives busy"
EXPOSED = "exposed"
BYTES = "bytes a step"
LOSS = "final loss"
STATE = "state"
STATE_FORMULA = "state, formula"
STATE_ERROR = "state, error"
PEAK = "peak"
PEAK_FORMULA = "peak, formula"
PEAK_ERROR = "peak, error"
RESNET = {
    "model": "resnet",
    "optimizer": "sgd",
    "momentum": 0.9,
    "lr": 0.1,
    "grad_clip": 0.0,
    "global_batch_size": 64,
}
KEPT = ("parameters", "gradients", "optimizer", "mirror", "rounds")  # between two steps
MEMORY_STEPS = 5
LARGE_MIB = 16  # of state: what resident memory is judged from
SAME_LOSS = 1e-3  # relative: all arms learn from the same batches
WORST = "worst arm"


class StrategiesBenchmark(Benchmark):
    """Compare step time and memory of DDP, ZeRO and FSDP."""

    wrong = "arms whose final loss is not that of the first with the same model, to 0.1 %"

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Add this benchmark's flags."""
        add_where_flags(parser)
        parser.add_argument(
            "--model",
            choices=("gpt", "resnet"),
            default="gpt",
            help="what is trained [%(default)s]",
        )
        parser.add_argument(
            "--preset",
            help="a gpt's sizes, batch and optimizer [shakespeare-cpu; on GPU gpt2-124m]",
        )
        add_settings_flag(parser, "the preset's")
        parser.add_argument(
            "--arms", default="all", help=f"some of {', '.join(ARMS)} [%(default)s]"
        )
        how = "activation checkpointing of every arm's second run, of a gpt [%(default)s; none: no second runs]"
        parser.add_argument(
            "--checkpointing", choices=("block", "selective", "none"), default="block", help=how
        )
        parser.add_argument(
            "--rounds", type=int, metavar="N", help="rounds of all arms [10; 2 with --quick]"
        )
        parser.add_argument(
            "--steps", type=int, metavar="N", help="steps of an arm per round [4; 2 with --quick]"
        )

    def measure(self, args: argparse.Namespace, report: Report) -> None:
        """Time all arms on the same ranks, measure memory on fresh ones, and fill the report."""
        where = where_from(args)
        rounds = count_of(args.rounds, args.quick, few=2, usual=10)
        steps = count_of(args.steps, args.quick, few=2, usual=4)
        if where.workers < 2 or min(rounds, steps) < 1:
            raise ConfigError(
                f"workers = {where.workers}, rounds = {rounds}, steps = {steps}; 2, 1 and 1 are the "
                "least"
            )
        arms = _arms_of(args, where.workers, report)
        order = {
            "model": args.model,
            "overrides": settings_of(args),
            "arms": arms,
            "rounds": rounds,
            "steps": steps,
        }

        # Refuse impossible settings now, before a rank is started
        for own in arms.values():
            configuration(order | {"preset": args.preset or "shakespeare-cpu"}, own, where.workers)

        # Step times, on ranks that hold all arms
        events: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
        try:
            with RankPool(where) as pool:
                describe(report, pool)
                on_gpu = pool.facts[0]["device"] != "cpu"
                default = "gpt2-124m" if on_gpu else "shakespeare-cpu"
                order["preset"] = args.preset or default
                for event in pool.run("nanoray.bench.strategies:time_rank", order):
                    if "recipe" in event:
                        report.conditions["recipe"] = (
                            f"{event['recipe']}, {rounds} rounds of {steps} steps, random data"
                        )
                        continue
                    events[event["arm"]].append(event)
                    say(f"round {event['round']}  {event['arm']:<24} {event['step_ms']:.1f} ms")
        except RankFailed as error:
            report.failures.append(str(error))

        # A loss is compared with that of the first arm with the same model: with or without experts
        for arm in arms:
            first = next(other for other in arms if (EXPERTS in other) == (EXPERTS in arm))
            reference = report.row(first, LOSS)
            # Averaged weights are those of averaged gradients with plain SGD only.
            if arm in ROUNDS:
                reference = None
            report.rows += _time_rows(arm, events[arm], reference)

        # Memory, on fresh ranks for every arm
        for arm in arms:
            report.rows += memory_rows(where, order | {"arms": {arm: arms[arm]}}, arm)
        _add_targets(report, list(arms))

    def format_text(self, report: Report) -> list[str]:
        """Return a line per arm, medians with their quartiles, and the bytes of each collective."""
        table = aligned(
            [(*line, "") for line in _table(report, "quartiles")], right=set(range(1, 12))
        )
        rows = [
            row
            for row in report.rows
            if row.metric == BYTES and row.values and " + " not in row.arm
        ]
        return [*table, "", *(f"{row.arm}: {row.note}" for row in rows)]

    def format_markdown(self, report: Report) -> list[str]:
        """Return the table for a page."""
        head, *body = _table(report, "range")
        return markdown(head, body)

    def draw(self, report: Report, path: Path) -> None:
        """Draw step time over memory between steps and at the peak.

        Hollow points use activation checkpointing.
        """
        note = f"{report.conditions.get('recipe', '')} · {report.conditions.get('backend', '')}"
        with figure(report, path, (11, 4.6), note=note) as both:
            for axes, metric in zip(both, (STATE, PEAK), strict=True):
                for row in report.rows:
                    if row.metric == metric and row.values:
                        _draw_point(axes, report, row)
                axes.set(xlabel="MiB per rank", ylabel="step, ms, median and quartiles")
                axes.set(xlim=(0, None), ylim=(0, None))
                axes.grid(alpha=0.25)
            both[0].set_title("weights + gradients + optimizer")
            both[1].set_title("peak of a step")
            both[0].legend(fontsize=6, ncols=2)


def _arms_of(args: argparse.Namespace, workers: int, report: Report) -> dict[str, dict[str, Any]]:
    """Return the settings of every arm that the flags ask for. Raises ConfigError.

    The condition "left out" lists what `--arms all` cannot run on `workers` ranks.
    """
    modes = chosen(args.arms, list(ARMS))
    if args.preset and args.model != "gpt":
        raise ConfigError(
            f"preset = {args.preset} is a gpt's, but model = {args.model}; use --settings"
        )
    if args.arms == "all":
        modes = [mode for mode in modes if _fits(mode, args.model, workers)]
        left_out = [mode for mode in ARMS if mode not in modes]
        need_gpts = []
        if args.model != "gpt":
            need_gpts = [mode for mode in left_out if mode in ONLY_GPT]
        do_not_divide = [mode for mode in left_out if mode not in need_gpts]
        reasons = []
        if do_not_divide:
            reasons.append(f"{', '.join(do_not_divide)}: they do not divide {workers} ranks")
        if need_gpts:
            reasons.append(f"{', '.join(need_gpts)}: they need a gpt")
        if reasons:
            report.conditions["left out"] = "; ".join(reasons)
    only_gpt = [mode for mode in modes if mode in ONLY_GPT]
    if args.model != "gpt" and only_gpt:
        raise ConfigError(
            f"arms = {', '.join(only_gpt)} need a gpt, but model = {args.model}; leave them out"
        )

    # A second arm of each mode that only splits the batch, with activation checkpointing
    arms = {mode: ARMS[mode] for mode in modes}
    if args.checkpointing != "none" and args.model == "gpt":
        for mode in modes:
            if mode in MODES:
                settings = {"activation_checkpointing": args.checkpointing}
                arms[f"{mode} + {args.checkpointing}"] = MODES[mode] | settings
    return arms


def _time_rows(
    arm: str, events: list[dict[str, Any]], first: Measurement | None
) -> list[Measurement]:
    """Return an arm's rows.

    `first` is the final loss of the first arm with this model, which has seen the same batches.
    """

    def milliseconds(metric: str, key: str) -> Measurement:
        return Measurement(arm, metric, "ms", tuple(event[key] for event in events))

    if not events:
        return [Measurement(arm, STEP, "ms", ())]
    last = events[-1]

    # Times, and what they mean in samples and tokens (a resnet has no tokens)
    times = [ms for event in events for ms in event["times_ms"]]
    p95 = times[0]
    if len(times) > 1:
        p95 = statistics.quantiles(times, n=20, method="inclusive")[-1]
    rows = [
        milliseconds(STEP, "step_ms"),
        Measurement(arm, P95, "ms", (p95,), f"of {len(times)} steps"),
    ]
    for metric in (SAMPLES, TOKENS):
        if last[metric]:
            rates = tuple(1e3 * event[metric] / event["step_ms"] for event in events)
            rows.append(Measurement(arm, metric, "1/s", rates))
    rows += [milliseconds(BUSY, "busy_ms"), milliseconds(EXPOSED, "exposed_ms")]

    # Bytes of a step, the same in every round
    sent = {name: {"n": n, "bytes": size} for name, (n, size) in last["collectives"].items()}
    note = " · ".join(
        f"{name} {each['bytes'] / 1e6:.3g} MB in {each['n']}" for name, each in sent.items()
    )
    total = sum(each["bytes"] for each in sent.values()) / 1e6
    rows.append(Measurement(arm, BYTES, "MB", (total,), note, extra={"collectives": sent}))

    wrong = 0
    if first and not math.isclose(last["loss"], first.median, rel_tol=SAME_LOSS):
        wrong = 1
    steps = f"after {last['trained']} steps"
    rows.append(Measurement(arm, LOSS, "", (last["loss"],), steps, wrong=wrong))
    return rows


def _draw_point(axes: Any, report: Report, row: Measurement) -> None:
    """Draw an arm's step time over a memory row; with activation checkpointing it is hollow."""
    step = report.row(row.arm, STEP)
    if step is None or not step.values:
        return
    mode = row.arm.partition(" + ")[0]
    color = f"C{list(ARMS).index(mode)}"
    axes.errorbar(
        row.median,
        step.median,
        yerr=whiskers([step], quartiles=True),
        ls="",
        capsize=2,
        label=row.arm,
        color=color,
        marker="s" if mode in AXES else "o",
        mfc=color if row.arm == mode else "white",
    )


def memory_rows(where: Any, order: dict[str, Any], arm: str) -> list[Measurement]:
    """Measure one arm on fresh ranks: what another arm has freed would hide what this one takes."""
    say(f"memory  {arm}")
    try:
        with RankPool(where) as pool:
            (event,) = pool.run("nanoray.bench.strategies:memory_rank", order)
    except RankFailed as error:
        return [
            Measurement(arm, STATE, "MiB", (), error=str(error)),
            Measurement(arm, PEAK, "MiB", (), error=str(error)),
        ]
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

    def mib(sizes: Sequence[float]) -> tuple[float, ...]:
        return tuple(size / 2**20 for size in sizes)

    def percent_off(sizes: Sequence[float], expected: float) -> tuple[float, ...]:
        return tuple(100 * (size / expected - 1) for size in sizes)

    extra = {"formula_bytes": parts, "held_bytes": last}
    return [
        Measurement(arm, STATE, "MiB", mib(states), measured, extra=extra),
        Measurement(arm, STATE_FORMULA, "MiB", mib([state_bytes])),
        Measurement(arm, STATE_ERROR, "%", percent_off(states, state_bytes)),
        Measurement(arm, PEAK, "MiB", mib(peaks), event["what"]),
        Measurement(arm, PEAK_FORMULA, "MiB", mib([peak_bytes]), formula),
        Measurement(arm, PEAK_ERROR, "%", percent_off(peaks, peak_bytes)),
    ]


def _add_targets(report: Report, arms: list[str]) -> None:
    """Add the ratios to torch's DDP and the targets.

    Peaks of experts are not judged on a CPU: each new number of an expert's tokens leaves kernels
    in memory for good.
    """
    limits = {"ddp_by_hand": 1.05, "zero1": 1.10}
    for arm in arms:
        if arm == _base(arm):
            continue
        row = report.compare(arm, _base(arm), STEP, "paired by round")
        if row and arm in limits:
            report.targets.append(Target(f"{row.arm}, step", row, "<=", limits[arm]))
    gpu = "(cuda)" in str(report.conditions.get("devices"))
    for metric in (STATE_ERROR, PEAK_ERROR):
        judged = [arm for arm in arms if gpu or metric == STATE_ERROR or EXPERTS not in arm]
        rows = measured(report, judged, metric)
        if not rows:
            continue

        # The largest difference of all arms, step by step
        by_step = zip(*(row.values for row in rows), strict=True)
        worst = tuple(max(abs(percent) for percent in percents) for percents in by_step)
        note = "largest difference of all arms, per step"
        report.rows.append(Measurement(WORST, metric, "%", worst, note))

        # On a CPU the peak is resident memory, which also holds what libraries allocate
        largest = max((row.median for row in measured(report, arms, STATE)), default=0.0)
        excuse = ""
        if metric == PEAK_ERROR and not gpu and largest < LARGE_MIB:
            excuse = (
                f"with less than {LARGE_MIB} MiB of state, buffers of libraries are the larger part"
            )
        text = f"{metric.partition(',')[0]} memory, measured against the formula, {WORST}, %"
        report.targets.append(Target(text, report.rows[-1], "<=", 10.0, excuse))


def _table(report: Report, spread: str) -> list[tuple[str, ...]]:
    columns = {
        STEP: "step, ms",
        P95: "p95, ms",
        SAMPLES: "samples/s",
        EXPOSED: "exposed, ms",
        BYTES: "MB sent",
        STATE: "state, MiB",
        STATE_FORMULA: "formula",
        PEAK: "peak, MiB",
        PEAK_FORMULA: "formula",
        LOSS: "loss",
    }
    table = [("mode", "step / base", *columns.values())]
    for row in report.rows:
        if row.metric != STEP or row.unit != "ms":
            continue
        cells = [row.arm, report.cell(f"{row.arm} / {_base(row.arm)}", STEP, spread)]
        for metric in columns:
            # Only times have a spread worth its room
            shown = spread if metric in (STEP, EXPOSED) else "none"
            cells.append(report.cell(row.arm, metric, shown))
        table.append(tuple(cells))
    return table


def _base(arm: str) -> str:
    """Return the arm with the same model and activation checkpointing that splits the batch only."""
    if EXPERTS in arm:
        return EXPERTS
    how = arm.partition(" + ")[2]
    return f"ddp + {how}" if how else "ddp"


def _fits(mode: str, model: str, workers: int) -> bool:
    ranks = math.prod(ARMS[mode].get(axis, 1) for axis in {*IN_REPLICA, *CUTS_MODEL})
    if mode in HYBRID:
        ranks = 2 * ARMS[mode]["replicas"]  # a group of one rank shards nothing
    return workers % ranks == 0 and (model == "gpt" or mode not in ONLY_GPT)


# On every rank.


def _arm(mesh: Mesh, order: dict[str, Any], own: dict[str, Any], traced: bool) -> Arm:
    from nanoray.bench.arm import MODELS, Arm

    return Arm(
        mesh,
        configuration(order, own, mesh.world_size),
        MODELS[order["model"]],
        traced,
        "mirrored" in own,
    )


def configuration(order: dict[str, Any], own: dict[str, Any], workers: int) -> Config:
    """Return the configuration of an arm on `ranks` ranks.

    Raises ConfigError for a key or value that is impossible there. A pipeline gets two micro
    batches for each stage, where the batch per rank is not given.
    """
    settings = order["overrides"] | {key: value for key, value in own.items() if key != "mirrored"}

    def load(**more: int) -> tuple[Config, int]:
        values = settings | more
        if order["model"] == "gpt":
            config = load_config(preset=order["preset"], overrides=values)
        else:
            config = make_config(RESNET | values)
        return config, resolve_batch(config, Layout.of(config, workers).dp).accum

    config, accum = load()
    if accum < 2 * config.pp and config.pp > 1 and not config.micro_batch_size:
        config, _ = load(grad_accum_steps=2 * config.pp)
    return config


def time_rank(mesh: Mesh, order: dict[str, Any], emit: Callable[[Any], None]) -> None:
    """Run the rounds; emit one event per arm and round, times of the slowest rank. (all ranks)"""
    import torch

    from nanoray.host.host import keep_freed_memory
    from nanoray.trace.recorder import Clock, wait_for

    if mesh.device.type == "cpu":
        keep_freed_memory()  # as in a run; `memory_rank` returns it instead

    def worst(ms: list[float]) -> list[float]:
        return list(mesh.all_reduce(torch.tensor(ms, device=mesh.device), op="max").tolist())

    arms = {name: _arm(mesh, order, own, traced=True) for name, own in order["arms"].items()}
    clock = Clock(mesh.device)
    emit({"recipe": next(iter(arms.values())).recipe})
    for turn in range(order["rounds"]):
        for name in rotated(list(arms), turn):
            arm = arms[name]

            # The clocks' marks cost no wait; the device is waited for once, at the end
            mesh.barrier()
            began = time.time()
            start = time.perf_counter()
            marks = [clock.now()]
            for _ in range(order["steps"]):
                arm.step()
                arm.plan.zero_grad()
                marks.append(clock.now())
            arm.plan.settle()
            wait_for(mesh.device)
            step_ms = 1e3 * (time.perf_counter() - start) / order["steps"]
            # Until the others are done, too: bytes may be counted between these moments.
            mesh.barrier()
            ended = time.time()

            # A step takes as long as on the slowest rank
            clock.anchor()
            moments = [clock.seconds(mark) for mark in marks]
            times = [1e3 * (end - begin) for begin, end in pairwise(moments)]
            step_ms, *times = worst([step_ms, *times])
            event: dict[str, Any] = {
                "arm": name,
                "round": turn,
                "step_ms": step_ms,
                "times_ms": times,
                "began": began,
                "ended": ended,
            }

            # One more step, traced, shows the communication
            event |= arm.traced_step()
            event["busy_ms"], event["exposed_ms"] = worst([event["busy_ms"], event["exposed_ms"]])
            event[SAMPLES] = arm.case.samples * arm.accum * arm.dp
            event[TOKENS] = event[SAMPLES] * arm.case.tokens
            event["loss"] = mesh.all_reduce_mean(arm.loss.clone()).item()
            event["trained"] = arm.trained
            emit(event)
    for arm in arms.values():
        arm.plan.close()


def memory_rank(mesh: Mesh, order: dict[str, Any], emit: Callable[[Any], None]) -> None:
    """Train a few steps of one arm; emit predicted and measured memory. (all ranks)

    The measured memory is that of the rank that held the most.
    """
    import torch

    from nanoray.host.host import return_freed_memory

    if mesh.device.type == "cpu":
        return_freed_memory()
    (own,) = order["arms"].values()
    on_gpu = mesh.device.type == "cuda"
    resident = 0 if on_gpu else _resident("VmRSS")

    # A first step loads code and generates kernels for these shapes, which are not an arm's memory
    first = _arm(mesh, order, own, traced=False)
    list(_steps(first, 1, lambda: 0))
    first.plan.close()
    del first
    gc.collect()

    # Reset the peak; "5" is the kernel's order for that
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    else:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = torch.cuda.memory_allocated() if on_gpu else _resident("VmRSS")
    libraries = f"libraries took {(before - resident) / 2**20:.3g} in a first step"

    def peak() -> int:
        highest = torch.cuda.max_memory_allocated() if on_gpu else _resident("VmHWM")
        return highest - before

    # The second arm is the measured one
    arm = _arm(mesh, order, own, traced=False)
    held, peaks = zip(*_steps(arm, MEMORY_STEPS, peak), strict=True)
    arm.plan.close()
    memory: dict[str, Any] = {"formula": arm.formula, "at_peak": arm.at_peak}
    memory |= {"held": held, "peak": peaks}
    everyone = mesh.gather(memory)
    if everyone is not None:
        most = max(everyone, key=lambda rank: rank["peak"][-1])
        if on_gpu:
            what = "device memory"
        else:
            what = f"resident memory above that before the model was made; {libraries}"
        emit(most | {"what": what})


def _steps(arm: Arm, count: int, peak: Callable[[], int]) -> Iterator[tuple[dict[str, int], int]]:
    """Train, and yield what is held at the end of each step and the peak until then. (all ranks)"""
    from nanoray.forecast.memory import held_by_mirror, held_bytes

    for _ in range(count):
        arm.step()
        arm.plan.settle()
        held = held_bytes(arm.case.model, arm.plan.gradients, arm.optimizer)
        if arm.mirror:
            held["mirror"] = held_by_mirror(
                arm.case.model, arm.plan.mirror_shards or (), arm.mirror
            )
        if arm.outer:
            kept = [*arm.outer.anchor.values(), *arm.outer.momentum.values()]
            held["rounds"] = sum(tensor.nbytes for tensor in kept)
        yield held, peak()
        arm.plan.zero_grad()


def _resident(key: str) -> int:
    """Return this process's resident memory (VmRSS) or its peak (VmHWM) in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])

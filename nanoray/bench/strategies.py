"""`python -m nanoray.bench strategies`: time, memory and communication of each mode.

DDP, DDP by hand, ZeRO-1, ZeRO-2 and FSDP, each with and without activation checkpointing, tensor
and pipeline parallelism, train one model on the same batches; the same model with experts in place
of its MLPs is trained with and without expert parallelism. Times: every round runs a few steps of
each arm in turn, on ranks that hold them all, so a slow minute of the machine hits all arms;
communication comes from one more step of each round, traced. Memory: fresh ranks for every arm,
beside what the formulas of `nanoray.forecast.memory` and `nanoray.models.costs` say.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoray.bench.harness.benchmark import Benchmark
from nanoray.bench.harness.figure import figure, whiskers
from nanoray.bench.harness.plan import add_settings_flag, chosen, rotated, settings_of
from nanoray.bench.harness.rank_pool import (
    RankFailed,
    RankPool,
    add_where_flags,
    describe,
    where_from,
)
from nanoray.bench.harness.report import Report, Row, Target, aligned, markdown, say
from nanoray.config import Config, load_config, make_config, resolve_batch
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
EXPERTS = "experts"
_EXPERTS = {"dp_mode": "ddp_by_hand", "experts": 4}
AXES: dict[str, dict[str, Any]] = {
    "tp 2": {"tp": 2},
    "tp 2 sequence": {"tp": 2, "sequence_parallel": True},
    "pp 2": {"dp_mode": "ddp_by_hand", "pp": 2},
    EXPERTS: _EXPERTS,
    f"{EXPERTS} ep 2": _EXPERTS | {"ep": 2},
}
ARMS = DATA_ARMS | AXES
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
KEPT = ("parameters", "gradients", "optimizer", "mirror")  # between two steps
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
        if args.rounds is None:
            rounds = 2 if args.quick else 10
        else:
            rounds = args.rounds
        if args.steps is None:
            steps = 2 if args.quick else 4
        else:
            steps = args.steps
        if where.workers < 2 or min(rounds, steps) < 1:
            raise ConfigError(
                f"workers = {where.workers}, rounds = {rounds}, steps = {steps}; 2, 1 and 1 are the "
                "least"
            )
        modes = chosen(args.arms, list(ARMS))
        if args.arms == "all":
            modes = [mode for mode in modes if _fits(mode, args.model, where.workers)]
            if left_out := [mode for mode in ARMS if mode not in modes]:
                if args.model != "gpt":
                    what = "they split a gpt"
                else:
                    what = f"they do not divide {where.workers} ranks"
                report.conditions["left out"] = f"{', '.join(left_out)}: {what}"
        arms = {mode: ARMS[mode] for mode in modes}
        if args.checkpointing != "none" and args.model == "gpt":
            extra = {"activation_checkpointing": args.checkpointing}
            arms |= {
                f"{mode} + {args.checkpointing}": MODES[mode] | extra
                for mode in modes
                if mode in MODES
            }
        overrides = settings_of(args)
        if args.preset and args.model != "gpt":
            raise ConfigError(
                f"preset = {args.preset} is a gpt's, but model = {args.model}; use --settings"
            )
        if args.model != "gpt" and (axes := [mode for mode in modes if mode in AXES]):
            raise ConfigError(
                f"arms = {', '.join(axes)} split a gpt, but model = {args.model}; leave them out"
            )
        order = {
            "model": args.model,
            "overrides": overrides,
            "arms": arms,
            "rounds": rounds,
            "steps": steps,
        }
        for own in arms.values():  # what cannot be is known before a rank is started
            configuration(order | {"preset": args.preset or "shakespeare-cpu"}, own, where.workers)
        found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
        try:
            with RankPool(where) as pool:
                describe(report, pool)
                on_gpu = pool.facts[0]["device"] != "cpu"
                order["preset"] = args.preset or ("gpt2-124m" if on_gpu else "shakespeare-cpu")
                for event in pool.run("nanoray.bench.strategies:time_rank", order):
                    if "recipe" in event:
                        report.conditions["recipe"] = (
                            f"{event['recipe']}, {rounds} rounds of {steps} steps, random data"
                        )
                        continue
                    found[event["arm"]].append(event)
                    say(f"round {event['round']}  {event['arm']:<24} {event['step_ms']:.1f} ms")
        except RankFailed as error:
            report.failures.append(str(error))
        for arm, events in found.items():
            alike = next(other for other in arms if (EXPERTS in other) == (EXPERTS in arm))
            report.rows += _time_rows(arm, events, report.row(alike, LOSS))
        for arm in arms:
            report.rows += _memory_rows(where, order | {"arms": {arm: arms[arm]}}, arm)
        _judge(report, list(arms))

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
                for row in (r for r in report.rows if r.metric == metric and r.values):
                    step = report.row(row.arm, STEP)
                    mode = row.arm.partition(" + ")[0]
                    if step and step.values:
                        look = {
                            "color": f"C{list(ARMS).index(mode)}",
                            "marker": "s" if mode in AXES else "o",
                        }
                        look["mfc"] = look["color"] if row.arm == mode else "white"
                        spread = whiskers([step], quartiles=True)
                        axes.errorbar(
                            row.median,
                            step.median,
                            yerr=spread,
                            ls="",
                            capsize=2,
                            label=row.arm,
                            **look,
                        )
                axes.set(
                    xlabel="MiB per rank",
                    ylabel="step, ms, median and quartiles",
                    xlim=(0, None),
                    ylim=(0, None),
                )
                axes.set_title(
                    "weights + gradients + optimizer" if metric == STATE else "peak of a step"
                )
                axes.grid(alpha=0.25)
            both[0].legend(fontsize=6, ncols=2)


def _time_rows(arm: str, events: list[dict[str, Any]], first: Row | None) -> list[Row]:
    """Return an arm's rows.

    `first` is the final loss of the first arm with this model, which has seen the same batches.
    """

    def row(metric: str, unit: str, key: str) -> Row:
        return Row(arm, metric, unit, tuple(e[key] for e in events))

    if not events:
        return [Row(arm, STEP, "ms", ())]
    times = [ms for e in events for ms in e["times_ms"]]
    p95 = statistics.quantiles(times, n=20, method="inclusive")[-1] if len(times) > 1 else times[0]
    last = events[-1]
    sent = {name: {"n": n, "bytes": size} for name, (n, size) in last["collectives"].items()}
    told = " · ".join(
        f"{name} {each['bytes'] / 1e6:.3g} MB in {each['n']}" for name, each in sent.items()
    )
    total = sum(each["bytes"] for each in sent.values()) / 1e6
    wrong = int(
        first is not None and not math.isclose(last["loss"], first.median, rel_tol=SAME_LOSS)
    )
    return [
        row(STEP, "ms", "step_ms"),
        Row(arm, P95, "ms", (p95,), f"of {len(times)} steps"),
        *(
            Row(arm, metric, "1/s", tuple(1e3 * e[metric] / e["step_ms"] for e in events))
            for metric in (SAMPLES, TOKENS)
            if last[metric]
        ),
        row(BUSY, "ms", "busy_ms"),
        row(EXPOSED, "ms", "exposed_ms"),
        Row(arm, BYTES, "MB", (total,), told, extra={"collectives": sent}),
        Row(arm, LOSS, "", (last["loss"],), f"after {last['trained']} steps", wrong=wrong),
    ]


def _memory_rows(where: Any, order: dict[str, Any], arm: str) -> list[Row]:
    """Measure one arm on fresh ranks: what another arm has freed would hide what this one takes."""
    say(f"memory  {arm}")
    try:
        with RankPool(where) as pool:
            (found,) = pool.run("nanoray.bench.strategies:memory_rank", order)
    except RankFailed as error:
        return [
            Row(arm, STATE, "MiB", (), error=str(error)),
            Row(arm, PEAK, "MiB", (), error=str(error)),
        ]
    parts = found["formula"]
    held = found["held"]
    told = " + ".join(
        f"{name.replace('_', ' ')} {size / 2**20:.3g}" for name, size in parts.items() if size
    )
    kept = sum(parts.get(name, 0) for name in KEPT)
    total = found["at_peak"]
    state = [sum(each.values()) for each in held]
    measured = " + ".join(f"{name} {size / 2**20:.3g}" for name, size in held[-1].items())
    extra = {"formula_bytes": parts, "held_bytes": held[-1]}
    return [
        Row(arm, STATE, "MiB", tuple(size / 2**20 for size in state), measured, extra=extra),
        Row(arm, STATE_FORMULA, "MiB", (kept / 2**20,)),
        Row(arm, STATE_ERROR, "%", tuple(100 * (size / kept - 1) for size in state)),
        Row(arm, PEAK, "MiB", tuple(size / 2**20 for size in found["peak"]), found["what"]),
        Row(arm, PEAK_FORMULA, "MiB", (total / 2**20,), told),
        Row(arm, PEAK_ERROR, "%", tuple(100 * (size / total - 1) for size in found["peak"])),
    ]


def _judge(report: Report, arms: list[str]) -> None:
    """Add the ratios to torch's DDP and the targets.

    Peaks of experts are not judged on a CPU: each new number of an expert's tokens leaves kernels
    in memory for good.
    """
    limits = {"ddp_by_hand": 1.05, "zero1": 1.10}
    for arm in arms:
        if arm != _base(arm):
            row = report.compare(arm, _base(arm), STEP, "paired by round")
        else:
            row = None
        if row and arm in limits:
            report.targets.append(Target(f"{row.arm}, step", row, "<=", limits[arm]))
    gpu = "(cuda)" in str(report.conditions.get("devices"))
    for metric in (STATE_ERROR, PEAK_ERROR):
        judged = [arm for arm in arms if gpu or metric == STATE_ERROR or EXPERTS not in arm]
        rows = [row for arm in judged if (row := report.row(arm, metric)) and row.values]
        if rows:
            worst = tuple(
                max(abs(v) for v in step)
                for step in zip(*(row.values for row in rows), strict=True)
            )
            report.rows.append(
                Row(WORST, metric, "%", worst, "largest difference of all arms, per step")
            )
            kept = [row.median for arm in arms if (row := report.row(arm, STATE)) and row.values]
            small = metric == PEAK_ERROR and not gpu and max(kept, default=0.0) < LARGE_MIB
            if small:
                rss = f"with less than {LARGE_MIB} MiB of state, buffers of libraries are the larger part"
            else:
                rss = ""
            text = f"{metric.partition(',')[0]} memory, measured against the formula, {WORST}, %"
            report.targets.append(Target(text, report.rows[-1], "<=", 10.0, rss))


def _table(report: Report, spread: str) -> list[tuple[str, ...]]:
    columns = {
        STEP: "step, ms",
        P95: "p95, ms",
        SAMPLES: "samples/s",
        EXPOSED: "exposed, ms",
        BYTES: "MB sent",
    }
    columns |= {
        STATE: "state, MiB",
        STATE_FORMULA: "formula",
        PEAK: "peak, MiB",
        PEAK_FORMULA: "formula",
        LOSS: "loss",
    }
    table = [("mode", "step / base", *columns.values())]
    for arm in (row.arm for row in report.rows if row.metric == STEP and row.unit == "ms"):
        cells = [
            report.cell(arm, metric, spread if metric in (STEP, EXPOSED) else "none")
            for metric in columns
        ]
        table.append((arm, report.cell(f"{arm} / {_base(arm)}", STEP, spread), *cells))
    return table


def _base(arm: str) -> str:
    """Return the arm with the same model and activation checkpointing that splits the batch only."""
    if EXPERTS in arm:
        return EXPERTS
    how = arm.partition(" + ")[2]
    return f"ddp + {how}" if how else "ddp"


def _fits(mode: str, model: str, workers: int) -> bool:
    ranks = math.prod(ARMS[mode].get(axis, 1) for axis in ("tp", "pp", "ep"))
    return workers % ranks == 0 and (model == "gpt" or mode in DATA_ARMS)


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

    from nanoray.devices.host import keep_freed_memory
    from nanoray.trace.recorder import Clock, wait_for

    if mesh.device.type == "cpu":
        keep_freed_memory()  # as in a run; where memory is measured, what is freed should be gone

    def worst(ms: list[float]) -> list[float]:
        return list(mesh.all_reduce(torch.tensor(ms, device=mesh.device), op="max").tolist())

    arms = {name: _arm(mesh, order, own, traced=True) for name, own in order["arms"].items()}
    clock = Clock(mesh.device)
    emit({"recipe": next(iter(arms.values())).recipe})
    for turn in range(order["rounds"]):
        for name in rotated(list(arms), turn):
            arm = arms[name]
            mesh.barrier()
            start = time.perf_counter()
            marks = [clock.now()]
            for _ in range(order["steps"]):
                arm.step()
                arm.plan.zero_grad()
                marks.append(clock.now())
            arm.plan.settle()
            wait_for(mesh.device)
            step_ms = 1e3 * (time.perf_counter() - start) / order["steps"]
            clock.anchor()
            at = [clock.seconds(mark) for mark in marks]
            step_ms, *times = worst([step_ms, *(1e3 * (b - a) for a, b in pairwise(at))])
            event = {
                "arm": name,
                "round": turn,
                "step_ms": step_ms,
                "times_ms": times,
                **arm.traced_step(),
            }
            event["busy_ms"], event["exposed_ms"] = worst([event["busy_ms"], event["exposed_ms"]])
            event[SAMPLES] = arm.case.samples * arm.accum * arm.dp
            event[TOKENS] = event[SAMPLES] * arm.case.tokens
            event |= {"loss": mesh.all_reduce_mean(arm.loss.clone()).item(), "trained": arm.trained}
            emit(event)
    for arm in arms.values():
        arm.plan.close()


def memory_rank(mesh: Mesh, order: dict[str, Any], emit: Callable[[Any], None]) -> None:
    """Train a few steps of one arm; emit predicted and measured memory. (all ranks)

    The measured memory is that of the rank that held the most.
    """
    import torch

    from nanoray.devices.host import return_freed_memory

    if mesh.device.type == "cpu":
        return_freed_memory()
    (own,) = order["arms"].values()
    on_gpu = mesh.device.type == "cuda"
    resident = 0 if on_gpu else _resident("VmRSS")
    first = _arm(mesh, order, own, traced=False)
    # It loads code and generates kernels for these shapes, which are not an arm's memory.
    list(_steps(first, 1, lambda: 0))
    first.plan.close()
    del first
    gc.collect()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    else:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
    before = torch.cuda.memory_allocated() if on_gpu else _resident("VmRSS")
    libraries = f"libraries took {(before - resident) / 2**20:.3g} in a first step"

    def peak() -> int:
        return (torch.cuda.max_memory_allocated() if on_gpu else _resident("VmHWM")) - before

    arm = _arm(mesh, order, own, traced=False)
    found = list(_steps(arm, MEMORY_STEPS, peak))
    arm.plan.close()
    held, peaks = zip(*found, strict=True)
    own_found: dict[str, Any] = {
        "formula": arm.formula,
        "at_peak": arm.at_peak,
        "held": held,
        "peak": peaks,
    }
    everyone = mesh.gather(own_found)
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
        yield held, peak()
        arm.plan.zero_grad()


def _resident(key: str) -> int:
    """Return this process's resident memory (VmRSS) or its peak (VmHWM) in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])

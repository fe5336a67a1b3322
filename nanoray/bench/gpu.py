"""`python -m nanoray.bench step gpu`: what each change gains a step on a GPU, in ten minutes.

It also measures the seconds to a loss. A ladder per preset. Each rung keeps what the ones before it
have, but for those in brackets:

    float32              plain attention, torch's default AdamW, eager
    + tf32               --precision tf32: the tensor cores' products of float32, with 10 bits of each factor
    + bf16               --precision bf16
    + fused attention    --attention flash: the kernel that torch prefers
    + fused AdamW        one kernel for all parameters
    + compile            --compile: the blocks and the loss
    (cuDNN attention)    --attention cudnn in its place
    (CUDA graphs)        --compile cuda_graphs in its place
    (fp8), (fp8 by row)  --precision fp8 and fp8 with fp8_scaling row in the place of bf16
    (chunked loss)       --loss_chunk 4096
    (larger heads)       half as many heads, each of twice the size
    + batch x 2, x 4     micro batches of 2 and 4 times the preset's
    + best of these      the fastest batch, with each of cuDNN, CUDA graphs and chunked loss that gained 1 %
    + accumulation       8 micro batches a step, so that the update counts for as little as in a real run

One rung after the other has the device for itself, because they do not fit on it together. They run
in another order, the most wanted ones first: with --budget_s those that no time is left for are
skipped by name, and the JSON file is written after each rung. A ladder has a cache of compiled
kernels: only its first compiled rung waits for all of them. `products` are large matrix products,
timed before each ladder: what this device can do at most. Then `seconds to 1.47` trains nanoGPT's
baby GPT by the command, compiled and with CUDA graphs, from its start to an evaluation at that
loss, and compiles each time. What does not fit, or what an older GPU lacks, is skipped. --device
cpu runs all that a CPU has.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanoray.bench.harness.benchmark import Benchmark, Number, part
from nanoray.bench.harness.figure import Figure, measured
from nanoray.bench.harness.processes import arm_environment, scratch_folder
from nanoray.bench.harness.report import Record, Report, say
from nanoray.bench.harness.table import SPREAD, Table, TableColumn, names
from nanoray.bench.harness.trainings import chosen, data_flags, in_turns, settings_of
from nanoray.bench.ladder import (
    LADDER_TIMEOUT,
    LOSS,
    MEMORY,
    PRODUCTS,
    TOKENS,
    Ladder,
    add_ladder_flags,
    caches_of,
    draw_rungs,
    measured_arms,
    panels_of,
    product_flops,
    product_lines,
    products,
    skipped_lines,
)
from nanoray.bench.to_loss import RunToLoss, run_to_loss
from nanoray.config import load_config
from nanoray.config.choose import cannot_compile
from nanoray.data.prepare import prepare
from nanoray.errors import ConfigError, NanorayError
from nanoray.machine.device import Device
from nanoray.machine.gpus import discover_gpus
from nanoray.machine.host import available_cpus
from nanoray.machine.peaks import peak_flops
from nanoray.machine.slots import local_slots

BASE = "float32"
TF32 = "+ tf32"
CHAR = "shakespeare-char"
GPT2 = "gpt2-124m"
COMPILED = "+ compile"
CUDNN = "(cuDNN attention)"
GRAPHS = "(CUDA graphs)"
CHUNKED = "(chunked loss)"
BEST = "+ best of these"
LONG = "+ accumulation"
RUNGS: dict[str, Record] = {  # what each adds; keys with "_" are not the configuration's
    BASE: {
        "precision": "fp32",
        "attention": "plain",
        "compile": False,
        "loss_chunk": 0,
        "_unfused": True,
    },
    TF32: {"precision": "tf32"},
    "+ bf16": {"precision": "bf16"},
    "+ fused attention": {"attention": "flash"},
    "+ fused AdamW": {"_unfused": False},
    COMPILED: {"compile": True},
    CUDNN: {"attention": "cudnn"},
    GRAPHS: {"compile": "cuda_graphs"},
    "(fp8)": {"precision": "fp8"},
    "(fp8 by row)": {"precision": "fp8", "fp8_scaling": "row"},
    CHUNKED: {"loss_chunk": 4096},
    "(larger heads)": {"_larger": 2},
    "+ batch x 2": {"_batch": 2},
    "+ batch x 4": {"_batch": 4},
    BEST: {"_best": True},
    LONG: {"_accum": 8},
}
# The order in which they run: what the aims need, what has never run, then what it is compared with
BY_VALUE = (
    COMPILED,
    "+ batch x 4",
    CUDNN,
    GRAPHS,
    "+ batch x 2",
    BEST,
    LONG,
    "(fp8)",
    TF32,
    BASE,
    "(fp8 by row)",
    "+ bf16",
    CHUNKED,
    "(larger heads)",
    "+ fused attention",
    "+ fused AdamW",
)
assert sorted(BY_VALUE) == sorted(RUNGS)
BATCHES = (COMPILED, "+ batch x 2", "+ batch x 4")
GAIN = 1.01  # over "+ compile", from which on a change is one of the best
LADDERS: dict[str, Record] = {
    CHAR: {},
    GPT2: {"tokenizer": "auto", "micro_batch_size": 12, "global_batch_size": 12},
}
GPT2_TOKENS = 50257
BABY = "seconds to 1.47"
BABY_GRAPHS = f"{BABY} {GRAPHS}"
BABIES = {BABY: "true", BABY_GRAPHS: "cuda_graphs"}  # --compile of each
BABY_SEEDS = 3
BABY_LOSS = 1.47
BABY_S = 60.0
BABY_FLAGS: Record = {
    "preset": CHAR,
    "eval_every": 250,
    "sample_tokens": 0,
    "tensorboard": "false",
}
MFU = "MFU"
PEAK = "of products"
READY = "ready"
SECONDS = "seconds"
SIZES = {"cuda": 8192, "cpu": 512}
# Keys of rungs whose losses cannot be compared with the base's
OTHER_SIZES = {"_batch", "_larger", "_best", "_accum"}
MFU_AIM = 50.0  # percent, of gpt2-124m's fastest rung
AIMED_AT = ("H100", "H200")  # both aims


# What is shown.


def _ratio(report: Report, arm: str, spread: str) -> str:
    """Return the ratio of an arm to the one before it, whichever that is."""
    for row in report.rows:
        if row.unit == "ratio" and row.arm.startswith(f"{arm} / "):
            return report.cell(row.arm, TOKENS, spread)
    return ""


def _draw_speeds(axes: Any, report: Report, preset: str) -> None:
    """Draw the tokens per second of a ladder's rungs."""
    draw_rungs(axes, measured(report, [f"{preset}: {rung}" for rung in RUNGS], TOKENS))


class GPUBenchmark(Benchmark):
    """Measure what each option gains a step on one GPU."""

    # Wrong: rungs whose loss is not the base's, to 0.1 % in float32, 0.5 % in tf32, 2 % in bf16 and 5 % in fp8
    numbers = (
        Number("rounds", "blocks of steps of a rung", usual=5, few=2),
        Number("block_ms", "milliseconds of steps whose times are averaged", 2000.0),
        Number("budget_s", "seconds for everything; the rest is skipped", math.inf),
        LADDER_TIMEOUT,
    )
    tables = (
        Table(
            measured_arms,
            (
                names("rung"),
                TableColumn("tokens/s", TOKENS, SPREAD),
                TableColumn("/ the one before", _ratio, SPREAD),
                TableColumn("MFU, %", MFU),
                TableColumn("of products, %", PEAK),
                TableColumn("MiB", MEMORY),
                TableColumn("until ready, s", READY),
                TableColumn("loss", LOSS),
            ),
        ),
    )
    figure = Figure(panels_of(list(LADDERS), BASE, "tokens/s", _draw_speeds))

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Add this benchmark's flags."""
        parser.add_argument(
            "--device",
            choices=("auto", "cuda", "cpu"),
            default="auto",
            help="[a GPU if there is one]",
        )
        which = f"all | ladder | baby, or which of {', '.join([*RUNGS, *BABIES])}"
        add_ladder_flags(parser, list(LADDERS), which)

    def measure(self, args: argparse.Namespace, report: Report) -> None:
        """Climb the ladder of every preset, then train to the loss. Nothing that it starts outlives it."""
        # Refuse what cannot be measured before anything is prepared.
        args.deadline = time.monotonic() + args.budget_s
        groups = {"ladder": [*RUNGS], "baby": [*BABIES]}
        arms = groups.get(args.arms) or chosen(args.arms, [*RUNGS, *BABIES])
        babies = [arm for arm in BABIES if arm in arms]
        presets = chosen(args.presets, list(LADDERS), "preset")
        gpus = discover_gpus()
        overrides = settings_of(args)
        if BASE not in arms and arms != babies:
            raise ConfigError(f"arms = {args.arms}; the base is needed: add {BASE}")
        if args.device == "cuda" and not gpus:
            raise ConfigError(
                "device = cuda, but NVIDIA's driver shows no GPU here; use --device cpu to try it out"
            )
        # One device: a whole GPU, else a slice, else the CPU.
        kind = "cpu" if args.device == "cpu" else "auto"  # a whole GPU, else a slice
        gpu = next(iter(local_slots(kind, 1, gpus, available_cpus()).devices), None)
        if args.device == "cuda" and gpu is None:
            # Says what to do about a GPU in MIG mode without slices
            local_slots("cuda", 1, gpus, available_cpus())
        report.conditions["device"] = f"{gpu.name} {gpu.profile}".strip() if gpu else "cpu"
        # Runs, caches of compilers and tokens live in a folder that is deleted afterwards.
        with scratch_folder() as folder:
            for name in presets if arms != babies else []:
                # GPT-2's vocabulary matters for speed, its text does not: random tokens do.
                settings = LADDERS[name] | {"log_every": 5} | overrides
                device = "cuda" if gpu else "cpu"
                vocab_size = GPT2_TOKENS if name == GPT2 else 0
                ladder = GpuLadder.of_preset(
                    args, report, name, folder, device, settings, vocab_size
                )
                ladder.gpu = gpu
                with part(report, lambda ladder=ladder: _end_ladder(ladder)):  # type: ignore[misc]
                    _measure_ladder(ladder, [arm for arm in BY_VALUE if arm in arms])
            if babies and CHAR in presets:
                _train_babies(args, babies, gpu, overrides, folder, report)
        _add_targets(report, presets)

    def notes(self, report: Report) -> list[str]:
        """Return the products, the seconds to the loss, and what was left out."""
        lines = product_lines(report)
        for arm in BABIES:
            baby = report.row(arm, SECONDS)
            if baby and not baby.skipped:
                lines.append(f"{arm}: {report.cell(arm, SECONDS, 'range')} s, {baby.note}")
        return lines + skipped_lines(report)


# What is measured.


@dataclass
class GpuLadder(Ladder):
    """A ladder that is climbed rung by rung."""

    gpu: Device | None = None  # None: the CPU
    peaks: dict[str, float] = field(default_factory=dict)  # FLOP/s of products, by precision

    @property
    def left_s(self) -> float:
        """Seconds until this benchmark's budget is used up."""
        return float(self.args.deadline - time.monotonic())

    @property
    def timeout_s(self) -> float:
        """Seconds for an answer: some more than are left, so that the last rung need not be wasted."""
        return float(min(self.args.timeout_s, max(10.0, self.left_s)))

    def climb(self, rung: str, order: Record) -> None:
        """Run a rung that has the device for itself."""
        with ExitStack() as stack:
            self.start(rung, order, stack)
            self.run_rounds(self.args.rounds, self.args.block_ms)
        self.pools.clear()


def settings_at(rung: str) -> Record:
    """Return the settings of a rung: its own, and those of all before it that are kept."""
    # Alternatives in brackets are left out of the rungs after them.
    settings: Record = {}
    for name, own in RUNGS.items():
        if name == rung or not _is_alternative(name):
            settings |= own
        if name == rung:
            break
    return settings


def _is_alternative(rung: str) -> bool:
    """Whether the rungs after this one do without it, because it is another way to do the same."""
    return rung.startswith("(")


def before(rungs: list[str]) -> dict[str, str]:
    """Return for each rung but the first the rung that it is compared with.

    That is the newest rung whose change it keeps.
    """
    kept = [[r for r in rungs[:n] if not _is_alternative(r)] for n in range(len(rungs))]
    return {rung: of[-1] for rung, of in zip(rungs, kept, strict=True) if of}


def _measure_ladder(ladder: GpuLadder, rungs: list[str]) -> None:
    """Measure products of matrices in each precision, then the rungs in this order; add their rows."""
    # What the device reaches with large products is the peak that a step can be compared with.
    for precision, dtype in (("bf16", "bfloat16"), ("tf32", "float32"), ("fp32", "float32")):
        if precision == "tf32" and not (ladder.gpu and ladder.gpu.bf16):
            continue
        # The aims are in bf16, and each product takes the start of a process.
        if precision != "bf16" and math.isfinite(ladder.args.budget_s):
            continue
        _measure_products(ladder, precision, dtype)

    for rung in rungs:
        settings = settings_at(rung)
        if settings.get("_best"):
            settings |= _best_settings(ladder)
        why = _reason_to_skip(ladder, settings)
        if why:
            ladder.skipped[rung] = why
            ladder.add(rung, TOKENS, "1/s", ())
        else:
            _measure_rung(ladder, rung, settings)
        # A run that is cut off keeps what it has measured.
        if ladder.args.json:
            ladder.report.write(ladder.args.json)


def _end_ladder(ladder: GpuLadder) -> None:
    """Compare the losses of the rungs that have run, and sort the rows."""
    # Only for the same model and batch
    other = [rung for rung in RUNGS if settings_at(rung).keys() & OTHER_SIZES]
    ladder.compare_losses(BASE, not_same=other)
    # The rungs ran by value; a reader climbs from the base.
    place = {ladder.arm(rung): number for number, rung in enumerate(RUNGS)}
    ladder.report.rows.sort(key=lambda row: place.get(row.arm, -1))


def _measure_products(ladder: GpuLadder, precision: str, dtype: str) -> None:
    """Add the speed of large products; where they fail the ladder goes on without this peak."""
    size = SIZES[ladder.device]
    name = f"{PRODUCTS} {precision}"
    ladder.climb(name, products(size, dtype, tf32=precision == "tf32"))
    rates = [1e3 * product_flops(size) / ms for ms in ladder.step_ms.get(name, [])]
    if rates:
        ladder.peaks[precision] = sorted(rates)[len(rates) // 2]
    found = [rate / 1e12 for rate in rates]
    ladder.add(name, PRODUCTS, "TFLOP/s", found, f"matrices of {size} x {size}")


def _best_settings(ladder: GpuLadder) -> Record:
    """Return the fastest batch, and the changes that gained on `+ compile`; {} if that has no speed.

    fp8 and larger heads are left out: they are another arithmetic, and another model.
    """
    speeds = {}
    for rung in RUNGS:
        row = ladder.report.row(ladder.arm(rung), TOKENS)
        if row and row.values:
            speeds[rung] = row.median
    if COMPILED not in speeds:
        return {}
    fastest = max((rung for rung in BATCHES if rung in speeds), key=lambda rung: speeds[rung])
    best: Record = {"_batch": RUNGS[fastest].get("_batch", 1), "_chosen": [fastest]}
    for rung in (CUDNN, GRAPHS, CHUNKED):
        if speeds.get(rung, 0.0) > GAIN * speeds[COMPILED]:
            best |= RUNGS[rung]
            best["_chosen"] = [*best["_chosen"], rung]
    return best


def _reason_to_skip(ladder: GpuLadder, settings: Mapping[str, Any]) -> str | None:
    """Return why this device has no such rung; None if it has."""
    if ladder.left_s <= 0:
        return f"no time was left of budget_s = {ladder.args.budget_s:g}"
    if settings.get("_best") and "_chosen" not in settings:
        return f"{COMPILED} has no speed to choose by"
    # Options that a device does not have are skipped by name, not measured as something else.
    if ladder.device == "cpu":
        for key, of_gpus in (
            ("precision", "tf32"),
            ("precision", "fp8"),
            ("attention", "cudnn"),
            ("compile", "cuda_graphs"),
        ):
            if settings[key] == of_gpus:
                return f"{key} = {of_gpus} is for GPUs"
    elif ladder.gpu and not ladder.gpu.bf16 and settings["precision"] in ("tf32", "bf16"):
        return f"a GPU older than compute capability 8 has no {settings['precision']}"
    why = cannot_compile(ladder.device) if settings["compile"] else None
    return f"compile = true {why}" if why else None


def _measure_rung(ladder: GpuLadder, rung: str, settings: Mapping[str, Any]) -> None:
    """Run one rung and add its rows. Its failure is recorded, and the other rungs continue."""
    times = settings.get("_batch", 1)
    whole = ladder.config.global_batch_size
    micro = ladder.config.micro_batch_size or whole
    accum = settings.get("_accum", whole // micro)
    sizes = {"micro_batch_size": times * micro, "global_batch_size": accum * times * micro}
    sizes["n_head"] = ladder.config.n_head // settings.get("_larger", 1)
    try:
        ladder.climb(rung, ladder.open(rung, {**settings, **sizes}))
    except NanorayError as error:
        ladder.fail(rung, error)
    times_ms = ladder.step_ms.get(rung, [])
    if rung in ladder.failed or rung in ladder.skipped:
        ladder.add(rung, TOKENS, "1/s", ())
        return

    # Tokens per second compare rungs with different batches; milliseconds would not.
    config = ladder.configs[rung]
    tokens = config.global_batch_size * config.block_size
    rate = [1e3 * tokens / ms for ms in times_ms]
    say(f"{ladder.arm(rung):<38} {times_ms[-1]:.2f} ms, {rate[-1]:,.0f} tokens/s")
    note = f"{tokens} tokens a step"
    if "_chosen" in settings:
        note += f", {' '.join(settings['_chosen'])}"
    ladder.add(rung, TOKENS, "1/s", rate, note)

    # Shares of the device's peak: of the data sheet's, and of the one measured with products
    flops = ladder.flops_per_token(rung)
    stated = peak_flops(ladder.gpu, config.precision) if ladder.gpu else None
    if stated:
        shares = [100 * flops * each / stated for each in rate]
        ladder.add(rung, MFU, "%", shares, "of the data sheet")
    peak = ladder.peaks.get(config.precision)
    if peak:
        shares = [100 * flops * each / peak for each in rate]
        ladder.add(rung, PEAK, "%", shares, "as measured")
    if ladder.gpu:
        ladder.add(rung, MEMORY, "MiB", ladder.peak_bytes[rung] / 2**20, "most allocated")
    note = "process, imports, model, compiling, first step"
    ladder.add(rung, READY, "s", ladder.ready_s[rung][0], note)


def _train_babies(
    args: argparse.Namespace,
    arms: list[str],
    gpu: Device | None,
    overrides: Mapping[str, Any],
    folder: Path,
    report: Report,
) -> None:
    """Train the baby GPT by its command until an evaluation reaches the loss, in each arm.

    Each run has a seed of its own.
    """
    # Data are prepared before any clock starts.
    target = float(overrides.get("target_loss", BABY_LOSS))
    info = prepare(load_config(preset=CHAR, overrides=dict(data_flags(args))))  # before any clock
    report.conditions["data"] = info.note
    flags = BABY_FLAGS | {"device": gpu.kind if gpu else "cpu", "target_loss": target}
    flags |= data_flags(args) | dict(overrides)
    if args.dataset == "auto" and info.name == "shakespeare":
        flags["dataset"] = info.name  # which `auto` would look for again
    if gpu is None and BABY_GRAPHS in arms:
        arms = [arm for arm in arms if arm != BABY_GRAPHS]
        why = "compile = cuda_graphs is for GPUs"
        report.add(BABY_GRAPHS, SECONDS, "s", (), skipped=why)

    # Three seeds, because one run may reach the loss by luck. The arms take turns: where the budget
    # ends early, each has as many.
    runs: dict[str, list[RunToLoss]] = {arm: [] for arm in arms}
    errors: dict[str, str] = {}
    longest_s = 0.0

    def run(arm: str, seed: int) -> None:
        nonlocal longest_s
        left_s = args.deadline - time.monotonic()
        if left_s < 1.2 * longest_s:
            return
        own = folder / f"baby-{arms.index(arm)}-{seed}"
        env = arm_environment() | caches_of(folder, own.name)
        env["CUDA_VISIBLE_DEVICES"] = gpu.uuid if gpu else ""
        compiled = {"compile": BABIES[arm]} | dict(overrides)
        begun = time.monotonic()
        limit_s = min(max(args.timeout_s, 1800.0), max(10.0, left_s))
        of_run = flags | compiled | {"seed": seed}
        found = run_to_loss(("-m", "nanoray.train"), of_run, env, own, limit_s)
        runs[arm].append(found)
        longest_s = max(longest_s, time.monotonic() - begun)
        say(f"{arm}: {found.seconds:.1f} s, {found.steps} steps, {found.loss:.4f}")

    def fail(arm: str, error: Exception) -> None:
        errors[arm] = f"{arm}: {error}"
        report.failures.append(errors[arm])

    in_turns(arms, 1 if args.quick else BABY_SEEDS, errors, run, fail)
    for arm in arms:
        _add_baby(arm, runs[arm], errors.get(arm, ""), target, info.name, args, report)


def _add_baby(
    arm: str,
    runs: list[RunToLoss],
    error: str,
    target: float,
    text: str,
    args: argparse.Namespace,
    report: Report,
) -> None:
    """Add the rows of one arm's runs to the loss."""
    if not runs and not error:
        why = f"no time was left of budget_s = {args.budget_s:g}"
        report.add(arm, SECONDS, "s", (), skipped=why)
        return
    # A run that ends above the loss must not look fast.
    missed = sum(run.loss > target for run in runs)
    note = "from the command"
    if missed:
        note += f"; {missed} of {len(runs)} ended above the loss"
    seconds = [run.seconds for run in runs]
    first_line = error.partition("\n")[0]
    extra = {"missed": missed, "text": text}
    report.add(arm, SECONDS, "s", seconds, note, error=first_line, extra=extra)
    if runs:
        report.add(arm, LOSS, "", (run.loss for run in runs), "validation")


def _add_targets(report: Report, presets: list[str]) -> None:
    """Add each rung's ratio to the rung before it, and the targets of an H100 or H200."""
    # Each rung against the newest one whose change it keeps.
    for preset in presets:
        rows = measured(report, [f"{preset}: {rung}" for rung in RUNGS], TOKENS)
        rungs = [row.arm.partition(": ")[2] for row in rows]
        for rung, other in before(rungs).items():
            report.compare(f"{preset}: {rung}", f"{preset}: {other}", TOKENS)
    # The aims were set for two cards; elsewhere they are shown and not judged.
    if any(name in report.conditions["device"] for name in AIMED_AT):
        other = ""
    else:
        other = "the aim is for an H100 or H200"
    # By tokens, because each precision's MFU is a share of another peak.
    # fp8 is left out: it is another arithmetic, and its peak is in no table.
    rungs = [rung for rung in RUNGS if not rung.startswith("(fp8")]
    rows = measured(report, [f"{GPT2}: {rung}" for rung in rungs], TOKENS)
    fastest = max(rows, key=lambda row: row.median, default=None)
    mfu = report.row(fastest.arm, MFU) if fastest else None
    if fastest and mfu:
        report.add_target(f"MFU, {fastest.arm}, %", mfu, ">=", MFU_AIM, other)
    babies = measured(report, list(BABIES), SECONDS)
    baby = min(babies, key=lambda row: row.median, default=None)
    if baby and report.conditions["device"] != "cpu":
        excuse = "a run ended above the loss" if baby.extra["missed"] else other
        if baby.extra["text"] != "shakespeare":
            excuse = f"the loss is tiny Shakespeare's, and the text is {baby.extra['text']}"
        report.add_target(f"{baby.arm}, s", baby, "<=", BABY_S, excuse)

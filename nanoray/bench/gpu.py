"""`python -m nanoray.bench gpu`: what each change gains a step on a GPU, in ten minutes.

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
    (fp8), (fp8 by row)  --precision fp8 and fp8:row in the place of bf16
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
import json
import math
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanoray.base.atomic import read_json_lines
from nanoray.bench.harness.benchmark import Benchmark
from nanoray.bench.harness.figure import figure, measured, whiskers
from nanoray.bench.harness.plan import (
    add_data_flags,
    add_settings_flag,
    chosen,
    data_flags,
    settings_of,
)
from nanoray.bench.harness.processes import Child, ChildFailed, arm_environment, scratch_folder
from nanoray.bench.harness.report import Measurement, Report, Target, aligned, markdown, say
from nanoray.bench.speedrun import Record, SpeedrunResult, run_once
from nanoray.bench.step import random_tokens
from nanoray.config import Config, load_config, make_config
from nanoray.data.dataset import DatasetInfo
from nanoray.data.prepare import prepare
from nanoray.errors import ConfigError, NanorayError
from nanoray.host.choose import cannot_compile
from nanoray.host.device import Device
from nanoray.host.gpus import discover_gpus
from nanoray.host.host import available_cpus
from nanoray.host.peaks import peak_flops
from nanoray.host.slots import local_slots
from nanoray.start.folder import open_run

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
RUNGS: dict[str, dict[str, Any]] = {  # what each adds; keys with "_" are not the configuration's
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
    "(fp8 by row)": {"precision": "fp8:row"},
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
LADDERS: dict[str, dict[str, Any]] = {
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
BABY_FLAGS: dict[str, Any] = {
    "eval_every": 250,
    "sample_tokens": 0,
    "tensorboard": "false",
}
BABY_RECORD = Record(BABY_LOSS, CHAR, {}, "nanoGPT's baby GPT")
TOKENS = "tokens"
MFU = "MFU"
PEAK = "of products"
MEMORY = "memory"
READY = "ready"
LOSS = "loss"
SECONDS = "seconds"
PRODUCTS = "products"
SIZES = {"cuda": 8192, "cpu": 512}
# Relative, to that of the base, at the same batch
SAME_LOSS = {"fp32": 1e-3, "tf32": 5e-3, "bf16": 2e-2, "fp8": 5e-2}
BLOCK_MS = 2000.0  # of steps whose times are averaged
MFU_AIM = 50.0  # percent, of gpt2-124m's fastest rung
AIMED_AT = ("H100", "H200")  # both aims


class GPUBenchmark(Benchmark):
    """Measure what each option gains a step on one GPU."""

    wrong = (
        "rungs whose loss is not the base's, to 0.1 % in float32, 0.5 % in tf32, 2 % in bf16 and "
        "5 % in fp8"
    )

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Add this benchmark's flags."""
        parser.add_argument(
            "--device",
            choices=("auto", "cuda", "cpu"),
            default="auto",
            help="[a GPU if there is one]",
        )
        parser.add_argument(
            "--presets", default="all", metavar="A,B", help=f"which of {', '.join(LADDERS)} [all]"
        )
        parser.add_argument(
            "--arms",
            default="all",
            metavar="A,B",
            help=f"all | ladder | baby, or which of {', '.join([*RUNGS, *BABIES])} [all]",
        )
        parser.add_argument(
            "--rounds", type=int, metavar="N", help="blocks of steps of a rung [5; 2 with --quick]"
        )
        add_settings_flag(parser, "each preset's")
        add_data_flags(parser)
        late = "seconds after which a rung that says nothing has failed [%(default)g]"
        parser.add_argument("--timeout_s", type=float, default=300, help=late)
        block = "milliseconds of steps whose times are averaged [%(default)g]"
        parser.add_argument("--block_ms", type=float, default=BLOCK_MS, help=block)
        budget = "seconds for everything; what no time is left for is skipped [as long as it takes]"
        parser.add_argument("--budget_s", type=float, default=math.inf, help=budget)

    def measure(self, args: argparse.Namespace, report: Report) -> None:
        """Climb the ladder of every preset, then train to the loss. Nothing that it starts outlives it."""
        # Refuse what cannot be measured before anything is prepared.
        args.rounds = args.rounds or (2 if args.quick else 5)
        args.deadline = time.monotonic() + args.budget_s
        groups = {"ladder": [*RUNGS], "baby": [*BABIES]}
        arms = groups.get(args.arms) or chosen(args.arms, [*RUNGS, *BABIES])
        babies = [arm for arm in BABIES if arm in arms]
        presets = chosen(args.presets, list(LADDERS), "preset")
        gpus = discover_gpus()
        overrides = settings_of(args)
        if args.rounds < 1 or (BASE not in arms and arms != babies):
            raise ConfigError(
                f"rounds = {args.rounds}, arms = {args.arms}; at least 1 round, and {BASE}, are needed"
            )
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
            if arms == babies:
                ladders = []
            else:
                ladders = presets
            for name in ladders:
                # No evaluation, checkpoint or TensorBoard: the ladder is about the step.
                values = {
                    **LADDERS[name],
                    "out_dir": str(folder),
                    "max_steps": 10**6,
                    "eval_every": 0,
                    "log_every": 5,
                    "checkpoint_every": 0,
                    "tensorboard": False,
                    "device": "cuda" if gpu else "cpu",
                    **data_flags(args),
                }
                # GPT-2's vocabulary matters for speed, its text does not: random tokens do.
                if name == GPT2:
                    values["dataset"] = str(random_tokens(folder / "random-tokens", GPT2_TOKENS))
                config = load_config(preset=name, overrides=values | overrides)
                ladder = GpuLadder(args, name, config, prepare(config), folder, gpu)
                _measure_ladder(ladder, [arm for arm in BY_VALUE if arm in arms], report)
            if babies and CHAR in presets:
                _train_babies(args, babies, gpu, overrides, folder, report)
        _add_targets(report, presets)

    def format_text(self, report: Report) -> list[str]:
        """Return a line per rung, the products, the seconds to the loss, and what was left out."""
        # The rungs, then the products, the seconds to the loss, and what was skipped.
        found = aligned(
            [(*line, "") for line in _build_table(report, "quartiles")], right=set(range(1, 8))
        )
        products = [row for row in report.rows if row.metric == PRODUCTS]
        found += [
            "",
            *(
                f"{row.arm}: {report.cell(row.arm, PRODUCTS)} TFLOP/s, {row.note}"
                for row in products
            ),
        ]
        for arm in BABIES:
            baby = report.row(arm, SECONDS)
            if baby and not baby.skipped:
                found.append(f"{arm}: {report.cell(arm, SECONDS, 'range')} s, {baby.note}")
        return found + [f"skipped  {row.arm}: {row.skipped}" for row in report.rows if row.skipped]

    def format_markdown(self, report: Report) -> list[str]:
        """Return the table for a page."""
        head, *body = _build_table(report, "range")
        return markdown(head, body)

    def draw(self, report: Report, path: Path) -> None:
        """Draw each ladder: tokens per second of its rungs, medians with their quartiles."""
        ladders = [name for name in LADDERS if report.row(f"{name}: {BASE}", TOKENS)]
        with figure(report, path, (11, 3.6), (1, max(1, len(ladders)))) as every:
            # One ladder after the other, the base on top.
            for axes, name in zip(every, ladders, strict=False):
                rows = measured(report, [f"{name}: {rung}" for rung in RUNGS], TOKENS)
                names = [row.arm.partition(": ")[2] for row in rows]
                medians = [row.median for row in rows]
                if rows:
                    axes.barh(
                        names, medians, xerr=whiskers(rows, quartiles=True), capsize=3, color="0.6"
                    )
                axes.set(title=name, xlabel="tokens/s")
                axes.tick_params(labelsize=7)
                axes.invert_yaxis()


@dataclass
class GpuLadder:
    """One preset on one device, and what its rungs came to."""

    args: argparse.Namespace
    name: str
    config: Config
    data: DatasetInfo
    folder: Path
    gpu: Device | None  # None: the CPU
    peaks: dict[str, float] = field(default_factory=dict)  # FLOP/s of products, by precision
    configs: dict[str, Config] = field(default_factory=dict)  # of the rungs that have run
    losses: dict[str, dict[int, float]] = field(default_factory=dict)  # their logged steps'

    @property
    def device(self) -> str:
        return "cuda" if self.gpu else "cpu"

    @property
    def left_s(self) -> float:
        """Seconds until this benchmark's budget is used up."""
        return float(self.args.deadline - time.monotonic())

    def say(self, text: str) -> None:
        say(f"{self.name}: {text}")


def settings_at(rung: str) -> dict[str, Any]:
    """Return the settings of a rung: its own, and those of all before it that are kept."""
    # Alternatives in brackets are left out of the rungs after them.
    settings: dict[str, Any] = {}
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


def _measure_ladder(ladder: GpuLadder, rungs: list[str], report: Report) -> None:
    """Measure products of matrices in each precision, then the rungs in this order; add their rows."""
    # What the device reaches with large products is the peak that a step can be compared with.
    for precision, dtype in (("bf16", "bfloat16"), ("tf32", "float32"), ("fp32", "float32")):
        if precision == "tf32" and not (ladder.gpu and ladder.gpu.bf16):
            continue
        # The aims are in bf16, and each product takes the start of a process.
        if precision != "bf16" and math.isfinite(ladder.args.budget_s):
            continue
        size = SIZES[ladder.device]
        order = {
            "arm": "products",
            "size": size,
            "dtype": dtype,
            "tf32": precision == "tf32",
            "steps": 20,
        }
        arm = f"{ladder.name}: {PRODUCTS} {precision}"
        values = []
        # A failed measurement is reported, and the ladder goes on without this peak.
        try:
            values = [2 * size**3 / ms * 1e3 for ms in _run_process(ladder, order, arm)["step_ms"]]
            ladder.peaks[precision] = sorted(values)[len(values) // 2]
        except ChildFailed as error:
            report.failures.append(f"{arm}: {error}")
        found = tuple(value / 1e12 for value in values)
        report.rows.append(
            Measurement(arm, PRODUCTS, "TFLOP/s", found, f"matrices of {size} x {size}")
        )

    for rung in rungs:
        settings = settings_at(rung)
        if settings.get("_best"):
            settings |= _best_settings(ladder, report)
        why = _reason_to_skip(ladder, settings)
        if why:
            report.rows.append(Measurement(_arm_name(ladder, rung), TOKENS, "1/s", (), skipped=why))
        else:
            _measure_rung(ladder, rung, settings, report)
        # A run that is cut off keeps what it has measured.
        if ladder.args.json:
            report.write(ladder.args.json)

    # The rungs ran by value; a reader climbs from the base.
    _compare_losses(ladder, report)
    place = {_arm_name(ladder, rung): number for number, rung in enumerate(RUNGS)}
    report.rows.sort(key=lambda row: place.get(row.arm, -1))


def _best_settings(ladder: GpuLadder, report: Report) -> dict[str, Any]:
    """Return the fastest batch, and the changes that gained on `+ compile`; {} if that has no speed.

    fp8 and larger heads are left out: they are another arithmetic, and another model.
    """
    speeds = {}
    for rung in RUNGS:
        row = report.row(_arm_name(ladder, rung), TOKENS)
        if row and row.values:
            speeds[rung] = row.median
    if COMPILED not in speeds:
        return {}
    fastest = max((rung for rung in BATCHES if rung in speeds), key=lambda rung: speeds[rung])
    best: dict[str, Any] = {"_batch": RUNGS[fastest].get("_batch", 1), "_chosen": [fastest]}
    for rung in (CUDNN, GRAPHS, CHUNKED):
        if speeds.get(rung, 0.0) > GAIN * speeds[COMPILED]:
            best |= RUNGS[rung]
            best["_chosen"] = [*best["_chosen"], rung]
    return best


def _reason_to_skip(ladder: GpuLadder, settings: Mapping[str, Any]) -> str:
    """Return why this device has no such rung, or ""."""
    if ladder.left_s <= 0:
        return f"no time was left of budget_s = {ladder.args.budget_s:g}"
    if settings.get("_best") and "_chosen" not in settings:
        return f"{COMPILED} has no speed to choose by"
    # Options that a device does not have are skipped by name, not measured as something else.
    if ladder.device == "cpu":
        for key, of_gpus in (
            ("precision", "tf32"),
            ("precision", "fp8"),
            ("precision", "fp8:row"),
            ("attention", "cudnn"),
            ("compile", "cuda_graphs"),
        ):
            if settings[key] == of_gpus:
                return f"{key} = {of_gpus} is for GPUs"
    elif ladder.gpu and not ladder.gpu.bf16 and settings["precision"] in ("tf32", "bf16"):
        return f"a GPU older than compute capability 8 has no {settings['precision']}"
    why = cannot_compile(ladder.device) if settings["compile"] else None
    return f"compile = true {why}" if why else ""


def _measure_rung(
    ladder: GpuLadder,
    rung: str,
    settings: Mapping[str, Any],
    report: Report,
) -> None:
    """Run one rung and add its rows. Its failure is recorded, and the other rungs continue."""
    from nanoray.models.costs import flops_per_token
    from nanoray.models.gpt import ModelShape

    # Keys with an underscore change sizes; all others are keys of the configuration.
    times = settings.get("_batch", 1)
    larger = settings.get("_larger", 1)
    own = {key: value for key, value in settings.items() if not key.startswith("_")}
    whole = ladder.config.global_batch_size
    micro = ladder.config.micro_batch_size or whole
    accum = settings.get("_accum", whole // micro)
    sizes = {"micro_batch_size": times * micro, "global_batch_size": accum * times * micro}
    sizes["n_head"] = ladder.config.n_head // larger
    name = rung.strip("+ ()").replace(" ", "-")
    arm = _arm_name(ladder, rung)
    # The rung trains with the real engine, in a process that answers how long blocks of steps take.
    try:
        config = make_config(
            ladder.config.model_dump() | own | sizes | {"name": f"{ladder.name}-{name}"}
        )
        spec = open_run(config, ladder.data, time.time())
        order = {"arm": "engine", "rank": 0, "world": 1, "spec": str(spec.folder / "run.json")}
        found = _run_process(ladder, order | {"unfused": settings["_unfused"]}, arm)
    except (ChildFailed, NanorayError) as error:
        if ladder.gpu and "OutOfMemoryError" in str(error):
            why = f"does not fit in {ladder.gpu.memory_bytes / 2**30:.0f} GiB"
            report.rows.append(Measurement(arm, TOKENS, "1/s", (), skipped=why))
            return
        report.failures.append(f"{arm}: {error}")
        report.rows.append(Measurement(arm, TOKENS, "1/s", (), error=str(error).splitlines()[0]))
        return
    # Tokens per second compare rungs with different batches; milliseconds would not.
    tokens = config.global_batch_size * config.block_size
    rate = [1e3 * tokens / ms for ms in found["step_ms"]]
    ladder.say(f"{rung:<20} {found['step_ms'][-1]:.2f} ms, {rate[-1]:,.0f} tokens/s")
    flops = flops_per_token(ModelShape.of(config, ladder.data.vocab_size))
    note = f"{tokens} tokens a step"
    if "_chosen" in settings:
        note += f", {' '.join(settings['_chosen'])}"
    report.rows.append(Measurement(arm, TOKENS, "1/s", tuple(rate), note))

    # Shares of the device's peak: of the data sheet's, and of the one measured with products
    stated = peak_flops(ladder.gpu, config.precision) if ladder.gpu else None
    if stated:
        shares = tuple(100 * flops * each / stated for each in rate)
        report.rows.append(Measurement(arm, MFU, "%", shares, "of the data sheet"))
    peak = ladder.peaks.get(config.precision)
    if peak:
        shares = tuple(100 * flops * each / peak for each in rate)
        report.rows.append(Measurement(arm, PEAK, "%", shares, "as measured"))
    if found["peak_bytes"]:
        report.rows.append(
            Measurement(arm, MEMORY, "MiB", (found["peak_bytes"] / 2**20,), "most allocated")
        )
    report.rows.append(
        Measurement(
            arm, READY, "s", (found["ready_s"],), "process, imports, model, compiling, warm-up"
        )
    )
    # The loss of each logged step, for the comparison with the base.
    records = read_json_lines(spec.folder / "metrics.jsonl")
    ladder.losses[rung] = {r["step"]: r["train/loss"] for r in records if "train/loss" in r}
    ladder.configs[rung] = config


def _compare_losses(ladder: GpuLadder, report: Report) -> None:
    """Compare each rung's loss with the base's, at the last step that both have logged."""
    base = ladder.losses.get(BASE, {})
    for rung, losses in ladder.losses.items():
        step = min(max(losses, default=0), max(base, default=0))
        if not step or step not in losses or step not in base:
            continue
        config = ladder.configs[rung]
        settings = settings_at(rung)
        wrong = None
        # Only for the same model and batch; and with dropout other kernels draw other masks
        same_sizes = not settings.keys() & {"_batch", "_larger", "_best", "_accum"}
        if same_sizes and not config.dropout:
            tolerance = SAME_LOSS[config.precision]
            wrong = 0 if math.isclose(losses[step], base[step], rel_tol=tolerance) else 1
        arm = _arm_name(ladder, rung)
        report.rows.append(
            Measurement(arm, LOSS, "", (losses[step],), f"of step {step}", wrong=wrong)
        )


def _run_process(ladder: GpuLadder, order: dict[str, Any], arm: str) -> dict[str, Any]:
    """Run one process; return ms per step of each block, peak memory and start seconds."""
    # The order travels as JSON on the command line.
    order |= {"device": ladder.device, "threads": max(1, int(available_cpus()))}
    name = re.sub("[^a-zA-Z0-9+]+", "-", arm)
    env = _make_environment(ladder.gpu, ladder.folder, ladder.name)
    log = ladder.folder / f"{name}.log"
    begin = time.monotonic()
    argv = [sys.executable, "-m", "nanoray.bench.step_rank", json.dumps(order)]
    # Of the budget, some seconds more, so that the last rung need not be wasted
    timeout_s = min(ladder.args.timeout_s, max(10.0, ladder.left_s))
    # The child says when it is ready, then times as many steps as it is asked for.
    with Child(argv, env, log, pipes=True) as child:
        child.answer(timeout_s)
        ready_s = time.monotonic() - begin
        steps = order.get("steps", 3)
        answers = []
        # The first one does not count: caches fill, clocks rise
        for turn in range(-1, ladder.args.rounds):
            child.ask(str(steps))
            answers.append(child.answer(timeout_s))
            # Blocks of equal time: a fast rung does more steps in a block.
            if turn < 0 and not ladder.args.quick:
                steps = max(3, round(ladder.args.block_ms / answers[0]["step_ms"]))
    found = [answer["step_ms"] for answer in answers[1:]]
    return {"step_ms": found, "ready_s": ready_s, "peak_bytes": answers[-1].get("peak_bytes", 0)}


def _make_environment(gpu: Device | None, folder: Path, name: str) -> dict[str, str]:
    """Return the environment of a process that sees the one device.

    Processes of one name share a cache of compiled kernels, which is empty at first.
    """
    env = arm_environment() | {
        "TMPDIR": str(folder / "tmp"),
        "CUDA_VISIBLE_DEVICES": gpu.uuid if gpu else "",
    }
    return env | {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor" / name)}


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
        report.rows.append(Measurement(BABY_GRAPHS, SECONDS, "s", (), skipped=why))

    # Three seeds, because one run may reach the loss by luck. The arms take turns: where the budget
    # ends early, each has as many.
    runs: dict[str, list[SpeedrunResult]] = {arm: [] for arm in arms}
    errors: dict[str, str] = {}
    longest_s = 0.0
    for seed in range(1 if args.quick else BABY_SEEDS):
        for arm in (arm for arm in arms if arm not in errors):
            left_s = args.deadline - time.monotonic()
            if left_s < 1.2 * longest_s:
                continue
            own = folder / f"baby-{arms.index(arm)}-{seed}"
            env = _make_environment(gpu, folder, own.name)
            compiled = {"compile": BABIES[arm]} | dict(overrides)
            begun = time.monotonic()
            try:
                limit_s = min(max(args.timeout_s, 1800.0), max(10.0, left_s))
                found = run_once(BABY_RECORD, flags | compiled | {"seed": seed}, env, own, limit_s)
            except ChildFailed as failed:
                errors[arm] = f"{arm}: {failed}"
                report.failures.append(errors[arm])
                continue
            runs[arm].append(found)
            longest_s = max(longest_s, time.monotonic() - begun)
            say(f"{arm}: {found.seconds:.1f} s, {found.steps} steps, {found.loss:.4f}")
    for arm in arms:
        _add_baby(arm, runs[arm], errors.get(arm, ""), target, info.name, args, report)


def _add_baby(
    arm: str,
    runs: list[SpeedrunResult],
    error: str,
    target: float,
    text: str,
    args: argparse.Namespace,
    report: Report,
) -> None:
    """Add the rows of one arm's runs to the loss."""
    if not runs and not error:
        why = f"no time was left of budget_s = {args.budget_s:g}"
        report.rows.append(Measurement(arm, SECONDS, "s", (), skipped=why))
        return
    # A run that ends above the loss must not look fast.
    missed = sum(run.loss > target for run in runs)
    note = "from the command"
    if missed:
        note += f"; {missed} of {len(runs)} ended above the loss"
    seconds = tuple(run.seconds for run in runs)
    first_line = error.partition("\n")[0]
    extra = {"missed": missed, "text": text}
    report.rows.append(Measurement(arm, SECONDS, "s", seconds, note, first_line, extra=extra))
    if runs:
        report.rows.append(
            Measurement(arm, LOSS, "", tuple(run.loss for run in runs), "validation")
        )


def _arm_name(ladder: GpuLadder, rung: str) -> str:
    return f"{ladder.name}: {rung}"


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
        report.targets.append(Target(f"MFU, {fastest.arm}, %", mfu, ">=", MFU_AIM, other))
    babies = measured(report, list(BABIES), SECONDS)
    baby = min(babies, key=lambda row: row.median, default=None)
    if baby and report.conditions["device"] != "cpu":
        excuse = "a run ended above the loss" if baby.extra["missed"] else other
        if baby.extra["text"] != "shakespeare":
            excuse = f"the loss is tiny Shakespeare's, and the text is {baby.extra['text']}"
        report.targets.append(Target(f"{baby.arm}, s", baby, "<=", BABY_S, excuse))


def _build_table(report: Report, spread: str) -> list[tuple[str, ...]]:
    ends = {
        MFU: "MFU, %",
        PEAK: "of products, %",
        MEMORY: "MiB",
        READY: "until ready, s",
        LOSS: "loss",
    }
    table: list[tuple[str, ...]] = [("rung", "tokens/s", "/ the one before", *ends.values())]
    for row in report.rows:
        if row.metric != TOKENS or row.unit != "1/s" or row.skipped:
            continue
        cells = [report.cell(row.arm, metric, "none") for metric in ends]
        ratio = ""
        for other in report.rows:
            if other.unit == "ratio" and other.arm.startswith(f"{row.arm} / "):
                ratio = report.cell(other.arm, TOKENS, spread)
                break
        table.append((row.arm, report.cell(row.arm, TOKENS, spread), ratio, *cells))
    return table

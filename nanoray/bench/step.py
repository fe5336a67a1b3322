"""`python -m nanoray.bench step cpu`: what each option gains a step on CPU, and the ceiling.

A ladder per preset: each rung is the `base` with one thing changed.

    base                      one process on all cores, float32, the attention of `auto`, fused AdamW, eager
    plain attention           --attention plain: two batched products and a softmax, which `auto` takes with dropout
    fused attention           --attention flash, torch's own, which `auto` takes without
    unfused AdamW             torch's default AdamW
    chunked loss              --loss_chunk
    compile                   --compile
    bf16                      --precision bf16 --attention flash
    bf16 + plain attention    --precision bf16 --attention plain
    one thread                the base on one of the cores
    two ranks                 one rank per core, on two cores
    two ranks + audit 10      two ranks with --audit_every 10, and 1: beside two ranks, what an audit costs
    eager loop                a peer: the loop that people write first (compute.py)
    eager loop + kept memory  the same, and glibc keeps freed memory, as every nanoray rank lets it
    nanogpt                   a peer: nanoGPT's own train.py, where --nanogpt names its folder

All arms of a preset stay alive and run blocks of steps in turn; products of two large matrices, in
float32 and in bf16, run in the same rounds and are the ceiling that `of peak` refers to. Batches
are smaller than a preset's where a step would take too long, and the notes list them. The
loss is that of the tenth step: all arms but the peers saw the same samples. With dropout it is shown
and not compared, because other kernels draw other masks.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoray.bench.harness.benchmark import Benchmark, Number, part
from nanoray.bench.harness.figure import Figure, with_values
from nanoray.bench.harness.processes import arm_environment, scratch_folder
from nanoray.bench.harness.report import Record, Report, say
from nanoray.bench.harness.table import SPREAD, Table, TableColumn, names
from nanoray.bench.harness.trainings import chosen, settings_of
from nanoray.bench.ladder import (
    LADDER_TIMEOUT,
    LOSS,
    MEMORY,
    PRODUCTS,
    TOKENS,
    Ladder,
    add_ladder_flags,
    draw_rungs,
    measured_arms,
    panels_of,
    product_flops,
    product_lines,
    products,
    skipped_lines,
)
from nanoray.bench.peers.nanogpt import NanoGPT
from nanoray.config.choose import BF16_UNITS, cannot_compile
from nanoray.errors import ConfigError
from nanoray.machine.host import (
    available_cpus,
    available_memory_bytes,
    cpu_features,
    resident_bytes,
)

BASE = "base"
EAGER = "eager loop"
PEER = "nanogpt"
TWO = "two ranks"
BEST = "bf16 + plain attention"
PLAIN = "plain attention"
FUSED = "fused attention"
# Settings of the run; those with "_" are not the configuration's
RUNGS: dict[str, Record] = {
    BASE: {},
    PLAIN: {"attention": "plain"},
    FUSED: {"attention": "flash"},
    "unfused AdamW": {"_unfused": True},
    "chunked loss": {"loss_chunk": 128},
    "compile": {"compile": True},
    "bf16": {"precision": "bf16", "attention": "flash"},
    BEST: {"precision": "bf16", "attention": "plain"},
    "one thread": {"_threads": 1},
    TWO: {"_ranks": 2},
    f"{TWO} + audit 10": {"_ranks": 2, "audit_every": 10},
    f"{TWO} + audit 1": {"_ranks": 2, "audit_every": 1},
    EAGER: {"_eager": True},
    "eager loop + kept memory": {"_eager": True, "_keep": True},
}
ARMS = (*RUNGS, PEER)
PEAK = "of peak"
READY = "until ready"
SIZE = 1024  # rows and columns of the matrices of a product
GIB_PER_ARM = 2.8  # of the largest ladder
BLOCK_MS = 3000.0
LEAST_OF_PEER = 5  # steps: it starts anew in each round
# Times nanoGPT: in float32, in bf16 with units
AIMS = {"shakespeare-cpu": (1.1, 1.4), "shakespeare-char": (1.15, 2.5)}


@dataclass(frozen=True)
class StepLadder:
    """What is trained of a preset, and which rungs it has."""

    settings: Mapping[str, Any]
    rungs: tuple[str, ...]
    # > 0: random tokens of so large a vocabulary, where its data set cannot be had everywhere
    tokens: int = 0


LADDERS = {
    "shakespeare-cpu": StepLadder({}, tuple(arm for arm in ARMS if arm != FUSED)),
    "shakespeare-char": StepLadder(
        {"global_batch_size": 4}, tuple(arm for arm in ARMS if arm != PLAIN)
    ),
    "gpt2-124m": StepLadder(
        {
            "tokenizer": "auto",
            "block_size": 256,
            "micro_batch_size": 1,
            "global_batch_size": 1,
            "compile": False,
        },
        (BASE, PLAIN, "chunked loss", "compile", "bf16", BEST, EAGER, PEER),
        tokens=50257,
    ),
}


# What is shown.


def _preset_of(arm: str) -> str:
    return arm.partition(": ")[0]


def _base_of(arm: str) -> str:
    return f"{_preset_of(arm)}: {BASE}"


def _peer_of(arm: str) -> str:
    return f"{_preset_of(arm)}: {PEER}"


def _compile_seconds(report: Report, arm: str, spread: str) -> str:
    """Return the extra start seconds of a compiled arm, cold and from a cache; "" for others."""
    # The base starts the same process without a compiler: the difference is what compiling takes.
    row = report.row(arm, READY)
    base = report.row(_base_of(arm), READY)
    if not (row and base and row.values and base.values and "cached_s" in row.extra):
        return ""
    return f"{row.median - base.median:.1f}, then {row.extra['cached_s'] - base.median:.1f}"


def _draw_ratios(axes: Any, report: Report, preset: str) -> None:
    """Draw the tokens per second of a ladder's rungs beside the base's."""
    end = f" / {preset}: {BASE}"
    ratios = with_values(report, TOKENS, ratios=True)
    draw_rungs(axes, [row for row in ratios if row.arm.endswith(end)])
    axes.axvline(1.0, color="C3", linewidth=1)


class StepBenchmark(Benchmark):
    """Measure what each option gains a step on this CPU."""

    # Wrong: arms whose loss is not the base's, to 0.1 % in float32 and 2 % in bf16
    numbers = (Number("rounds", "rounds of all arms", usual=5, few=2), LADDER_TIMEOUT)
    tables = (
        Table(
            measured_arms,
            (
                names("arm"),
                TableColumn("tokens/s", TOKENS, SPREAD),
                TableColumn(f"/ {BASE}", TOKENS, SPREAD, over=_base_of),
                TableColumn(f"/ {PEER}", TOKENS, SPREAD, over=_peer_of, optional=True),
                TableColumn("of peak, %", PEAK, SPREAD),
                TableColumn("memory, MiB", MEMORY, SPREAD),
                TableColumn("until ready, s", READY, SPREAD),
                TableColumn("compiling, s", _compile_seconds, optional=True),
                TableColumn("loss", LOSS, SPREAD),
            ),
        ),
    )
    figure = Figure(
        panels_of(list(LADDERS), BASE, f"tokens/s beside {BASE}", _draw_ratios), size=(11, 3.8)
    )

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Add this benchmark's flags."""
        add_ladder_flags(parser, list(LADDERS), f"which of {', '.join(ARMS)}")
        parser.add_argument(
            "--nanogpt",
            type=Path,
            metavar="PATH",
            help="folder of nanoGPT, to run its train.py as a peer",
        )

    def measure(self, args: argparse.Namespace, report: Report) -> None:
        """Climb the ladder of every preset and fill the report. Nothing that it starts outlives it."""
        overrides = settings_of(args)
        arms = chosen(args.arms, ARMS)
        presets = chosen(args.presets, list(LADDERS), "preset")
        if BASE not in arms:
            raise ConfigError(f"arms = {args.arms}; the base is needed: add {BASE}")
        if args.nanogpt and not (args.nanogpt / "train.py").is_file():
            raise ConfigError(
                f"nanogpt = {args.nanogpt} has no train.py; give the folder of a clone of nanoGPT"
            )

        # One ladder at a time: all arms of a preset stay in memory together, those of two would
        # not fit.
        for name in presets:
            with scratch_folder() as folder, ExitStack() as stack:
                ladder = _prepare(args, report, name, overrides, folder)
                wanted = [arm for arm in LADDERS[name].rungs if arm in arms]
                with part(report, lambda ladder=ladder: _add_rows(ladder)):  # type: ignore[misc]
                    _start_all(ladder, wanted, stack)
                    ladder.run_rounds(args.rounds, BLOCK_MS)

    def notes(self, report: Report) -> list[str]:
        """Return the products, the ratios to two ranks, and the arms that were left out."""
        end = f": {TWO}"
        ratios = (row.arm for row in report.rows if row.unit == "ratio" and row.arm.endswith(end))
        return [
            *product_lines(report),
            *(f"{arm}: {report.cell(arm, TOKENS, 'quartiles')}" for arm in ratios),
            *skipped_lines(report),
        ]


# What is measured.


def _prepare(
    args: argparse.Namespace, report: Report, name: str, overrides: dict[str, str], folder: Path
) -> Ladder:
    """Return the ladder of one preset, with its configuration and data."""
    own = LADDERS[name]
    settings = {**own.settings, "precision": "fp32", "log_every": 5, "hash_every": 0} | overrides
    return Ladder.of_preset(args, report, name, folder, "cpu", settings, own.tokens)


def _start_all(ladder: Ladder, arms: list[str], stack: ExitStack) -> None:
    """Start every arm, and the products; wait until each has done a first step."""

    # Skip the ladder before the machine swaps: a swapping arm measures the disk. With --settings
    # the model may be any size, and this estimate says nothing about it.
    args = ladder.args
    need = GIB_PER_ARM * len({*arms} - {PEER}) if LADDERS[ladder.name].tokens else 0.0
    free = available_memory_bytes() / 2**30
    if need > free and not args.settings:
        for arm in arms:
            ladder.skipped[arm] = (
                f"all arms together need {need:.0f} GiB, and {free:.0f} GiB are free"
            )
        return

    # The ceiling of `of peak`.
    for dtype in ("float32", "bfloat16"):
        ladder.start(f"{PRODUCTS} {dtype}", products(_size_of(dtype), dtype), stack)

    # Only what this machine can run is started; the rest appears in the report with its
    # reason.
    for arm in arms:
        if arm == PEER:
            if args.nanogpt is None:
                ladder.skipped[arm] = "--nanogpt names no folder"
            else:
                ladder.scripts[arm] = _nanogpt(ladder)
            continue
        own = RUNGS[arm]
        if arm.startswith(TWO) and available_cpus() < 2:
            ladder.skipped[arm] = "one core is no place for two ranks"
            continue
        reason = cannot_compile("cpu") if own.get("compile") else None
        if reason:
            ladder.skipped[arm] = f"compile = true {reason}"
            continue
        say(f"start  {ladder.arm(arm)}")
        where = {"ranks": own.get("_ranks", 1), "threads": own.get("_threads", 0)}
        ladder.start(arm, ladder.open(arm, own), stack, **where)
        # Once more, from the cache that the first start has left
        if arm == "compile" and arm in ladder.pools:
            ladder.pools.pop(arm).end()
            ladder.start(arm, ladder.open(arm, own), stack, **where)


def _nanogpt(ladder: Ladder) -> Callable[[int], float]:
    """Return the function that runs steps of nanoGPT's script, which starts anew for each block."""
    peer = NanoGPT(ladder.args.nanogpt, ladder.config, ladder.data, ladder.folder)
    env = {**arm_environment(), **ladder.caches, "CUDA_VISIBLE_DEVICES": ""}
    return lambda steps: peer.step_ms(max(LEAST_OF_PEER, steps), env, ladder.timeout_s)


def _size_of(dtype: str) -> int:
    """Return the size of the matrices: smaller where a product in bf16 is emulated, and so slower."""
    return SIZE if dtype == "float32" or cpu_features() & BF16_UNITS else SIZE // 2


def _add_rows(ladder: Ladder) -> None:
    """Add the rows and targets of one ladder, while its processes live."""
    # The FLOP/s that the products reached on this machine.
    peaks: dict[str, list[float]] = {}
    for precision, dtype in (("fp32", "float32"), ("bf16", "bfloat16")):
        arm = f"{PRODUCTS} {dtype}"
        size = _size_of(dtype)
        peaks[precision] = [product_flops(size) / ms / 1e6 for ms in ladder.step_ms.get(arm, [])]
        note = f"matrices of {size} x {size}, {max(1, int(available_cpus()))} thread(s)"
        ladder.add(arm, PRODUCTS, "GFLOP/s", peaks[precision], note)
    config = ladder.config
    tokens = config.global_batch_size * config.block_size
    what = f"{config.global_batch_size} sequences of {config.block_size} tokens"

    # A failed or skipped arm gets its row of tokens, which carries the reason, and no others.
    for arm in LADDERS[ladder.name].rungs:
        if arm not in (*ladder.step_ms, *ladder.failed, *ladder.skipped):
            continue
        rate = [1e3 * tokens / ms for ms in ladder.step_ms.get(arm, [])]
        ladder.add(arm, TOKENS, "1/s", rate, what)
        if not rate:
            continue
        precision = str(RUNGS.get(arm, {}).get("precision", "fp32"))
        flops = ladder.flops_per_token(BASE)
        of_peak = zip(rate, peaks[precision], strict=False)
        shares = [100 * flops * each / (1e9 * peak) for each, peak in of_peak]
        ladder.add(arm, PEAK, "%", shares, f"of products in {precision}")

        # nanoGPT runs once per round and is gone at the end: it has no memory and no start to
        # report.
        if arm in ladder.pools:
            pids = (fact["pid"] for fact in ladder.pools[arm].facts)
            mib = sum(resident_bytes("VmHWM", pid) for pid in pids) / 2**20
            ladder.add(arm, MEMORY, "MiB", mib, "most resident, all ranks")
            cold, *again = ladder.ready_s[arm]
            note = (
                f"from a cache {again[0]:.1f} s" if again else "process, imports, model, first step"
            )
            cached = {"cached_s": again[0]} if again else {}
            ladder.add(arm, READY, "s", cold, note, extra=cached)

    # The base has the samples of all arms; only the order of sums differs.
    ladder.compare_losses(BASE)
    add_targets(ladder.report, [ladder.name])


def add_targets(report: Report, presets: list[str]) -> None:
    """Add the ratios of all arms to the base and of the base to the peers, with their targets."""

    # The aim in bf16 holds for a CPU with units for it; any other one is excused by name.
    units = bool(cpu_features() & BF16_UNITS)
    excuse = "" if units else "this CPU has neither amx_bf16 nor avx512_bf16"
    for name in presets:
        for arm in LADDERS[name].rungs:
            if arm != BASE:
                report.compare(f"{name}: {arm}", f"{name}: {BASE}", TOKENS)
            if arm != PEER:
                report.compare(f"{name}: {arm}", f"{name}: {PEER}", TOKENS)
            if arm.startswith(f"{TWO} +"):
                report.compare(f"{name}: {arm}", f"{name}: {TWO}", TOKENS)

        # Random tokens have no aim: no other loop has published a number for them.
        if LADDERS[name].tokens:
            continue
        plain, half = AIMS[name]
        ran = report.row(f"{name}: {PEER}", TOKENS)
        against = PEER if ran and ran.values else EAGER  # nanoGPT, or what is nearest to it

        # The base must beat both peers, bf16 must beat the nearer one, and two ranks
        # may cost a little.
        aims = (
            (BASE, EAGER, 1.05, ""),
            (BASE, PEER, plain, ""),
            (BEST, against, half, excuse),
            (TWO, BASE, 0.95, ""),
        )
        for arm, peer, limit, why in aims:
            upper = f"{name}: {arm}"
            lower = f"{name}: {peer}"
            row = report.row(f"{upper} / {lower}", TOKENS)
            if row is None:
                row = report.compare(upper, lower, TOKENS)
            if row:
                report.add_target(f"tokens/s, {row.arm}", row, ">=", limit, why)

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
    two ranks + pinned        the same, each kept to a core of its own
    two ranks + zero1         the same with --dp_mode zero1: each rank updates half of the weights
    two ranks + audit 10      two ranks with --audit_every 10, and 1: beside two ranks, what an audit costs
    eager loop                a peer: the loop that people write first (compute.py)
    eager loop + kept memory  the same, and glibc keeps freed memory, as every nanoray rank lets it
    nanogpt                   a peer: nanoGPT's own train.py, where --nanogpt names its folder

All arms of a preset stay alive and run blocks of steps in turn; products of two large matrices, in
float32 and in bf16, run in the same rounds and are the ceiling that `of peak` refers to. Batches
are smaller than a preset's where a step would take too long, and the notes list them. The
loss is that of the last step: all arms but the peers saw the same samples. With dropout it is shown
and not compared, because other kernels draw other masks.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoray.bench.harness.benchmark import Benchmark, Number, part
from nanoray.bench.harness.figure import Figure, with_values
from nanoray.bench.harness.processes import scratch_folder
from nanoray.bench.harness.report import Record, Report, say
from nanoray.bench.harness.table import SPREAD, Table, TableColumn, names
from nanoray.bench.harness.trainings import chosen, settings_of
from nanoray.bench.ladder import (
    LADDER_TIMEOUT,
    LOSS,
    MEMORY,
    PRODUCTS,
    TOKENS,
    Climb,
    add_ladder_flags,
    draw_rungs,
    environment_of,
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
    f"{TWO} + pinned": {"_ranks": 2, "_pinned": True},
    f"{TWO} + zero1": {"_ranks": 2, "dp_mode": "zero1"},
    f"{TWO} + audit 10": {"_ranks": 2, "audit_every": 10},
    f"{TWO} + audit 1": {"_ranks": 2, "audit_every": 1},
    EAGER: {"_eager": True},
    "eager loop + kept memory": {"_eager": True, "_keep": True},
}
ARMS = (*RUNGS, PEER)
PEAK = "of peak"
READY = "until ready"
SIZE = 1024  # rows and columns of the matrices of a product
LOSS_STEP = 20  # at most: later, roundings of another order have grown into another run
GIB_PER_ARM = 2.8  # of the largest ladder
BLOCK_MS = 3000.0  # of the base; all arms do as many steps
PRODUCTS_PER_BLOCK = 50
FEW_PRODUCTS = 2  # with --quick: where bf16 is emulated each takes a fifth of a second
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
                climb = _prepare(args, report, name, overrides, folder)
                wanted = [arm for arm in LADDERS[name].rungs if arm in arms]
                with part(report, lambda climb=climb: _add_rows(climb)):  # type: ignore[misc]
                    _start_all(climb, wanted, stack)
                    _run_rounds(climb)

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
) -> Climb:
    """Return the ladder of one preset, with its configuration and data."""
    # Random tokens log every step, because so large a model does only a few of them.
    own = LADDERS[name]
    settings = {**own.settings, "precision": "fp32", "log_every": 1 if own.tokens else 5}
    settings |= {"hash_every": 0, "tensorboard": False} | overrides
    # No arm may see a GPU.
    env = environment_of(folder, name)
    return Climb.of_preset(args, report, name, folder, env, "cpu", settings, vocab_size=own.tokens)


def _start_all(climb: Climb, arms: list[str], stack: ExitStack) -> None:
    """Start every arm, and the products; wait until each is ready for its first step."""

    # Skip the ladder before the machine swaps: a swapping arm measures the disk. With --set the
    # model may be any size, and this estimate says nothing about it.
    name = climb.name
    need = GIB_PER_ARM * len({*arms} - {PEER}) if LADDERS[name].tokens else 0.0
    free = available_memory_bytes() / 2**30
    if need > free and not climb.args.settings:
        for arm in arms:
            climb.skipped[arm] = (
                f"all arms together need {need:.0f} GiB, and {free:.0f} GiB are free"
            )
        return

    # The ceiling of `of peak`.
    for dtype in ("float32", "bfloat16"):
        climb.start(f"{PRODUCTS} {dtype}", [products(_size_of(dtype), dtype)], stack)

    # Only what this machine can run is started; the rest appears in the report with its
    # reason.
    for arm in arms:
        if arm == PEER:
            if climb.args.nanogpt is None:
                climb.skipped[arm] = "--nanogpt names no folder"
            continue
        if arm.startswith(TWO) and available_cpus() < 2:
            climb.skipped[arm] = "one core is no place for two ranks"
            continue
        reason = cannot_compile("cpu") if RUNGS[arm].get("compile") else None
        if reason:
            climb.skipped[arm] = f"compile = true {reason}"
            continue
        say(f"start  {climb.arm(arm)}")
        climb.start(arm, climb.orders(arm, RUNGS[arm]), stack)
        # Once more, from the cache that the first start has left
        if arm == "compile" and arm in climb.ranks:
            climb.ranks.pop(arm).end()
            climb.start(arm, climb.orders(arm, RUNGS[arm]), stack)


def _size_of(dtype: str) -> int:
    """Return the size of the matrices: smaller where a product in bf16 is emulated, and so slower."""
    return SIZE if dtype == "float32" or cpu_features() & BF16_UNITS else SIZE // 2


def _run_rounds(climb: Climb) -> None:
    """Let all arms run one block after the other, round by round in rotating order."""

    # nanoGPT's script cannot run block by block: it starts anew in each round and warms up by
    # itself.
    args = climb.args
    peer = None
    if args.nanogpt and PEER in _rungs_of(climb) and PEER in chosen(args.arms, ARMS):
        peer = NanoGPT(args.nanogpt, climb.config, climb.data, climb.folder)

    def block(arm: str, counts: bool) -> dict[str, float]:
        if peer and arm == PEER:
            if not counts:
                return {}
            steps = max(LEAST_OF_PEER, climb.steps)
            return {"step_ms": peer.step_ms(steps, climb.env, args.timeout_s)}
        # A step that does not count: while the arm slept, others had the caches, and idle memory
        # may be gone.
        climb.ranks[arm].block(1, args.timeout_s)
        steps = climb.steps
        if arm.startswith(PRODUCTS):
            steps = FEW_PRODUCTS if args.quick else PRODUCTS_PER_BLOCK
        return climb.ranks[arm].block(steps, args.timeout_s)

    # As many steps as fill BLOCK_MS with the base, for all arms
    def steps_for(settled_ms: Mapping[str, float]) -> int:
        if args.quick or BASE not in settled_ms:
            return climb.steps
        return max(1, round(BLOCK_MS / settled_ms[BASE]))

    climb.run_rounds([*climb.ranks, *([PEER] if peer else [])], args.rounds, block, steps_for)


def _rungs_of(climb: Climb) -> tuple[str, ...]:
    return LADDERS[climb.name].rungs


def _add_rows(climb: Climb) -> None:
    """Add the rows and targets of one ladder, while its processes live."""
    # The FLOP/s that the products reached on this machine.
    peaks: dict[str, list[float]] = {}
    for precision, dtype in (("fp32", "float32"), ("bf16", "bfloat16")):
        arm = f"{PRODUCTS} {dtype}"
        size = _size_of(dtype)
        peaks[precision] = [product_flops(size) / ms / 1e6 for ms in climb.step_ms.get(arm, [])]
        note = f"matrices of {size} x {size}, {climb.threads} thread(s)"
        climb.add(arm, PRODUCTS, "GFLOP/s", peaks[precision], note)
    config = climb.config
    tokens = config.global_batch_size * config.block_size
    what = f"{config.global_batch_size} sequences of {config.block_size} tokens, blocks of {climb.steps}"

    # A failed or skipped arm gets its row of tokens, which carries the reason, and no others.
    for arm in _rungs_of(climb):
        if arm not in (*climb.step_ms, *climb.failed, *climb.skipped):
            continue
        rate = [1e3 * tokens / ms for ms in climb.step_ms.get(arm, [])]
        climb.add(arm, TOKENS, "1/s", rate, what)
        if not rate:
            continue
        precision = str(RUNGS.get(arm, {}).get("precision", "fp32"))
        flops = climb.flops_per_token(BASE)
        of_peak = zip(rate, peaks[precision], strict=False)
        shares = [100 * flops * each / (1e9 * peak) for each, peak in of_peak]
        climb.add(arm, PEAK, "%", shares, f"of products in {precision}")

        # nanoGPT runs once per round and is gone at the end: it has no memory and no start to
        # report.
        if arm in climb.ranks:
            pids = (child.process.pid for child in climb.ranks[arm].children)
            mib = sum(resident_bytes("VmHWM", pid) for pid in pids) / 2**20
            climb.add(arm, MEMORY, "MiB", mib, "most resident, all ranks")
            cold, *again = climb.ready_s[arm]
            note = f"from a cache {again[0]:.1f} s" if again else "process, imports, model, warm-up"
            cached = {"cached_s": again[0]} if again else {}
            climb.add(arm, READY, "s", cold, note, extra=cached)

    # The base has the samples of all arms; only the order of sums differs.
    climb.compare_losses(BASE, LOSS_STEP)
    add_targets(climb.report, [climb.name])


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

"""`python -m nanoray.bench step`: what each option gains a step on CPU, and the ceiling.

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
import json
import math
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanoray.base.atomic import read_json_lines
from nanoray.bench.harness.benchmark import Benchmark
from nanoray.bench.harness.figure import figure, whiskers
from nanoray.bench.harness.plan import (
    add_data_flags,
    add_settings_flag,
    chosen,
    data_flags,
    rotated,
    settings_of,
)
from nanoray.bench.harness.processes import Child, ChildFailed, arm_environment, scratch_folder
from nanoray.bench.harness.report import Measurement, Report, Target, aligned, markdown, say
from nanoray.bench.peers.nanogpt import NanoGPT
from nanoray.config import Config, load_config, make_config
from nanoray.data.dataset import DatasetInfo
from nanoray.data.prepare import prepare
from nanoray.errors import ConfigError
from nanoray.host.choose import BF16_UNITS, cannot_compile
from nanoray.host.host import available_cpus, available_memory_bytes, cpu_features
from nanoray.start.folder import open_run

BASE = "base"
EAGER = "eager loop"
PEER = "nanogpt"
TWO = "two ranks"
BEST = "bf16 + plain attention"
PLAIN = "plain attention"
FUSED = "fused attention"
# Settings of the run; those with "_" are not the configuration's
RUNGS: dict[str, dict[str, Any]] = {
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
TOKENS = "tokens"
PEAK = "of peak"
MEMORY = "memory"
READY = "until ready"
LOSS = "loss"
PRODUCTS = "products"
SIZE = 1024  # rows and columns of the matrices of a product
LOSS_STEP = 20  # at most: later, roundings of another order have grown into another run
SAME_LOSS = {"fp32": 1e-3, "bf16": 2e-2}  # relative, to that of the base
GIB_PER_ARM = 2.8  # of the largest ladder
BLOCK_MS = 3000.0  # of the base; all arms do as many steps
PRODUCTS_PER_BLOCK = 50
LEAST_OF_PEER = 5  # steps: it starts anew in each round
# Times nanoGPT: in float32, in bf16 with units
AIMS = {"shakespeare-cpu": (1.1, 1.4), "shakespeare-char": (1.15, 2.5)}


@dataclass(frozen=True)
class Ladder:
    """What is trained of a preset, and which rungs it has."""

    settings: Mapping[str, Any]
    rungs: tuple[str, ...]
    # > 0: random tokens of so large a vocabulary, where its data set cannot be had everywhere
    tokens: int = 0


LADDERS = {
    "shakespeare-cpu": Ladder({}, tuple(arm for arm in ARMS if arm != FUSED)),
    "shakespeare-char": Ladder(
        {"global_batch_size": 4}, tuple(arm for arm in ARMS if arm != PLAIN)
    ),
    "gpt2-124m": Ladder(
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


class StepBenchmark(Benchmark):
    """Measure what each option gains a step on this CPU."""

    wrong = "arms whose loss is not the base's, to 0.1 % in float32 and 2 % in bf16"

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Add this benchmark's flags."""
        parser.add_argument(
            "--presets", default="all", metavar="A,B", help=f"which of {', '.join(LADDERS)} [all]"
        )
        parser.add_argument(
            "--arms", default="all", metavar="A,B", help=f"which of {', '.join(ARMS)} [all]"
        )
        parser.add_argument(
            "--rounds", type=int, metavar="N", help="rounds of all arms [5; 2 with --quick]"
        )
        add_settings_flag(parser, "each preset's")
        add_data_flags(parser)
        parser.add_argument(
            "--nanogpt",
            type=Path,
            metavar="PATH",
            help="folder of nanoGPT, to run its train.py as a peer",
        )
        late = "seconds after which an arm that says nothing has failed [%(default)g]"
        parser.add_argument("--timeout_s", type=float, default=300, help=late)

    def measure(self, args: argparse.Namespace, report: Report) -> None:
        """Climb the ladder of every preset and fill the report. Nothing that it starts outlives it."""
        args.rounds = args.rounds or (2 if args.quick else 5)
        overrides = settings_of(args)
        arms = chosen(args.arms, ARMS)
        presets = chosen(args.presets, list(LADDERS), "preset")
        if args.rounds < 1 or BASE not in arms:
            raise ConfigError(
                f"rounds = {args.rounds}, arms = {args.arms}; at least 1 round, and the base, are "
                "needed"
            )
        if args.nanogpt and not (args.nanogpt / "train.py").is_file():
            raise ConfigError(
                f"nanogpt = {args.nanogpt} has no train.py; give the folder of a clone of nanoGPT"
            )

        # One ladder at a time: all arms of a preset stay in memory together, those of two would
        # not fit.
        for name in presets:
            with scratch_folder() as folder, ExitStack() as stack:
                climb = _prepare_climb(args, name, overrides, folder)
                wanted = [arm for arm in LADDERS[name].rungs if arm in arms]
                _start_all(climb, wanted, report, stack)
                _run_rounds(climb, report)
                _add_rows(climb, report)
        add_targets(report, presets)

    def format_text(self, report: Report) -> list[str]:
        """Return a line per arm, then the products, and the arms that were left out."""
        found = aligned(
            [(*line, "") for line in _build_table(report, "quartiles")], right=set(range(1, 9))
        )
        products = [row for row in report.rows if row.metric == PRODUCTS]
        found += [
            "",
            *(
                f"{row.arm}: {report.cell(row.arm, PRODUCTS)} GFLOP/s, {row.note}"
                for row in products
            ),
        ]
        beside_two = [
            row.arm for row in report.rows if row.unit == "ratio" and row.arm.endswith(f": {TWO}")
        ]

        # The ratios to `two ranks` have no column of their own, so they follow the table.
        found += [f"{arm}: {report.cell(arm, TOKENS, 'quartiles')}" for arm in beside_two]
        return found + [
            f"skipped  {row.arm}: {row.skipped}"
            for row in report.rows
            if row.skipped and row.unit == "1/s"
        ]

    def format_markdown(self, report: Report) -> list[str]:
        """Return the table for a page."""
        head, *body = _build_table(report, "range")
        return markdown(head, body)

    def draw(self, report: Report, path: Path) -> None:
        """Draw each ladder: tokens per second beside the base's, medians with their quartiles."""

        # A ladder without a base has no ratios to draw.
        ladders = [name for name in LADDERS if report.row(_arm_name(name, BASE), TOKENS)]
        with figure(report, path, (11, 3.8), (1, max(1, len(ladders)))) as every:
            for axes, name in zip(every, ladders, strict=False):
                rows = [
                    r for r in report.rows if r.metric == TOKENS and r.unit == "ratio" and r.values
                ]
                rows = [
                    r
                    for r in rows
                    if r.arm.startswith(f"{name}: ")
                    and r.arm.endswith(f" / {_arm_name(name, BASE)}")
                ]
                shown = [row.arm.partition(": ")[2].partition(" / ")[0] for row in rows]
                if rows:
                    axes.barh(
                        shown,
                        [r.median for r in rows],
                        xerr=whiskers(rows, quartiles=True),
                        capsize=3,
                        color="0.6",
                    )
                axes.axvline(1.0, color="C3", linewidth=1)
                axes.set(title=name, xlabel=f"tokens/s beside {BASE}")
                axes.tick_params(labelsize=7)
                axes.invert_yaxis()


@dataclass
class Climb:
    """What one ladder has started and found."""

    args: argparse.Namespace
    name: str
    config: Config
    data: DatasetInfo
    folder: Path
    env: dict[str, str]
    ranks: dict[str, list[Child]] = field(default_factory=dict)
    runs: dict[str, Path] = field(default_factory=dict)  # folders of the engine's runs
    ready_s: dict[str, list[float]] = field(default_factory=dict)
    step_ms: dict[str, list[float]] = field(default_factory=dict)
    memory: dict[str, float] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    steps: int = 1

    @property
    def threads(self) -> int:
        return max(1, int(available_cpus()))

    def precision(self, arm: str) -> str:
        return str(RUNGS.get(arm, {}).get("precision", "fp32"))

    def fail(self, report: Report, arm: str, error: Exception) -> None:
        """Note that an arm has failed, and end it; the others go on."""
        self.failed[arm] = f"{self.name}: {arm}: {error}"
        report.failures.append(self.failed[arm])
        for child in self.ranks.pop(arm, []):
            child.end()


def _prepare_climb(
    args: argparse.Namespace, name: str, overrides: dict[str, str], folder: Path
) -> Climb:
    """Return the climb of one preset, with its configuration and data."""

    # No arm may stop, evaluate or save by itself: a run lasts as long as its blocks of steps
    # need. Random tokens log every step, because so large a model does only a few of them.
    ladder = LADDERS[name]
    fixed = {"out_dir": str(folder), "max_steps": 10**6, "eval_every": 0, "checkpoint_every": 0}
    fixed |= {"log_every": 1 if ladder.tokens else 5}
    fixed |= {"device": "cpu", "precision": "fp32", "hash_every": 0, "tensorboard": False}

    # The flags of the command line come last and win.
    values = {**ladder.settings, **fixed, **data_flags(args), **overrides}
    if ladder.tokens:
        values["dataset"] = str(random_tokens(folder / "random-tokens", ladder.tokens))
    config = load_config(preset=name, overrides=values)

    # No arm may see a GPU. The compiler's cache is empty at first, so that the first
    # start shows what compiling costs, and inside the scratch folder, so that nothing is left
    # behind.
    env = arm_environment() | {"TMPDIR": str(folder / "tmp"), "CUDA_VISIBLE_DEVICES": ""}
    env["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    return Climb(args, name, config, prepare(config), folder, env)


def random_tokens(folder: Path, vocab_size: int) -> Path:
    """Write a data set of random tokens in nanoGPT's format.

    A step takes as long on them as on a text.
    """
    import numpy as np

    folder.mkdir()
    source = np.random.default_rng(0)
    for split in ("train", "val"):
        (folder / f"{split}.bin").write_bytes(
            source.integers(vocab_size, size=50_000, dtype=np.uint16).tobytes()
        )
    meta = {"vocab_size": vocab_size, "dtype": "uint16"}
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    return folder


def _start_all(climb: Climb, arms: list[str], report: Report, stack: ExitStack) -> None:
    """Start every arm, and the products; wait until each is ready for its first step."""

    # Skip the ladder before the machine swaps: a swapping arm measures the disk. With --set the
    # model may be any size, and this estimate says nothing about it.
    need = GIB_PER_ARM * len({*arms} - {PEER}) if LADDERS[climb.name].tokens else 0.0
    free = available_memory_bytes() / 2**30
    if need > free and not climb.args.settings:
        for arm in arms:
            climb.skipped[arm] = (
                f"all arms together need {need:.0f} GiB, and {free:.0f} GiB are free"
            )
        return

    # The ceiling of `of peak`. Without units for it, a product in bf16 is emulated and takes many
    # times as long, so its matrices are half as large.
    for dtype in ("float32", "bfloat16"):
        size = SIZE if dtype == "float32" or cpu_features() & BF16_UNITS else SIZE // 2
        order = {"arm": "products", "size": size, "dtype": dtype, "threads": climb.threads}
        _start(climb, report, stack, f"{PRODUCTS} {dtype}", [order])

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
        say(f"start  {climb.name}: {arm}")
        _start(climb, report, stack, arm, orders_of(climb, arm))
        # Once more, from the cache that the first start has left
        if arm == "compile" and arm in climb.ranks:
            for child in climb.ranks.pop(arm):
                child.end()
            _start(climb, report, stack, arm, orders_of(climb, arm))


def orders_of(climb: Climb, arm: str) -> list[dict[str, Any]]:
    """Open a run for an arm; return the order of each of its ranks."""
    how = RUNGS[arm]

    # Keys with "_" are for the process of the arm, not for the configuration.
    settings = {key: value for key, value in how.items() if not key.startswith("_")}

    # `compile` opens a second run, which needs a name of its own.
    name = arm.replace(" + ", "-").replace(" ", "-") + f"-{len(climb.ready_s.get(arm, []))}"
    values = climb.config.model_dump() | settings | {"name": name}
    spec = open_run(make_config(values), climb.data, time.time())
    climb.runs[arm] = spec.folder

    # Two ranks share the cores that one process has alone, so that both use the whole machine.
    ranks = how.get("_ranks", 1)
    order = {
        "arm": "eager" if how.get("_eager") else "engine",
        "world": ranks,
        "spec": str(spec.folder / "run.json"),
    }
    order |= {
        "threads": how.get("_threads") or max(1, climb.threads // ranks),
        "pinned": how.get("_pinned"),
        "keep_memory": how.get("_keep"),
        "unfused": how.get("_unfused"),
    }
    return [order | {"rank": rank} for rank in range(ranks)]


def _start(
    climb: Climb, report: Report, stack: ExitStack, arm: str, orders: list[dict[str, Any]]
) -> None:
    """Start the processes of an arm; record the seconds until they are ready for a step."""
    begin = time.monotonic()
    ranks = climb.ranks.setdefault(arm, [])
    port = 0
    try:
        # The other ranks need the port of rank 0's store, which it chooses only when it runs.
        for rank, order in enumerate(orders):
            if rank:
                order |= {"port": port}
            argv = [sys.executable, "-m", "nanoray.bench.step_rank", json.dumps(order)]
            log = climb.folder / f"{arm.replace(' ', '-')}-{rank}.log"
            ranks.append(stack.enter_context(Child(argv, climb.env, log, pipes=True)))
            if len(orders) > 1 and rank == 0:
                port = ranks[0].answer(climb.args.timeout_s)["port"]  # at which it serves the store

        # Every rank answers once it has warmed up and is ready for its first step.
        for child in ranks:
            child.answer(climb.args.timeout_s)
        climb.ready_s.setdefault(arm, []).append(time.monotonic() - begin)
    except ChildFailed as error:
        climb.fail(report, arm, error)


def _run_rounds(climb: Climb, report: Report) -> None:
    """Let all arms run one block after the other, round by round in rotating order."""

    # nanoGPT's script cannot run block by block: it starts anew in each round and warms up by
    # itself.
    if climb.args.nanogpt:
        peer = NanoGPT(climb.args.nanogpt, climb.config, climb.data, climb.folder)
    else:
        peer = None
    wants_peer = (
        peer is not None
        and PEER in LADDERS[climb.name].rungs
        and PEER in chosen(climb.args.arms, ARMS)
    )

    # An arm that fails leaves the rotation, and the others go on.
    arms = [*climb.ranks, *([PEER] if wants_peer else [])]
    settled = 0.0
    # The first one does not count: memory and caches settle
    for turn in range(-1, climb.args.rounds):
        for arm in rotated(arms, max(turn, 0)):
            if arm in climb.failed or (arm == PEER and turn < 0):
                continue
            try:
                if peer and arm == PEER:
                    ms = peer.step_ms(
                        max(LEAST_OF_PEER, climb.steps), climb.env, climb.args.timeout_s
                    )
                else:
                    ms = _time_block(climb, arm)
            except ChildFailed as error:
                climb.fail(report, arm, error)
                continue
            settled = ms if arm == BASE else settled
            if turn >= 0:
                climb.step_ms.setdefault(arm, []).append(ms)

        # The block that did not count decides how many steps fill BLOCK_MS. The number is the
        # same for all arms, so that a slow minute of the machine hits all of them.
        if turn < 0 and settled and not climb.args.quick:
            climb.steps = max(1, round(BLOCK_MS / settled))
        say(f"round {turn + 1}/{climb.args.rounds}  {climb.name}  {BASE} {settled:.1f} ms")

    # Memory at the end of all rounds, while the processes still live.
    for arm, ranks in climb.ranks.items():
        climb.memory[arm] = sum(map(_peak_resident_bytes, ranks)) / 2**20


def _time_block(climb: Climb, arm: str) -> float:
    """Let an arm run a block of steps; return milliseconds per step, of the slower rank.

    A step before the block does not count: while the arm slept, others had the caches, and idle
    memory may be gone.
    """
    ms = 0.0
    steps = PRODUCTS_PER_BLOCK if arm.startswith(PRODUCTS) else climb.steps

    # Ask all ranks before waiting for any: they run at the same time and wait for each other.
    for count in (1, steps):
        for child in climb.ranks[arm]:
            child.ask(str(count))
        ms = max(float(child.answer(climb.args.timeout_s)["step_ms"]) for child in climb.ranks[arm])
    return ms


def _peak_resident_bytes(child: Child) -> int:
    """Return the most bytes that a living child has had resident, 0 where there is no /proc."""
    with suppress(OSError, StopIteration):
        lines = Path(f"/proc/{child.process.pid}/status").read_text(encoding="utf-8").splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
    return 0


def _add_rows(climb: Climb, report: Report) -> None:
    """Add the rows of one ladder."""
    from nanoray.models.costs import flops_per_token
    from nanoray.models.gpt import ModelShape

    # FLOPs of a token by formula, and the FLOP/s that the products reached on this machine.
    shape = ModelShape.of(climb.config, climb.data.vocab_size)
    tokens = climb.config.global_batch_size * climb.config.block_size
    flops = flops_per_token(shape)
    peaks: dict[str, list[float]] = {}
    for precision, dtype in (("fp32", "float32"), ("bf16", "bfloat16")):
        arm = f"{PRODUCTS} {dtype}"
        size = SIZE if precision == "fp32" or cpu_features() & BF16_UNITS else SIZE // 2
        peaks[precision] = [2 * size**3 / ms / 1e6 for ms in climb.step_ms.get(arm, [])]
        note = f"matrices of {size} x {size}, {climb.threads} thread(s)"
        report.rows.append(_make_row(climb, arm, PRODUCTS, "GFLOP/s", peaks[precision], note))
    what = f"{climb.config.global_batch_size} sequences of {climb.config.block_size} tokens, blocks of {climb.steps}"

    # Losses are compared at the last step that every arm has logged. The eager loops are no arms
    # of the engine and keep no records.
    losses = {
        arm: _read_losses(folder) for arm, folder in climb.runs.items() if arm in climb.step_ms
    }
    logged = {arm: {step for step in found if step <= LOSS_STEP} for arm, found in losses.items()}
    last = min(
        (max(steps, default=0) for arm, steps in logged.items() if not RUNGS[arm].get("_eager")),
        default=0,
    )

    # A failed or skipped arm gets its row of tokens, which carries the reason, and no others.
    for arm in LADDERS[climb.name].rungs:
        if arm not in (*climb.step_ms, *climb.failed, *climb.skipped):
            continue
        rate = [1e3 * tokens / ms for ms in climb.step_ms.get(arm, [])]
        report.rows.append(_make_row(climb, arm, TOKENS, "1/s", rate, what))
        if not rate:
            continue
        peak = peaks[climb.precision(arm)]
        shares = [100 * flops * each / (1e9 * of) for each, of in zip(rate, peak, strict=False)]
        report.rows.append(
            _make_row(climb, arm, PEAK, "%", shares, f"of products in {climb.precision(arm)}")
        )

        # nanoGPT runs once per round and is gone at the end: it has no memory and no start to
        # report.
        if arm in climb.memory:
            report.rows.append(
                _make_row(
                    climb, arm, MEMORY, "MiB", [climb.memory[arm]], "most resident, all ranks"
                )
            )
            cold, *again = climb.ready_s[arm]
            note = f"from a cache {again[0]:.1f} s" if again else "process, imports, model, warm-up"
            report.rows.append(
                _make_row(
                    climb, arm, READY, "s", [cold], note, {"cached_s": again[0]} if again else None
                )
            )

        # The base has the samples of all arms; only the order of sums differs.
        if last and arm in losses and last in losses[arm]:
            loss = losses[arm][last]
            base = losses[BASE][last]
            near = math.isclose(loss, base, rel_tol=SAME_LOSS[climb.precision(arm)])
            # Other kernels draw other masks
            wrong = None if climb.config.dropout else int(not near)
            report.rows.append(
                Measurement(
                    _arm_name(climb.name, arm), LOSS, "", (loss,), f"of step {last}", wrong=wrong
                )
            )


def _arm_name(preset: str, arm: str) -> str:
    return f"{preset}: {arm}"


def _make_row(
    climb: Climb,
    arm: str,
    metric: str,
    unit: str,
    values: list[float],
    note: str = "",
    extra: dict[str, Any] | None = None,
) -> Measurement:
    failed = climb.failed.get(arm, "")
    skipped = "" if failed else climb.skipped.get(arm, "")
    return Measurement(
        _arm_name(climb.name, arm),
        metric,
        unit,
        tuple(values),
        note,
        failed,
        None,
        skipped,
        extra or {},
    )


def _read_losses(run: Path) -> dict[int, float]:
    """Return step -> loss of a run; empty for a peer, which keeps no records."""
    return {
        r["step"]: r["train/loss"]
        for r in read_json_lines(run / "metrics.jsonl")
        if "train/loss" in r
    }


def add_targets(report: Report, presets: list[str]) -> None:
    """Add the ratios of all arms to the base and of the base to the peers, with their targets."""

    # The aim in bf16 holds for a CPU with units for it; any other one is excused by name.
    units = bool(cpu_features() & BF16_UNITS)
    excuse = "" if units else "this CPU has neither amx_bf16 nor avx512_bf16"
    for name in presets:
        for arm in LADDERS[name].rungs:
            if arm != BASE:
                report.compare(_arm_name(name, arm), _arm_name(name, BASE), TOKENS)
            if arm != PEER:
                report.compare(_arm_name(name, arm), _arm_name(name, PEER), TOKENS)
            if arm.startswith(f"{TWO} +"):
                report.compare(_arm_name(name, arm), _arm_name(name, TWO), TOKENS)

        # Random tokens have no aim: no other loop has published a number for them.
        if LADDERS[name].tokens:
            continue
        plain, half = AIMS[name]
        ran = report.row(_arm_name(name, PEER), TOKENS)
        against = PEER if ran and ran.values else EAGER  # nanoGPT, or what is nearest to it

        # The base must beat both peers, bf16 must beat the nearer one, and two ranks
        # may cost 5 %.
        aims = (
            (BASE, EAGER, 1.05, ""),
            (BASE, PEER, plain, ""),
            (BEST, against, half, excuse),
            (TWO, BASE, 0.95, ""),
        )
        for arm, peer, limit, why in aims:
            upper = _arm_name(name, arm)
            lower = _arm_name(name, peer)
            row = report.row(f"{upper} / {lower}", TOKENS)
            if row is None:
                row = report.compare(upper, lower, TOKENS)
            if row:
                report.targets.append(Target(f"tokens/s, {row.arm}", row, ">=", limit, why))


def _format_compile_seconds(report: Report, arm: str, base: str) -> str:
    """Return the extra start seconds of a compiled arm, cold and from a cache; "" for others."""

    # The base starts the same process without a compiler: the difference is what compiling takes.
    row = report.row(arm, READY)
    other = report.row(base, READY)
    if not (row and other and row.values and other.values and "cached_s" in row.extra):
        return ""
    return f"{row.median - other.median:.1f}, then {row.extra['cached_s'] - other.median:.1f}"


def _build_table(report: Report, spread: str) -> list[tuple[str, ...]]:
    # The columns follow what was measured: nanoGPT and the compiler are optional.
    asked = any(r.unit == "ratio" and r.values and r.arm.endswith(f": {PEER}") for r in report.rows)
    against = (BASE, PEER) if asked else (BASE,)
    if any(r.metric == READY and "cached_s" in r.extra for r in report.rows):
        compiled = ["compiling, s"]
    else:
        compiled = []
    ends = ("of peak, %", "memory, MiB", "until ready, s", *compiled, "loss")
    table: list[tuple[str, ...]] = [
        ("arm", "tokens/s", *(f"/ {other}" for other in against), *ends)
    ]
    for row in report.rows:
        if row.metric == TOKENS and row.unit == "1/s" and not row.skipped:
            preset = row.arm.partition(": ")[0]
            ratios = [
                report.cell(f"{row.arm} / {_arm_name(preset, other)}", TOKENS, spread)
                for other in against
            ]
            cells = [report.cell(row.arm, metric, spread) for metric in (PEAK, MEMORY, READY)]
            cells += [
                _format_compile_seconds(report, row.arm, _arm_name(preset, BASE)) for _ in compiled
            ]
            cells += [report.cell(row.arm, LOSS, spread)]
            table.append((row.arm, report.cell(row.arm, TOKENS, spread), *ratios, *cells))
    return table

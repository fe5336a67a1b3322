"""`python -m nanoray.bench speedrun`: seconds from a command to a validation loss.

The data is tiny Shakespeare, the machine two CPU cores. docs/speedrun.md has the rules and the
records. Arms run one after the other, in rotating order; each round has a seed of its own, the same
one in all arms. The clock starts with the process and ends when an evaluation has shown the loss.
CPU time is that of the whole process, its end included: other work on the machine changes it less
than the clock.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from nanoray.base.atomic import read_json_lines
from nanoray.bench.harness.benchmark import Benchmark
from nanoray.bench.harness.figure import bars, figure, measured
from nanoray.bench.harness.plan import (
    add_data_flags,
    add_settings_flag,
    chosen,
    data_flags,
    rotated,
    settings_of,
    words,
)
from nanoray.bench.harness.processes import Child, ChildFailed, arm_environment, scratch_folder
from nanoray.bench.harness.report import Measurement, Report, Target, markdown, say
from nanoray.bench.peers.nanogpt import NanoGPT
from nanoray.config import load_config
from nanoray.data.prepare import prepare
from nanoray.errors import ConfigError

CORES = 2
SECONDS = "to the loss"
CPU_TIME = "CPU time"
STEPS = "steps"
LOSS = "validation loss"
UNITS = {SECONDS: "s", CPU_TIME: "s", STEPS: "steps", LOSS: "nat/token"}
# Which no record may change
RULES = {"device": "cpu", "workers": 1, "eval_samples": 240, "block_size": 64}
# What a record does not need, and the precision of those that name none: `auto` would differ
# between machines.
DEFAULTS = {"checkpoint_every": 0, "sample_tokens": 0, "tensorboard": "false", "precision": "fp32"}


@dataclass(frozen=True)
class Record:
    """A way to the loss: a preset, and what it changes."""

    target: float
    preset: str
    flags: Mapping[str, object]
    what: str
    module: str = "nanoray.train"


CPU_PRESET = "shakespeare-cpu"
FAST = "shakespeare-fast"
# Its recipe in a loop of this repository, and its own script
PEER = "nanogpt"
OWN = "nanogpt train.py"
BASE = CPU_PRESET
FITTED = "+ schedule"
ROTARY = "+ rotary"
LOWER = f"{FAST} to 1.70"
SHORT = "+ short sequences"
BF16 = "+ bf16"
_SHORT = {"max_steps": 260, "eval_every": 260, "seq_warmup_steps": 150}
_LINE = {"schedule": "wsd", "decay_fraction": 1.0, "lr": 6e-3, "min_lr": 0, "warmup_steps": 20}
ARMS = {
    PEER: Record(
        1.88,
        CPU_PRESET,
        {"lr": 1e-3},
        "nanoGPT's CPU recipe in the loop that people write first, an evaluation every 250 steps",
        "nanoray.bench.peers.speedrun",
    ),
    OWN: Record(
        1.88,
        CPU_PRESET,
        {"lr": 1e-3},
        "nanoGPT with its CPU recipe and its own evaluation, of 240 random windows",
    ),
    BASE: Record(
        1.88, CPU_PRESET, {"eval_every": 50}, "three times the learning rate; nanoray's loop"
    ),
    FITTED: Record(
        1.88,
        CPU_PRESET,
        {"eval_every": 50, "max_steps": 1200, **_LINE},
        "a rate of 6e-3, linear to zero",
    ),
    ROTARY: Record(
        1.88,
        CPU_PRESET,
        {"eval_every": 50, "max_steps": 1000, **_LINE, "positions": "rotary"},
        "rotary positions",
    ),
    FAST: Record(
        1.88,
        FAST,
        {"max_steps": 300, "eval_every": 300},
        "Muon for the matrices, and one evaluation",
    ),
    SHORT: Record(
        1.88, FAST, _SHORT, "sequences of 8, 16 and 32 tokens in 50 steps each, then of 64"
    ),
    BF16: Record(
        1.88,
        FAST,
        {**_SHORT, "precision": "bf16"},
        "products in bf16, for a CPU that has units for it",
    ),
    LOWER: Record(1.70, FAST, {"eval_every": 1000}, "the same preset, in its own number of steps"),
}
RECORDS = (FAST, SHORT, BF16)  # each round of these must reach the loss
DEFAULT_ARMS = ",".join((PEER, OWN, FAST, SHORT))


@dataclass(frozen=True)
class SpeedrunResult:
    """What one run came to."""

    seconds: float
    cpu_s: float
    steps: int
    loss: float


class SpeedrunBenchmark(Benchmark):
    """Measure the seconds from a command to a validation loss."""

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Add this benchmark's flags."""
        which = f"all, or which of {', '.join(ARMS)} [%(default)s]"
        parser.add_argument("--arms", default=DEFAULT_ARMS, metavar="A,B", help=which)
        parser.add_argument(
            "--rounds",
            type=int,
            metavar="N",
            help="rounds of all arms, a seed each [5; 1 with --quick]",
        )
        add_settings_flag(parser, "those of all arms")
        add_data_flags(parser, "shakespeare")
        parser.add_argument(
            "--nanogpt",
            type=Path,
            metavar="PATH",
            help=f"folder of nanoGPT, which the arm {OWN} needs",
        )
        late = "seconds after which a run has failed [%(default)g]"
        parser.add_argument("--timeout_s", type=float, default=600, help=late)

    def measure(self, args: argparse.Namespace, report: Report) -> None:
        """Run every record's command in each round, and fill the report.

        Nothing that it starts outlives it.
        """

        # Wrong flags are refused before a round has taken its minutes.
        args.rounds = args.rounds or (1 if args.quick else 5)
        overrides = settings_of(args)
        arms = chosen(args.arms, list(ARMS))
        if args.nanogpt and not (args.nanogpt / "train.py").is_file():
            raise ConfigError(
                f"nanogpt = {args.nanogpt} has no train.py; give the folder of a clone of nanoGPT"
            )
        if args.rounds < 1:
            raise ConfigError(f"rounds = {args.rounds}; at least 1 round is needed")

        # Without nanoGPT's folder its own script is skipped, and the report says so.
        if OWN in arms and args.nanogpt is None:
            arms.remove(OWN)
            report.rows.append(
                Measurement(OWN, SECONDS, "s", (), skipped="--nanogpt names no folder")
            )
        found: dict[str, list[SpeedrunResult]] = {arm: [] for arm in arms}
        failed: dict[str, str] = {}
        with two_cores(), scratch_folder() as folder:
            # Before any clock
            info = prepare(load_config(preset=CPU_PRESET, overrides=dict(data_flags(args))))
            report.conditions["data"] = info.note
            env = arm_environment() | {"TMPDIR": str(folder / "tmp"), "CUDA_VISIBLE_DEVICES": ""}

            # Round by round in rotating order, a seed per round: all arms of a round see the same
            # seed.
            for turn in range(args.rounds):
                for arm in (arm for arm in rotated(arms, turn) if arm not in failed):
                    # The rules, then the record's own flags, then those of the command line,
                    # which win.
                    record = ARMS[arm]
                    flags = {
                        **RULES,
                        **DEFAULTS,
                        **data_flags(args),
                        "target_loss": record.target,
                        "seed": turn,
                    }
                    flags |= {**record.flags, **overrides}
                    own = folder / f"{arm}-{turn}".replace(" ", "-")
                    try:
                        if arm == OWN:
                            run = run_nanogpt(args.nanogpt, flags, env, own, args.timeout_s)
                        else:
                            run = run_once(record, flags, env, own, args.timeout_s)
                    except ChildFailed as error:
                        failed[arm] = f"{arm}: {error}"
                        report.failures.append(failed[arm])
                        continue
                    found[arm].append(run)
                    say(
                        f"round {turn + 1}/{args.rounds}  {arm:<24}  {run.seconds:.1f} s, "
                        f"{run.cpu_s:.1f} s of CPU  "
                        f"{run.steps} steps  loss {run.loss:.4f}"
                    )

        # A failed arm keeps its rows, which then carry the error.
        for arm in arms:
            target = float(overrides.get("target_loss", ARMS[arm].target))
            report.rows += _make_rows(arm, found[arm], target, report, failed.get(arm, ""))
        _add_targets(report, arms)

    def format_markdown(self, report: Report) -> list[str]:
        """Return the table of records for a page: medians with their range.

        Steps and losses are the highest of a round.
        """

        # Columns: a ratio to each peer, and one to the record before.
        rows = [report.row(arm, SECONDS) for arm in ARMS]
        shown = [row.arm for row in rows if row and not row.skipped]
        peers = [arm for arm in (PEER, OWN) if arm in shown]
        ends = ("CPU seconds", "most steps", "highest loss")
        others = [arm for arm in shown if arm not in peers]
        ahead = {arm: before for before, arm in pairwise(others)}
        columns = [*(f"/ {peer}" for peer in peers), *(["/ the one before"] if ahead else [])]
        head = ("record", "loss", "seconds", *columns, *ends)
        lines = []

        # A peer has no record before it: its last cell stays empty.
        for arm in shown:
            against = [
                report.cell(f"{arm} / {other}", SECONDS, "range")
                for other in (*peers, ahead.get(arm, ""))
            ]
            against = against[: len(columns)]
            cells = [report.cell(arm, metric, "range") for metric in (SECONDS, CPU_TIME)]
            loss = report.row(arm, LOSS)
            steps = report.row(arm, STEPS)
            bound = "≥ " if loss and loss.extra.get("missed") else ""
            if steps and loss and loss.values:
                last = (f"{max(steps.values):.0f}", f"{max(loss.values):.4f}")
            else:
                last = ("", "")
            lines.append(
                (arm, f"{ARMS[arm].target:.2f}", bound + cells[0], *against, cells[1], *last)
            )
        return markdown(head, lines)

    def draw(self, report: Report, path: Path) -> None:
        """Draw seconds and CPU seconds to each record's loss.

        Bars are medians, lines the lowest and highest value.
        """
        with figure(report, path) as (left, right):
            for axes, metric in ((left, SECONDS), (right, CPU_TIME)):
                bars(axes, measured(report, list(ARMS), metric), color="0.6")
                axes.set(title=f"{metric}, seconds", xlabel="medians and range")
                axes.invert_yaxis()


@contextmanager
def two_cores() -> Iterator[None]:
    """Bind this process and its children to two cores, where the system supports that."""

    # Children inherit the affinity, so every run has the same two cores on a larger machine.
    before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if len(before) > CORES:
        os.sched_setaffinity(0, sorted(before)[:CORES])
    try:
        yield
    finally:
        if len(before) > CORES:
            os.sched_setaffinity(0, before)


def run_once(
    record: Record,
    flags: Mapping[str, object],
    env: Mapping[str, str],
    folder: Path,
    timeout_s: float,
) -> SpeedrunResult:
    """Run one record's command and return its result.

    Raises ChildFailed, also when no evaluation was made.
    """
    folder.mkdir(parents=True)
    command = [
        sys.executable,
        "-m",
        record.module,
        "--preset",
        record.preset,
        *words({**flags, "out_dir": folder}),
    ]

    # The kernel adds a child's CPU time only when it has been waited for: read it after the end.
    before = _children_cpu_s()
    with Child(command, env, folder / "output.log") as child:
        child.wait(timeout_s)
        cpu_s = _children_cpu_s() - before

        # A nanoray run has a folder of its own below --out_dir; the peer's loop writes directly
        # into it.
        paths = [*folder.glob("metrics.jsonl"), *folder.glob("*/metrics.jsonl")]
        evaluations = [r for path in paths for r in read_json_lines(path) if "val/loss" in r]
        if not evaluations:
            raise ChildFailed(f"it ended without an evaluation\n{child.tail()}")

    # The clock stops when the evaluation has ended, not when the process has: saving and exiting
    # are no part of the record.
    last = evaluations[-1]
    seconds = last["time"] + last["time/eval_s"] - child.started
    return SpeedrunResult(seconds, cpu_s, last["step"], last["val/loss"])


def run_nanogpt(
    source: Path,
    flags: Mapping[str, object],
    env: Mapping[str, str],
    folder: Path,
    timeout_s: float,
) -> SpeedrunResult:
    """Run nanoGPT's train.py until its own evaluation shows the loss; return the result.

    Raises ChildFailed.
    """
    folder.mkdir(parents=True)
    config = load_config(preset=CPU_PRESET, overrides=dict(flags))
    peer = NanoGPT(source, config, prepare(config), folder)
    before = _children_cpu_s()
    step, seconds, loss = peer.train(config.target_loss, env, timeout_s)
    return SpeedrunResult(seconds, _children_cpu_s() - before, step, loss)


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _make_rows(
    arm: str, found: list[SpeedrunResult], target: float, report: Report, failed: str
) -> list[Measurement]:
    """Return an arm's rows, a value per round.

    Where a round has not reached the loss, its seconds are those of the whole run.
    """

    # A round that missed the loss took at least as long as it ran.
    missed = [
        f"round {turn} ended at {run.loss:.4f}"
        for turn, run in enumerate(found, 1)
        if run.loss > target
    ]
    note = f"{ARMS[arm].what}; target {target:g}" + "".join(
        f"; {each}: seconds are a lower bound" for each in missed
    )

    # A record must reach its loss in every round; a peer may miss it.
    if missed and arm in RECORDS:
        report.failures.append(f"{arm}: {', '.join(missed)}, above {target:g}")
    values = {
        SECONDS: [run.seconds for run in found],
        CPU_TIME: [run.cpu_s for run in found],
        STEPS: [float(run.steps) for run in found],
        LOSS: [run.loss for run in found],
    }
    more = {"missed": len(missed)}
    return [
        Measurement(
            arm, metric, unit, () if failed else tuple(values[metric]), note, failed, extra=more
        )
        for metric, unit in UNITS.items()
    ]


def _add_targets(report: Report, arms: list[str]) -> None:
    """Add each record's ratios to nanoGPT and to the record before, and the targets."""

    # Only records with the same target can be compared in seconds.
    own = [arm for arm in arms if arm not in (PEER, OWN) and ARMS[arm].target == ARMS[PEER].target]
    for first in (peer for peer in (PEER, OWN) if peer in arms):
        for arm in own:
            report.compare(arm, first, CPU_TIME)
            row = report.compare(arm, first, SECONDS)
            if row and arm in RECORDS:
                report.targets.append(Target(f"{SECONDS}, {row.arm}", row, "<=", 1 / 3))
    for before, arm in pairwise(own):
        report.compare(arm, before, SECONDS)

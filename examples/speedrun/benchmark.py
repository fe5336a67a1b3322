"""`python -m examples.speedrun.benchmark`: seconds from a command to a validation loss.

The data is tiny Shakespeare, the machine two CPU cores. docs/speedrun.md has the rules and the
records. Arms run one after the other, in rotating order; each round has a seed of its own, the same
one in all arms. The clock starts with the process and ends when an evaluation has shown the loss.
CPU time is that of the whole process, its end included: other work on the machine changes it less
than the clock.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from nanoray.bench.__main__ import exit_code_of, run_one
from nanoray.bench.harness.benchmark import Benchmark, Number, part
from nanoray.bench.harness.figure import Figure, Panel, bars, measured
from nanoray.bench.harness.processes import Child, ChildFailed, arm_environment, scratch_folder
from nanoray.bench.harness.report import Measurement, Report, say
from nanoray.bench.harness.table import SPREAD, Table, TableColumn, names
from nanoray.bench.harness.trainings import (
    add_data_flags,
    add_settings_flag,
    chosen,
    data_flags,
    in_turns,
    settings_of,
)
from nanoray.bench.peers.nanogpt import NanoGPT
from nanoray.bench.registry import Entry
from nanoray.bench.to_loss import RunToLoss, children_cpu_s, run_to_loss
from nanoray.config import load_config
from nanoray.data.prepare import prepare
from nanoray.errors import ConfigError

CORES = 2
# As nanoGPT prints it
EVALUATION = re.compile(r"^step (\d+): train loss [\d.]+, val loss ([\d.]+)", re.MULTILINE)
LOOK_S = 0.1  # between two looks at what it has printed
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
    program: Sequence[str] = ("-m", "nanoray.train")


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
        (str(Path(__file__).with_name("plain_loop.py")),),
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


def shown_in(report: Report) -> list[str]:
    """Return the arms that have run."""
    rows = [report.row(arm, SECONDS) for arm in ARMS]
    return [row.arm for row in rows if row and not row.skipped]


def _target(report: Report, arm: str, spread: str) -> str:
    return f"{ARMS[arm].target:.2f}"


def _seconds(report: Report, arm: str, spread: str) -> str:
    """Return the seconds of an arm; those of a round that missed its loss are a lower bound."""
    loss = report.row(arm, LOSS)
    bound = "≥ " if loss and loss.extra.get("missed") else ""
    return bound + report.cell(arm, SECONDS, spread)


def _beside_the_one_before(report: Report, arm: str, spread: str) -> str:
    """Return the ratio to the record before; a peer has none."""
    records = [other for other in shown_in(report) if other not in (PEER, OWN)]
    before = {later: earlier for earlier, later in pairwise(records)}
    return report.cell(f"{arm} / {before[arm]}", SECONDS, spread) if arm in before else ""


def _most_steps(report: Report, arm: str, spread: str) -> str:
    row = report.row(arm, STEPS)
    return f"{max(row.values):.0f}" if row and row.values else ""


def _highest_loss(report: Report, arm: str, spread: str) -> str:
    row = report.row(arm, LOSS)
    return f"{max(row.values):.4f}" if row and row.values else ""


def _bars_of(metric: str) -> Panel:
    """Return the panel of a metric: bars are medians, lines the lowest and highest value."""

    def draw(axes: Any, report: Report) -> None:
        bars(axes, measured(report, list(ARMS), metric), color="0.6")

    return Panel(draw, {"title": f"{metric}, seconds", "xlabel": "medians and range"}, down=True)


class SpeedrunBenchmark(Benchmark):
    """Measure the seconds from a command to a validation loss."""

    numbers = (
        Number("rounds", "rounds of all arms, a seed each", usual=5, few=1),
        Number("timeout_s", "seconds after which a run has failed", 600.0),
    )
    tables = (
        Table(
            shown_in,
            (
                names("record"),
                TableColumn("loss", _target),
                TableColumn("seconds", _seconds, SPREAD),
                TableColumn(f"/ {PEER}", SECONDS, SPREAD, over=PEER, optional=True),
                TableColumn(f"/ {OWN}", SECONDS, SPREAD, over=OWN, optional=True),
                TableColumn("/ the one before", _beside_the_one_before, SPREAD, optional=True),
                TableColumn("CPU seconds", CPU_TIME, SPREAD),
                TableColumn("most steps", _most_steps),
                TableColumn("highest loss", _highest_loss),
            ),
        ),
    )
    figure = Figure((_bars_of(SECONDS), _bars_of(CPU_TIME)))

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Add this benchmark's flags."""
        which = f"all, or which of {', '.join(ARMS)} [%(default)s]"
        parser.add_argument("--arms", default=DEFAULT_ARMS, metavar="A,B", help=which)
        add_settings_flag(parser, "those of all arms")
        add_data_flags(parser, "shakespeare")
        parser.add_argument(
            "--nanogpt",
            type=Path,
            metavar="PATH",
            help=f"folder of nanoGPT, which the arm {OWN} needs",
        )

    def measure(self, args: argparse.Namespace, report: Report) -> None:
        """Run every record's command in each round, and fill the report.

        Nothing that it starts outlives it.
        """

        # Wrong flags are refused before a round has taken its minutes.
        overrides = settings_of(args)
        arms = chosen(args.arms, list(ARMS))
        if args.nanogpt and not (args.nanogpt / "train.py").is_file():
            raise ConfigError(
                f"nanogpt = {args.nanogpt} has no train.py; give the folder of a clone of nanoGPT"
            )

        # Without nanoGPT's folder its own script is skipped, and the report says so.
        if OWN in arms and args.nanogpt is None:
            arms.remove(OWN)
            report.add(OWN, SECONDS, "s", (), skipped="--nanogpt names no folder")
        # Before any clock
        info = prepare(load_config(preset=CPU_PRESET, overrides=dict(data_flags(args))))
        report.conditions["data"] = info.note
        found: dict[str, list[RunToLoss]] = {arm: [] for arm in arms}
        failed: dict[str, str] = {}

        def add_rows() -> None:
            # A failed arm keeps its rows, which then carry the error.
            for arm in arms:
                target = float(overrides.get("target_loss", ARMS[arm].target))
                report.rows += _make_rows(arm, found[arm], target, report, failed.get(arm, ""))
            _add_targets(report, arms)

        def fail(arm: str, error: Exception) -> None:
            failed[arm] = f"{arm}: {error}"
            report.failures.append(failed[arm])

        with two_cores(), scratch_folder() as folder, part(report, add_rows):

            def run(arm: str, turn: int) -> None:
                # A seed per round: all arms of a round see the same one
                new = _run(args, arm, turn, overrides, folder)
                found[arm].append(new)
                say(
                    f"round {turn + 1}/{args.rounds}  {arm:<24}  {new.seconds:.1f} s, "
                    f"{new.cpu_s:.1f} s of CPU  {new.steps} steps  loss {new.loss:.4f}"
                )

            in_turns(arms, args.rounds, failed, run, fail)


def _run(
    args: argparse.Namespace, arm: str, turn: int, overrides: Mapping[str, str], folder: Path
) -> RunToLoss:
    """Run an arm's command in a round. Raises ChildFailed."""
    record = ARMS[arm]
    env = arm_environment() | {"TMPDIR": str(folder / "tmp"), "CUDA_VISIBLE_DEVICES": ""}
    # The rules, then the record's own flags, then those of the command line, which win.
    flags = {**RULES, **DEFAULTS, **data_flags(args)}
    flags |= {"target_loss": record.target, "seed": turn, **record.flags, **overrides}
    own = folder / f"{arm}-{turn}".replace(" ", "-")
    if arm == OWN:
        return run_nanogpt(args.nanogpt, flags, env, own, args.timeout_s)
    flags["preset"] = record.preset
    return run_to_loss(record.program, flags, env, own, args.timeout_s)


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


class _Reached(Exception):
    """An evaluation has shown the loss that was wanted."""


def run_nanogpt(
    source: Path,
    flags: Mapping[str, object],
    env: Mapping[str, str],
    folder: Path,
    timeout_s: float,
) -> RunToLoss:
    """Run nanoGPT's train.py until its own evaluation shows the loss; return the result.

    Raises ChildFailed.
    """
    folder.mkdir(parents=True)
    config = load_config(preset=CPU_PRESET, overrides=dict(flags))
    peer = NanoGPT(source, config, prepare(config), folder)
    batches = max(1, config.eval_samples // config.global_batch_size)
    command = peer.command(eval_interval=config.eval_every, eval_iters=batches)
    before = children_cpu_s()
    # The seconds of an evaluation are those when its line was seen, at most LOOK_S after it was
    # printed.
    seen: dict[int, tuple[float, float]] = {}
    with Child(command, env, peer.folder / "output.log") as child:

        def look() -> None:
            at = time.monotonic() - child.began
            printed = child.log.read_text(encoding="utf-8", errors="replace")
            for step, loss in EVALUATION.findall(printed):
                seen.setdefault(int(step), (at, float(loss)))
                if int(step) and float(loss) <= config.target_loss:
                    raise _Reached

        with suppress(_Reached):
            child.wait(timeout_s, look, LOOK_S)
            look()
        if not seen:
            raise ChildFailed(f"no line `step N: train loss L, val loss L`\n{child.tail()}")
    last = max(seen)
    seconds, loss = seen[last]
    return RunToLoss(seconds, children_cpu_s() - before, last, loss)


def _make_rows(
    arm: str, found: list[RunToLoss], target: float, report: Report, failed: str
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
                report.add_target(f"{SECONDS}, {row.arm}", row, "<=", 1 / 3)
    for before, arm in pairwise(own):
        report.compare(arm, before, SECONDS)


ENTRY = Entry(
    "speedrun",
    "seconds from a command to a validation loss on two CPU cores; all may join",
    SpeedrunBenchmark,
    command="python -m examples.speedrun.benchmark",
)


if __name__ == "__main__":
    raise SystemExit(exit_code_of(lambda: run_one("speedrun", ENTRY, sys.argv[1:])))

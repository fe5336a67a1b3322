"""`python -m tests.stress soak`: a training under random faults must end like one without.

    calibrate ─► clean run ─► the same run, with a fault every 20 s or so ─► compare ─► look for leftovers

The faults are SIGKILL and SIGSTOP of a rank, SIGKILL of all ranks at once, SIGTERM and SIGKILL of
the driver (which is then started again with `--resume auto`), and SIGKILL of everything on a node.
Faults may overlap: up to three may wait for recovery at a time. It fails when a weight, an
optimizer moment or a logged loss differs in one bit, when something outlives the run, or when the
run does not end. A full disk is not among them, because it cannot be made from outside:
nanoray.launch has `--faults disk-full@...`.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nanoray.bench.harness.benchmark import Benchmark, Number
from nanoray.bench.harness.figure import Figure, Panel
from nanoray.bench.harness.processes import arm_environment, scratch_folder
from nanoray.bench.harness.report import (
    Report,
    number,
    say,
    table,
)
from nanoray.bench.harness.table import Table, TableColumn, names
from nanoray.bench.harness.trainings import add_data_flags, data_flags, words
from nanoray.config import load_config
from nanoray.data.prepare import prepare
from nanoray.errors import ConfigError
from nanoray.faults.cause import read_reports
from nanoray.machine.atomic import read_json_lines
from nanoray.machine.gpus import discover_gpus
from nanoray.machine.host import available_cpus
from nanoray.machine.slots import local_slots
from nanoray.machine.text import aligned
from tests.harness import leaks
from tests.stress.chaos import (
    FAST_HEALTH,
    WEIGHTS,
    Chaos,
    FaultEvent,
    ObservedRun,
    SeenRun,
    SoakFailed,
    fault_records,
    survive,
)
from tests.stress.cluster import NodeCluster

CLEAN = "clean"
FAULTY = "faulty"
RATE = "rate while training"
WHOLE = "whole run"
LOST = "without training"
AGAIN = "fault to training again"
GAP_S = 0.5  # no step for so long: the run stands still
PARTS = 5  # of the run, each with its own rate
LEAST_STEPS = 200
CALIBRATION_STEPS = 400
SAVE_S = 3.0  # between checkpoints, more or less: between two faults there is time for one
# More than in the first half of its training: a rank that serves the store after a recovery has 16
# connections more, however often it does
MOST_FDS = 24
GOODPUT = 0.9
GRACE_S = 300.0  # on top of twice the minutes, until a run without an end has failed
JUDGED_S = 120.0  # a clean run that is shorter says little of its rate
COMPARED = ("train/loss", "train/grad_norm", "train/lr", "train/tokens", "val/loss")
RECIPE = {
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 64,
    "block_size": 32,
    "global_batch_size": 12,
    "dropout": 0.1,
    "log_every": 50,
    "eval_samples": 24,
    "keep_checkpoints": 3,
    "sample_tokens": 0,
    "cpus_per_worker": 1,
    "max_failures": 100000,
    "hang_timeout": 5,
    "timeout_s": 30,
    "init_timeout_s": 30,
    "replace_timeout": 60,
    "placement_timeout_s": 30,
}


# What is shown.


def faults_of(report: Report) -> list[dict[str, Any]]:
    """Return the faults of a report, each with time, kind, target and step."""
    row = report.row(FAULTY, "faults")
    return list(row.extra["faults"]) if row else []


def _count(report: Report) -> Counter[str]:
    return Counter(fault["kind"] for fault in faults_of(report))


def _kinds_in(report: Report) -> list[str]:
    """Return the kinds in the fixed order of the weights, without those that never happened."""
    return [kind for kind in WEIGHTS if _count(report)[kind]]


def _longest(report: Report, kind: str, spread: str) -> str:
    row = report.row(kind, AGAIN)
    return number(max(row.values)) if row else ""


def _draw_steps(axes: Any, report: Report) -> None:
    """Draw steps over time of both runs, with a mark at each fault."""
    for arm, color in ((CLEAN, "0.6"), (FAULTY, "C0")):
        row = report.row(arm, WHOLE)
        if row:
            at, steps = zip(*row.extra["steps_over_time"], strict=True)
            axes.plot(at, steps, color=color, label=f"{arm} run")

    # One mark per kind, at the step and second of each fault.
    for kind, mark in zip(WEIGHTS, "vs*^XP", strict=True):
        hit = [fault for fault in faults_of(report) if fault["kind"] == kind]
        if hit:
            at, steps = zip(*((fault["at_s"], fault["step"]) for fault in hit), strict=True)
            axes.plot(at, steps, mark, label=f"{len(hit)} x {kind}")


class SoakBenchmark(Benchmark):
    """Train under random faults, and compare the weights with a run without."""

    # Wrong: tensors and logged values that differ from the clean run's; what was left behind
    numbers = (
        Number("minutes", "of the whole, more or less", 30.0, 2.0),
        Number("share", "of these minutes for the clean run", 0.4),
        Number("seed", "of kinds, moments and targets of the faults", 7, zero=True),
        Number("every", "mean seconds between faults", 20.0),
        Number("most", "faults at most", 10**6),
        Number("workers", "ranks; of two nodes, one has W - 1", 2),
    )
    # Per kind of fault, how many there were, and how long until the run trained again
    tables = (
        Table(
            _kinds_in,
            (
                names("fault"),
                TableColumn("n", lambda report, kind, spread: str(_count(report)[kind])),
                TableColumn("training again after, s (median)", AGAIN),
                TableColumn("longest", _longest),
            ),
            missing="-",
        ),
    )
    figure = Figure(
        (
            Panel(
                _draw_steps,
                {"xlabel": "seconds since the command", "ylabel": "optimizer steps done"},
                legend={"fontsize": 8},
            ),
        ),
        size=(11, 4),
    )

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Add this benchmark's flags."""
        parser.add_argument(
            "--nodes",
            type=int,
            choices=(1, 2),
            default=2,
            help="nodes; of two, one can be lost [2]",
        )
        parser.add_argument(
            "--device",
            default="cpu",
            help="as in nanoray.launch; GPUs may not give equal bits [cpu]",
        )
        add_data_flags(parser, "stdlib")
        parser.add_argument(
            "--shared",
            action="store_true",
            help="others use this machine: new files in /tmp may be theirs",
        )
        parser.add_argument(
            "--keep", type=Path, metavar="DIR", help="an empty folder that keeps runs and logs"
        )

    def measure(self, args: argparse.Namespace, report: Report) -> None:
        """Run it, and fill the report. Nothing that it starts outlives it."""

        # Check all flags first: a soak takes half an hour.
        if args.share >= 1 or args.workers < args.nodes:
            raise ConfigError(
                f"share = {args.share:g}, workers = {args.workers}, nodes = {args.nodes}; share must be "
                "below 1, and each node needs a rank"
            )
        if args.keep and (not args.keep.is_dir() or any(args.keep.iterdir())):
            raise ConfigError(f"keep = {args.keep} is no empty folder; make one")
        if sys.platform != "linux":
            raise ConfigError(
                f"soak finds its ranks in /proc, which {sys.platform} has not; run it on Linux"
            )

        # What is in /tmp and /dev/shm before: only what appears later can be this run's.
        before = leaks.entries()
        with scratch_folder("nrs-") as folder:
            try:
                _run_soak(args, report, folder)
                _add_leftovers(report, "after the cluster's end", [*leaks.processes(str(folder))])
            finally:
                # Copy runs and logs after a failure as well: then they are needed most.
                if args.keep:
                    for part in ("calibration", CLEAN, FAULTY):
                        if (folder / part).exists():
                            shutil.copytree(folder / part, args.keep / part, symlinks=True)
        _add_leftovers(
            report, "in /tmp and /dev/shm", leaks.abandoned(before), judged=not args.shared
        )

    def format_text(self, report: Report) -> list[str]:
        """Return the faults one by one, then the table of all rows."""
        faults = [("seconds", "step", "fault", "again after, s", "whom")]
        for fault in faults_of(report):
            again = "-" if fault["again_s"] is None else f"{fault['again_s']:.1f}"
            faults.append(
                (f"{fault['at_s']:.1f}", str(fault["step"]), fault["kind"], again, fault["target"])
            )
        return [*aligned(faults, right={0, 1, 3}), "", *table(report.rows)]


def _run_soak(args: argparse.Namespace, report: Report, folder: Path) -> None:
    minutes: float = args.minutes
    slots = local_slots(args.device, args.workers, discover_gpus(), available_cpus())
    data = data_flags(args)
    prepared = prepare(load_config(overrides=dict(data)))  # now, and not in the first run
    env = arm_environment() | FAST_HEALTH | {"TMPDIR": str(folder / "tmp")}
    flags = RECIPE | data | {"device": args.device, "workers": args.workers}

    # Nodes share this machine, so `spread` must be requested: otherwise all ranks could go to one
    # node and the loss of the other would disturb nothing.
    flags |= {"placement": "spread"} if args.nodes > 1 else {}
    beside = args.nodes - 1
    with NodeCluster(folder, env, slots, beside, head_cpus=args.workers - beside) as cluster:

        def training(name: str, steps: int, save: int = 250) -> ObservedRun:
            own = flags | {
                "max_steps": steps,
                "warmup_steps": min(100, steps // 2),
                "ray_address": cluster.address,
            }
            own |= {"checkpoint_every": save, "eval_every": 2 * save}
            return ObservedRun(
                [sys.executable, "-m", "nanoray.launch", *words(own)], cluster, folder / name, steps
            )

        # Measure the speed of this machine: the number of steps follows from it, so that both
        # runs fit into the minutes.
        with training("calibration", CALIBRATION_STEPS) as run:
            survive(run, cluster, None, 300.0)
            rate = statistics.median(rates(run.seen, CALIBRATION_STEPS, 1))

        # Checkpoints a few seconds apart: rarer ones would repeat most of the run, more frequent
        # ones would cost most of its time.
        steps = max(LEAST_STEPS, round(rate * minutes * 60 * args.share / 50) * 50)
        save = max(50, min(500, round(rate * SAVE_S / 50) * 50))
        plan = f"{steps} steps, a checkpoint every {save}"
        report.conditions["recipe"] = (
            f"{args.workers} ranks on {args.nodes} node(s), {plan}, {prepared.note}"
        )
        report.conditions["seed"] = args.seed
        say(f"{steps} steps, {rate:.0f} a second; the clean run")

        # The reference: the same command without faults.
        with training(CLEAN, steps, save) as clean:
            clean_s = survive(clean, cluster, None, minutes * 60 + GRACE_S)
            _add_progress(report, CLEAN, clean, clean_s)
        chaos = Chaos(args.seed, args.every, args.most, args.nodes)
        say(f"{clean_s:.0f} s; the run under faults")
        with training(FAULTY, steps, save) as faulty:
            try:
                # Twice the clean run's minutes and a grace period: recovery takes time, an endless run
                # fails.
                faulty_s = survive(faulty, cluster, chaos, minutes * 60 * 2 + GRACE_S)
                _add_progress(report, FAULTY, faulty, faulty_s)
                _compare_runs(report, clean.run, faulty.run, steps)
            except SoakFailed as error:
                report.failures.append(f"the run under faults: {error}")
            finally:
                _add_faults(report, faulty, chaos.caused)

        # Look for leftovers here, after the cluster's end, and in shared folders: each place can
        # hide what the others do not show.
        _add_leftovers(report, "on the cluster", leaks.on_cluster(cluster.env))
        runs = leaks.processes(str(faulty.out)) + [
            f"process {pid}: rank {slot}" for slot, pid in faulty.ranks()
        ]
        _add_leftovers(report, "beside the cluster", runs)
        _add_open_files(report, faulty)
    _add_targets(report)


# What the two runs came to.


def increments(seen: SeenRun) -> Iterable[tuple[float, float, int, int]]:
    """Yield (since, until, step before, step after) for each advance that was seen."""

    # A restart goes back to a checkpoint; only steps that were never done before count as
    # progress.
    last = seen.points[0] if seen.points else (0.0, 0)
    for at, step in seen.points[1:]:
        if step > last[1]:
            yield last[0], at, last[1], step
            last = (at, step)


def rates(seen: SeenRun, steps: int, parts: int) -> list[float]:
    """Return steps per second in each part of the run, without the gaps of its faults."""

    # A gap is time without training and belongs to `lost`, not to the rate.
    done = [0] * parts
    seconds = [0.0] * parts
    for since, until, before, after in increments(seen):
        if until - since <= GAP_S:
            part = min(parts - 1, before * parts // steps)
            done[part] += after - before
            seconds[part] += until - since
    return [n / s for n, s in zip(done, seconds, strict=True) if s]


def gaps(seen: SeenRun) -> list[tuple[float, float]]:
    """Return (since, until) of each time in which no step was done that had not been done before."""
    return [(since, until) for since, until, _, _ in increments(seen) if until - since > GAP_S]


def _add_progress(report: Report, arm: str, training: ObservedRun, seconds: float) -> None:
    still = gaps(training.seen)
    seen = training.seen

    # At most some thousand points go to the file: the figure needs no more.
    every = max(1, len(seen.points) // 1000)
    line = {"steps_over_time": seen.points[::every] + seen.points[-1:]}
    if training.drivers > 1:
        note = f"the command and {training.drivers - 1} more with --resume auto"
    else:
        note = "the command"
    report.add(arm, WHOLE, "s", round(seconds, 2), note, extra=line)
    report.add(
        arm,
        RATE,
        "step/s",
        rates(seen, max(1, seen.points[-1][1]), PARTS),
        f"in {PARTS} parts of the run",
    )
    report.add(
        arm,
        LOST,
        "s",
        round(sum(b - a for a, b in still), 2),
        f"{len(still)} gaps above {GAP_S:g} s",
    )


def _compare_runs(report: Report, clean: Path | None, faulty: Path | None, steps: int) -> None:
    """Compare the final checkpoints and all logged values of both runs, bit for bit."""
    import torch

    from nanoray.checkpoint.resume import newest_valid

    assert clean
    assert faulty

    # The last valid checkpoint of each run must be that of the last step.
    found = [newest_valid(run / "checkpoints")[0] for run in (clean, faulty)]
    ends = [resume.state if resume else None for resume in found]
    theirs, ours = ends
    if not (theirs and ours) or {theirs.meta["step"], ours.meta["step"]} != {steps}:
        report.failures.append(
            f"no final checkpoint: found {[e.meta['step'] if e else None for e in ends]} of {steps}"
        )
        return

    # Equal means equal bits: no tolerance, because a run that recovers repeats the same
    # arithmetic.
    for name in ("model", "optimizer"):
        one = getattr(theirs, name)
        other = getattr(ours, name)
        wrong = [key for key in one.keys() | other.keys() if key not in one or key not in other]
        wrong += [key for key in one.keys() & other.keys() if not torch.equal(one[key], other[key])]
        report.add(
            FAULTY,
            f"{name}: tensors",
            "",
            len(one),
            ", ".join(sorted(wrong)[:3]),
            wrong=len(wrong),
        )

    # Then every logged value, without a tolerance as well. A resumed run also logs its first step:
    # that record needs no counterpart, but each record of the clean run does.
    logged = [_read_logged_values(run) for run in (clean, faulty)]
    differ = sorted(place for place, value in logged[0].items() if logged[1].get(place) != value)
    if differ:
        first = f"first: {differ[0][1]} of step {differ[0][0]}"
    else:
        first = "losses, gradient norms, learning rates, tokens"
    report.add(FAULTY, "logged values", "", len(logged[0]), first, wrong=len(differ))


def _read_logged_values(run: Path) -> dict[tuple[int, str], float]:
    return {
        (record["step"], key): record[key]
        for record in read_json_lines(run / "metrics.jsonl")
        for key in COMPARED
        if key in record
    }


def _add_faults(report: Report, training: ObservedRun, caused: list[FaultEvent]) -> None:
    """Add the faults, and what followed from them."""
    still = gaps(training.seen)

    # A fault may take effect a moment later than it was caused. Its gap is the first that ends
    # after it.
    for fault in caused:
        ends = [
            until
            for since, until in still
            if since <= fault.at_s + 2 * GAP_S and until > fault.at_s
        ]
        fault.again_s = round(ends[0] - fault.at_s, 2) if ends else None

    # Read what the drivers reported, from all run folders: a driver that is lost before the first
    # checkpoint leaves a folder of its own.
    reports = [
        r for run in sorted(training.out.glob("*/run.json")) for r in read_reports(run.parent)
    ]
    known = [r for r in reports if r["event"] == "fault"]
    how = Counter(r["recovery"] or "overtaken" for r in known)
    counts = Counter(fault.kind for fault in caused)
    report.add(
        FAULTY,
        "faults",
        "",
        len(caused),
        _format_counts(counts),
        extra={"faults": fault_records(caused)},
    )
    report.add(FAULTY, "faults that the driver reports", "", len(known), _format_counts(how))
    report.add(FAULTY, "drivers", "", training.drivers, _format_counts(Counter(training.ends)))
    report.add(
        FAULTY,
        "steps repeated",
        "",
        training.seen.repeated,
        "after restarts, from checkpoints",
    )

    # A fault that interrupted nothing, such as one after the last step, has no seconds.
    for kind in counts:
        values = [f.again_s for f in caused if f.kind == kind and f.again_s is not None]
        if values:
            report.add(
                kind, AGAIN, "s", values, "includes faults that came before it had recovered"
            )
    if not caused:
        report.failures.append(
            "no fault happened before the run ended; raise --minutes or lower --every"
        )


def _format_counts(counts: Counter[str]) -> str:
    return ", ".join(f"{n} x {name}" for name, n in counts.most_common())


def _add_leftovers(report: Report, where: str, found: list[str], judged: bool = True) -> None:
    wrong = len(found) if judged else None
    report.add("left behind", where, "", len(found), "; ".join(found[:3]), wrong=wrong)


def _add_open_files(report: Report, training: ObservedRun) -> None:
    """Add the open files of the longest-lived driver and rank over time.

    Their number must not grow.
    """
    for who in ("driver", "rank"):
        # Processes are replaced all the time; only one that lived long can show a leak.
        lives = {
            name: counts for name, counts in training.seen.files.items() if name.startswith(who)
        }
        if not lives:
            continue
        name, counts = max(lives.items(), key=lambda life: len(life[1]))

        # Compare the most of the first half with the median of the last seconds.
        totals = [kinds.total() for kinds in counts]
        early = max(counts[: len(counts) // 2 + 1], key=Counter.total)
        grown = int(statistics.median(totals[-5:])) > early.total() + MOST_FDS
        note = (
            f"of {name}, which trained for {len(counts)} s: {early.total()} early, {totals[-1]} at "
            f"the end; more of {_format_counts(counts[-1] - early) or 'none'}"
        )
        report.add(FAULTY, f"open files, {who}", "", max(totals), note, wrong=int(grown))


def _add_targets(report: Report) -> None:
    # The rate excludes the gaps: a fault may interrupt training but must not slow the steps after
    # it.
    row = report.compare(FAULTY, CLEAN, RATE, "the same part of the steps in both runs")
    clean = report.row(CLEAN, WHOLE)
    if row and clean and clean.median >= JUDGED_S:
        report.add_target(
            "steps per second while it trains, of the clean run's", row, ">=", GOODPUT
        )
    report.compare(CLEAN, FAULTY, WHOLE, "of the time under faults, what a run without any takes")

"""`nanoray replay bisect A [B]`: find the first step in which two runs differ, its ranks and tensors.

Differences of configuration and machine are listed first. Then the first step whose records or
hashes differ, and the checkpoints of both runs: which tensors, and how many of their elements.
Without B, A is compared with its re-enactment, from its start or oldest checkpoint on, from one
checkpoint to the next, until something differs: all of A's compute, on this machine. Exit code 1:
they differ.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from nanoray.cli import RUNS, Parser, exit_code_of, find_run_folder, name_program, tool_parser
from nanoray.errors import ConfigError
from nanoray.lab.replay.again import doubts, reenact
from nanoray.lab.replay.recorded import (
    Difference,
    RecordedRun,
    compared,
    differences,
    format_difference,
    read_recorded,
    tensors_apart,
)

# Where it ran, and as what
NOT_OF_RUN = ("out_dir", "data_dir", "name", "resume", "stop_at", "workers", "kube")
SHOWN = 5  # tensors that are listed


def make_parser() -> Parser:
    """Return the parser of `nanoray replay bisect`."""
    parser = tool_parser(name_program("replay bisect"), __doc__)
    parser.add_argument(
        "a",
        type=Path,
        nargs="?",
        default=RUNS,
        metavar="A",
        help="folder of a run [the newest in runs]",
    )
    parser.add_argument(
        "b", type=Path, nargs="?", metavar="B", help="folder of another run [A's re-enactment]"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run `nanoray replay bisect` and return the exit code."""
    return exit_code_of(lambda: _run(make_parser().parse_args(argv)))


def _run(args: argparse.Namespace) -> int:
    a = read_recorded(find_run_folder(args.a))
    if args.b:
        return _two(a, read_recorded(find_run_folder(args.b)))
    return _one(a)


def _two(a: RecordedRun, b: RecordedRun) -> int:
    """Compare two runs by what both have kept."""
    print(
        "\n".join(_setups(a, b))
        or "setup    both runs have one configuration, on the same kind of machine"
    )
    last = min(a.last, b.last)
    wrong = [*differences(a, b, range(1, last + 1))]
    # Only checkpoints that both runs still have can be compared bit by bit.
    both = sorted(a.checkpoints.keys() & b.checkpoints.keys())
    return _report(a, b, range(1, last + 1), wrong, both)


def _one(run: RecordedRun) -> int:
    """Compare a run with its re-enactment, from one checkpoint to the next."""
    starts = sorted(run.starts)
    if not starts or starts[0] >= run.last:
        raise ConfigError(
            f"{run.folder} has no checkpoint before its last step {run.last}; train with more of "
            "them"
        )
    unsure = doubts(run, range(starts[0] + 1, run.last + 1))
    if unsure:
        raise ConfigError(
            f"a re-enactment here cannot tell: {'; '.join(unsure)}; give two runs to compare"
        )
    with tempfile.TemporaryDirectory() as folder:
        # Each part starts from a checkpoint of A, so an error does not spread to later parts.
        for start, end in zip(starts, [*starts[1:], run.last], strict=True):
            steps = range(start + 1, end + 1)
            if not steps:
                continue
            print(f"again    steps {steps[0]} to {end}", flush=True)
            again = reenact(run, start, end, Path(folder, str(start)))
            wrong = [*differences(run, again, steps)]
            both = [end] if end in run.checkpoints else []
            if _report(run, again, steps, wrong, both):
                return 1
    return 0


def _setups(a: RecordedRun, b: RecordedRun) -> list[str]:
    """Return a line for each difference of the two runs' configurations, data and machines."""
    ours, theirs = (run.state_hashes.groups[0] for run in (a, b))
    found = [
        (key, ours[key], theirs[key])
        for key in ours
        if key not in ("group", "resume", "config", "slots")
    ]
    found += [
        (key, value, theirs["config"].get(key))
        for key, value in ours["config"].items()
        if key not in NOT_OF_RUN
    ]
    found += [
        ("dataset (sha256)", a.spec.dataset.tokens_sha256[:16], b.spec.dataset.tokens_sha256[:16])
    ]
    return [f"setup    {key}: {x!r} and {y!r}" for key, x, y in found if x != y]


def _report(
    a: RecordedRun, b: RecordedRun, steps: range, wrong: list[Difference], both: list[int]
) -> int:
    """Print where two runs differ first; return the exit code."""
    apart: list[str] = []
    for step in both:
        apart, count = tensors_apart(a.checkpoints[step], b.checkpoints[step])
        if apart:
            break
    if not wrong and not apart:
        known = [step for step in steps if compared(a, b, step) != (0, 0)]
        print(f"equal    in all that both have of {len(known)} steps and {len(both)} checkpoints")
        return 0
    if wrong:
        at = [d for d in wrong if d.step == wrong[0].step]
        equal = max(
            (step for step in steps if step < at[0].step and compared(a, b, step) != (0, 0)),
            default=steps[0] - 1,
        )
        print(f"step     {at[0].step} is the first that differs; equal up to step {equal}")
        hashes = [d for d in at if d.what.startswith("hash of ")]
        print("\n".join(f"           {format_difference(d)}" for d in at if d not in hashes))
        if hashes:
            names = ", ".join(d.what.removeprefix("hash of ") for d in hashes[:SHOWN])
            count = compared(a, b, at[0].step)[1]
            print(f"           hashes of {len(hashes)} of {count} tensors: {names}")
        print(f"rank     {_rank(a, b, at)}")
    if apart:
        print(
            f"         checkpoint of step {step}: {len(apart)} of {count} tensors differ, the "
            "furthest apart first"
        )
        print("\n".join(f"           {line}" for line in apart[:SHOWN]))
    return 1


def _rank(a: RecordedRun, b: RecordedRun, at: list[Difference]) -> str:
    """Name the rank of the first difference."""
    step = at[0].step

    # The loss of a rank before any sum points at it most clearly.
    losses = [d.rank for d in at if d.what.startswith("own loss")]
    if losses:
        ranks = len(a.state_hashes.states[step]["losses"])
        if len(losses) < ranks:
            return f"{_list(losses)}: its own loss alone differs"
        if ranks == 1:
            return "0"
        return (
            "all: every rank's own loss differs, so their weights or data did so before this step"
        )

    # Next a rank whose state is not one of the other run's.
    digests = [{*run.state_hashes.states.get(step, {}).get("ranks", ())} for run in (a, b)]
    for run, others in ((a, digests[1]), (b, digests[0])):
        own = run.state_hashes.states.get(step, {}).get("ranks", [])
        strays = [rank for rank, digest in enumerate(own) if digest not in others]
        if 0 < len(strays) < len(own):
            return f"{_list(strays)} of {run.folder.name}: its state alone is not that of the other run"

    # Last a rank whose replica differs within its own run.
    apart = [d.rank for d in at if d.tensor]
    if apart:
        ranks = max(len(run.state_hashes.states[step].get("ranks", ())) for run in (a, b))
        if 2 * len(apart) < ranks:
            return f"{_list(apart)}: its state is not that of the run's other ranks"
        return f"0 or {_list(apart)}: they disagree, and no majority tells which of them is right"
    return "unknown: neither losses nor hashes of single ranks are there for this step; train with --hash_every 1"


def _list(ranks: Sequence[int | None]) -> str:
    return ", ".join(map(str, ranks))


if __name__ == "__main__":
    raise SystemExit(main())

"""`nanoray replay [RUN] --step N`: do a step of a run again, and compare it with what the run
recorded.

nanoray replay bisect A [B]   find the first step, rank and tensor in which two runs differ

As many local processes as the run had ranks train from the newest checkpoint before the step (or
from step 0). Exit code 1: a value differs.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from nanoray.cli import (
    Parser,
    add_run,
    exit_code_of,
    find_run_folder,
    name_program,
    run_subcommand,
    tool_parser,
)
from nanoray.lab import local_ranks
from nanoray.lab.replay import bisect
from nanoray.lab.replay.again import doubts, reenact, start_before
from nanoray.lab.replay.recorded import (
    RecordedRun,
    compared,
    differences,
    format_difference,
    read_recorded,
    tensors_apart,
)


def make_parser() -> Parser:
    """Return the parser of `nanoray replay`."""
    parser = tool_parser(name_program("replay"), __doc__)
    add_run(parser)
    parser.add_argument("--step", type=int, required=True, metavar="N", help="the step to do again")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run `nanoray replay` or its part `bisect`, and return the exit code."""

    def replay(words: list[str]) -> int:
        return exit_code_of(lambda: _replay(make_parser().parse_args(words)))

    return run_subcommand({"bisect": bisect.main}, argv, __doc__, otherwise=replay)


def _replay(args: argparse.Namespace) -> int:
    run = read_recorded(find_run_folder(args.run))
    step = args.step
    start = start_before(run, step)
    steps = range(start + 1, step + 1)
    unsure = doubts(run, steps)
    since = f"the checkpoint of step {start}" if start in run.checkpoints else f"step {start}"
    ranks = run.group_of(step)["ranks"]
    print(
        f"replay   step {step} of {run.folder.name}, from {since}, in {ranks} process(es)",
        flush=True,
    )

    # The checkpoints are compared while the folder of the re-enactment exists.
    with local_ranks.ended_by_signals(), tempfile.TemporaryDirectory() as folder:
        again = reenact(run, start, step, Path(folder))
        apart: list[str] = []
        count = 0
        if step in run.checkpoints:
            apart, count = tensors_apart(again.checkpoints[step], run.checkpoints[step])

    wrong = [f"step {d.step}, {format_difference(d)}" for d in differences(again, run, steps)]
    _print_values(again, run, step)
    sizes = [compared(again, run, at) for at in steps]
    values = sum(n for n, _ in sizes)
    hashes = sum(n for _, n in sizes)
    tensors = f", {count} tensors with the checkpoint of step {step}" if count else ""
    print(f"compared {values} values and {hashes} hashes of {len(steps)} step(s){tensors}")
    if not sizes[-1][0]:
        print(
            f"note     step {step} has no record: only steps before it and its causes were "
            "compared (--log_every 1)"
        )
    for line in unsure:
        print(f"note     equal bits are not promised: {line}")
    wrong += apart
    if wrong:
        more = f", and in {len(wrong) - 1} more" if len(wrong) > 1 else ""
        print(f"differs  first in {wrong[0]}{more}")
        return 1
    print("equal    to the bit, as far as the run has recorded it")
    return 0


def _print_values(again: RecordedRun, run: RecordedRun, step: int) -> None:
    """Print each value of the step as computed again and as recorded."""
    recorded = run.values(step)
    for name, value in again.values(step).items():
        known = recorded.get(name)
        if known is None:
            verdict = "not recorded"
        elif known == value:
            verdict = "equal"
        else:
            verdict = f"differs by {known - value:.3g}"
        print(f"  {name:<20} {value!r:<24} {known!r:<24} {verdict}")


if __name__ == "__main__":
    raise SystemExit(main())

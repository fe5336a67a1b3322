"""`nanoray replay [RUN] --step N`: do a step of a run again, and compare it with what the run
recorded.

nanoray replay bisect A [B]   find the first step, rank and tensor in which two runs differ

One process plays all data ranks in turn, from the newest checkpoint before the step (or from step
0), with the run's own loop. Exit code 1: a value differs; where equal bits are not promised, by
more than its limit.
"""

from __future__ import annotations

import argparse
import bdb
import json
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from safetensors.torch import save

from nanoray.checkpoint.tensorfile import plain
from nanoray.cli import (
    Parser,
    add_run,
    exit_code_of,
    find_run_folder,
    name_program,
    run_subcommand,
    tool_parser,
    writing,
)
from nanoray.errors import ConfigError
from nanoray.lab.replay import bisect
from nanoray.lab.replay.again import doubts, reenact, refuse, start_before
from nanoray.lab.replay.player import Witness
from nanoray.lab.replay.recorded import (
    LIMITS,
    RecordedRun,
    compared,
    differences,
    format_difference,
    matters,
    read_recorded,
    tensors_apart,
)
from nanoray.machine.atomic import replace_bytes
from nanoray.train.guard.replicas import hash_tensors
from nanoray.train.guard.state_hashes import format_hash


def make_parser() -> Parser:
    """Return the parser of `nanoray replay`."""
    parser = tool_parser(name_program("replay"), __doc__)
    add_run(parser)
    parser.add_argument("--step", type=int, required=True, metavar="N", help="the step to do again")
    parser.add_argument(
        "--rank",
        type=int,
        metavar="R",
        help="show what this data rank saw; also for --pdb and --dump [0]",
    )
    parser.add_argument(
        "--pdb", action="store_true", help="stop in the model's forward of that step and rank"
    )
    parser.add_argument(
        "-o",
        "--dump",
        type=Path,
        metavar="FILE",
        help="write what that rank saw: FILE.safetensors, FILE.json",
    )
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="DIR",
        help="keep the re-enactment, itself a run, in this folder",
    )
    parser.add_argument(
        "--processes", action="store_true", help="use as many local ranks as the run had, over gloo"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run `nanoray replay` or its part `bisect`, and return the exit code."""

    def replay(words: list[str]) -> int:
        return exit_code_of(lambda: _run(make_parser().parse_args(words)))

    return run_subcommand({"bisect": bisect.main}, argv, __doc__, otherwise=replay)


def _run(args: argparse.Namespace) -> int:
    try:
        return _replay(args)
    except bdb.BdbQuit:
        print("left the debugger: the step was not completed", file=sys.stderr)
        return 1


def _replay(args: argparse.Namespace) -> int:
    run = read_recorded(find_run_folder(args.run))
    step = args.step
    start = start_before(run, step)
    steps = range(start + 1, step + 1)
    ranks = run.group_of(step)["ranks"]
    _check(args, ranks)
    if not args.processes:
        refuse(run, steps)
    unsure = doubts(run, steps, args.processes)
    how = f"{ranks} local ranks" if args.processes else f"one process that plays {ranks} rank(s)"
    since = f"the checkpoint of step {start}" if start in run.checkpoints else f"step {start}"
    print(f"replay   step {step} of {run.folder.name}, from {since}, in {how}", flush=True)
    witness = None
    if args.rank is not None or args.pdb or args.dump:
        witness = Witness(step, args.rank or 0, args.pdb)

    # The checkpoints are compared while the folder of the re-enactment exists.
    with nullcontext(args.keep) if args.keep else tempfile.TemporaryDirectory() as folder:
        again = reenact(run, start, step, Path(folder), args.processes, witness)
        apart: list[str] = []
        count = 0
        if step in run.checkpoints and not unsure:
            apart, count = tensors_apart(again.checkpoints[step], run.checkpoints[step])

    # A sum of two numbers does not depend on their order; one of more does.
    exact_loss = args.processes or ranks <= 2
    wrong = [d for d in differences(again, run, steps) if matters(d, bool(unsure), exact_loss)]
    _print_values(again, run, step)
    sizes = [compared(again, run, at) for at in steps]
    values = sum(n for n, _ in sizes)
    hashes = sum(n for _, n in sizes)
    tensors = f", {count} tensors with the checkpoint of step {step}" if count else ""
    print(f"compared {values} values and {hashes} hashes of {len(steps)} step(s){tensors}")
    if witness:
        print(
            f"rank {witness.rank}   losses of its micro batches "
            f"{', '.join(map(repr, witness.losses))}"
        )
    if args.dump and witness:
        _dump(args.dump, witness, again.values(step))
    if not sizes[-1][0]:
        print(
            f"note     step {step} has no record: only steps before it and its causes were "
            "compared (--log_every 1)"
        )
    return _verdict([f"step {d.step}, {format_difference(d)}" for d in wrong] + apart, unsure)


def _check(args: argparse.Namespace, ranks: int) -> None:
    if not 0 <= (args.rank or 0) < ranks:
        raise ConfigError(
            f"--rank {args.rank}: the run had ranks 0 to {ranks - 1} in that step; give one of them"
        )
    if args.processes and (args.pdb or args.dump or args.rank is not None):
        raise ConfigError(
            "--rank, --pdb and --dump look into one process that plays all ranks; drop --processes"
        )
    if args.keep and args.keep.exists() and any(args.keep.iterdir()):
        raise ConfigError(f"--keep {args.keep} is not empty; give another folder")


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


def _dump(path: Path, witness: Witness, values: dict[str, Any]) -> None:
    """Write the records of a witness.

    Token ids and gradients as safetensors; losses and the hashes of gradients as JSON.
    """
    tensors = {f"inputs.{i}": x for i, x in enumerate(witness.inputs)}
    tensors |= {f"targets.{i}": y for i, y in enumerate(witness.targets)}
    tensors |= {f"gradient.{name}": gradient for name, gradient in witness.gradients.items()}
    names, hashes = hash_tensors(witness.gradients)
    record = {
        "step": witness.step,
        "rank": witness.rank,
        "losses": witness.losses,
        "of_all_ranks": values,
        "gradient_hashes": dict(zip(names, map(format_hash, hashes), strict=True)),
        "divided_by": witness.divided_by,
    }
    data = save(
        {name: tensor.cpu().contiguous().clone() for name, tensor in tensors.items()},
        {"format": "pt"},
    )
    for suffix, content in (
        (".safetensors", data),
        (".json", (json.dumps(plain(record, "dump"), indent=1) + "\n").encode()),
    ):
        file = path.with_name(path.name + suffix)
        with writing(file, "give another --dump"):
            replace_bytes(file, content, sync=False)
        print(file)


def _verdict(wrong: list[str], unsure: list[str]) -> int:
    """Print the result and return the exit code."""
    for line in unsure:
        print(f"note     equal bits are not promised: {line}")
    if wrong:
        more = f", and in {len(wrong) - 1} more" if len(wrong) > 1 else ""
        print(f"differs  first in {wrong[0]}{more}")
        return 1
    if unsure:
        limits = ", ".join(f"{name} {limit:g}" for name, limit in LIMITS.items())
        print(f"within   the limits, relative: {limits}")
    else:
        print("equal    to the bit, as far as the run has recorded it")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

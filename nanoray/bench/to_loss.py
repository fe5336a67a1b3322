"""A command that trains until an evaluation shows a loss, and the seconds until then."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from nanoray.bench.harness.processes import Child, ChildFailed
from nanoray.bench.harness.trainings import words
from nanoray.machine.atomic import read_json_lines


class RunToLoss(NamedTuple):
    """What one run came to."""

    seconds: float  # from the start of the command to the end of its last evaluation
    cpu_s: float  # of the whole process
    steps: int
    loss: float  # of that evaluation


def run_to_loss(
    program: Sequence[str],
    flags: Mapping[str, object],
    env: Mapping[str, str],
    folder: Path,
    timeout_s: float,
) -> RunToLoss:
    """Run Python with `program` and the flags, and return what it came to.

    Raises ChildFailed, also when no evaluation was made.
    """
    folder.mkdir(parents=True)
    command = [sys.executable, *program, *words({**flags, "out_dir": folder})]

    # The kernel adds a child's CPU time only when it has been waited for: read it after the end.
    before = children_cpu_s()
    with Child(command, env, folder / "output.log") as child:
        child.wait(timeout_s)
        cpu_s = children_cpu_s() - before

        # A nanoray run has a folder of its own below --out_dir; a peer's loop may write directly
        # into it.
        paths = [*folder.glob("metrics.jsonl"), *folder.glob("*/metrics.jsonl")]
        evaluations = [r for path in paths for r in read_json_lines(path) if "val/loss" in r]
        if not evaluations:
            raise ChildFailed(f"it ended without an evaluation\n{child.tail()}")

    # The clock stops when the evaluation has ended, not when the process has: saving and exiting
    # are no part of the way to the loss.
    last = evaluations[-1]
    seconds = last["time"] + last["time/eval_s"] - child.started
    return RunToLoss(seconds, cpu_s, last["step"], last["val/loss"])


def children_cpu_s() -> float:
    """Return the CPU seconds of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime

"""Count what one plain optimizer step passes through: files, functions and calls of nanoray.

    python -m tests.harness.step_walk                       print the walk, in the order of entry
    python -m tests.harness.step_walk --json FILE           write its figures, too

A profile hook sees every Python call of the process. It records those of nanoray between two calls
of `set_lr`, which is one whole iteration of the loop, in the middle of a run of one CPU rank with
the preset shakespeare-cpu. No option is on, and the step is not logged. The figures depend on the
code alone and not on the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import sys
import tempfile
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import nanoray

PACKAGE = Path(nanoray.__file__).resolve().parent
STEP = 6  # the recorded one, counted from 1: warm, not logged, and not the last
FLAGS = (
    "--preset=shakespeare-cpu",
    "--device=cpu",
    "--precision=fp32",
    "--max_steps=10",
    "--log_every=100",
    "--eval_every=0",
    "--checkpoint_every=0",
    "--hash_every=0",
    "--tensorboard=false",
    "--sample_tokens=0",
)


@dataclass
class Walk:
    """The files and functions of one step.

    Comprehensions, generator expressions and lambdas count as calls, and not as functions: they are
    read with the function that they stand in.
    """

    files: list[str] = field(default_factory=list)  # in the order in which they were entered
    functions: list[str] = field(default_factory=list)  # file:name, in that order, too
    calls: int = 0


class Recorder:
    """A hook for sys.setprofile that records the calls of one iteration of the loop."""

    def __init__(self, step: int) -> None:
        self.walk = Walk()
        self._step = step
        self._steps_begun = 0
        self._codes: set[CodeType] = set()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        if not code.co_filename.startswith(str(PACKAGE)):
            return
        if code.co_name == "set_lr":
            self._steps_begun += 1
        if self._steps_begun == self._step:
            self._record(code)

    def _record(self, code: CodeType) -> None:
        self.walk.calls += 1
        if code in self._codes:
            return
        self._codes.add(code)
        file = Path(code.co_filename).relative_to(PACKAGE).as_posix()
        if file not in self.walk.files:
            self.walk.files.append(file)
        if not code.co_name.startswith("<"):
            self.walk.functions.append(f"{file}:{code.co_qualname}")


def walk_step(dataset: str, folder: Path, *flags: str) -> Walk:
    """Train for a few steps in this process, and return the walk of one of them."""
    from nanoray.train.__main__ import main

    recorder = Recorder(STEP)
    places = (f"--dataset={dataset}", f"--data_dir={folder}", f"--out_dir={folder / 'runs'}")
    sys.setprofile(recorder)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            code = main([*FLAGS, *places, *flags])
    finally:
        sys.setprofile(None)
    assert code == 0, f"the run ended with exit code {code}"
    return recorder.walk


def figures(walk: Walk) -> dict[str, Any]:
    """Return a walk as the values of the JSON file."""
    return {
        "files": len(walk.files),
        "functions": len(walk.functions),
        "calls": walk.calls,
        "order_of_files": walk.files,
        "order_of_functions": walk.functions,
    }


def main() -> None:
    """Print the walk of a plain step, and write its figures where --json says."""
    parser = argparse.ArgumentParser(description="Count what one plain step passes through.")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--dataset", default="stdlib")
    parser.add_argument("--before", type=Path, help="figures of an older commit, to stand beside")
    parser.add_argument("--commit", default="", help="the commit that was measured")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        walk = walk_step(arguments.dataset, Path(folder))
    print("\n".join(walk.functions))
    print(f"{len(walk.files)} files, {len(walk.functions)} functions, {walk.calls} calls")
    if arguments.json is None:
        return
    measured: dict[str, Any] = {
        "command": "python -m tests.harness.step_walk --json FILE",
        "flags": list(FLAGS),
        "step": STEP,
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": arguments.commit,
    }
    measured |= figures(walk)
    if arguments.before is not None:
        older = json.loads(arguments.before.read_text(encoding="utf-8"))
        measured = {"before": older, "after": measured}
    arguments.json.write_text(json.dumps(measured, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

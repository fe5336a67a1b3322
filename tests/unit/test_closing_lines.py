"""The commands at a run's end: what they suggest depends on how the run ended."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from nanoray.checkpoint.files import path_of
from nanoray.checkpoint.run_folder import RunSpec, write_summary
from nanoray.faults.cause import Failure, FaultReport
from nanoray.train.report import closing_lines
from tests.harness.ranks import TINY, make_spec


@pytest.fixture
def trained(text: Path, tmp_path: Path) -> RunSpec:
    """A run with a checkpoint after two of its steps."""
    spec = make_spec(text, tmp_path)
    path_of(spec.folder / "checkpoints", 2).mkdir(parents=True)
    return spec


def suggested(spec: RunSpec, reason: str, steps: int | None) -> list[list[str]]:
    """Return the words of each command that a run with this end prints."""
    summary = write_summary(spec, {"exit_reason": reason, "step": steps}, restarts=0)
    lines = closing_lines(spec, summary, "python -m nanoray.launch")
    labels = [line[:6].strip() for line in lines]
    if "next" not in labels:
        return []
    commands = lines[labels.index("next") :]
    return [shlex.split(line[6:]) for line in commands]


def test_a_result_says_what_was_replaced_and_what_began_again(trained: RunSpec) -> None:
    """By the faults of this command: one with three restarts has no reports under torchrun."""
    outcome = {"exit_reason": "finished", "step": 4, "train_s": 1.4}
    summary = write_summary(trained, outcome, restarts=3) | {"total_s": 26.0}
    start = "python -m nanoray.launch"
    (line, _) = closing_lines(trained, summary, start, quiet=True)
    assert line == "finished 4 steps in 0:01 (0:26 with start) · no loss · 3 restarts"
    for recovery, replaced in (("in_place", 2), ("restart", 0), ("shrink", 0)):
        failure = Failure(1, "killed", "rank 1 died")
        report = FaultReport(failure, [], attempt=0, world_size=2)
        replace(report, recovery=recovery, replaced=replaced).write(trained.folder)
    (line, _) = closing_lines(trained, summary, start, quiet=True)
    assert line.endswith("no loss · 2 ranks replaced · 1 restart")


def test_a_finished_run_is_made_longer(trained: RunSpec) -> None:
    longer = str(2 * int(TINY["max_steps"]))
    command = [
        "python",
        "-m",
        "nanoray.launch",
        "--resume",
        str(trained.folder),
        "--max_steps",
        longer,
    ]
    assert suggested(trained, "finished", int(TINY["max_steps"]))[-1] == command


@pytest.mark.parametrize("reason", ["stopped", "stopped_by_script", "stop_at", "target_loss"])
def test_a_run_that_ended_early_is_continued_as_it_is(trained: RunSpec, reason: str) -> None:
    command = ["python", "-m", "nanoray.launch", "--resume", str(trained.folder)]
    assert suggested(trained, reason, 2)[-1] == command

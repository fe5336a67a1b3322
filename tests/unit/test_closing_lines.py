"""The commands at a run's end: what they suggest depends on how the run ended."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from nanoray.checkpoint.files import path_of
from nanoray.checkpoint.run import RunSpec, write_summary
from nanoray.train.report import closing_lines
from tests.harness.ranks import TINY, make_spec


@pytest.fixture
def trained(text: Path, tmp_path: Path) -> RunSpec:
    """A run with a checkpoint after two of its steps."""
    spec = make_spec(text, tmp_path)
    path_of(spec.folder / "checkpoints", 2).mkdir(parents=True)
    return spec


def suggested(spec: RunSpec, reason: str, steps: int | None) -> list[list[str]]:
    """Return the words after python's `-m` of each command that a run with this end prints."""
    summary = write_summary(spec, {"exit_reason": reason, "step": steps}, restarts=0)
    lines = closing_lines(spec, summary)
    labels = [line[:6].strip() for line in lines]
    if "next" not in labels:
        return []
    commands = lines[labels.index("next") :]
    return [shlex.split(line[6:])[2:] for line in commands]


def test_a_finished_run_is_made_longer(trained: RunSpec) -> None:
    longer = str(2 * int(TINY["max_steps"]))
    command = ["nanoray.launch", "--resume", str(trained.folder), "--max_steps", longer]
    assert suggested(trained, "finished", int(TINY["max_steps"]))[-1] == command


@pytest.mark.parametrize("reason", ["stopped", "stopped_by_script", "stop_at", "target_loss"])
def test_a_run_that_ended_early_is_continued_as_it_is(trained: RunSpec, reason: str) -> None:
    command = ["nanoray.launch", "--resume", str(trained.folder)]
    assert suggested(trained, reason, 2)[-1] == command

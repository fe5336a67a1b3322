"""The lessons of docs/course: each command is run as it stands there, and prints what the lesson
shows.

Lessons 1, 5 and 8 by default; those that start several processes, or Ray, are marked `full`, and so
are the commands of the exercises.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.harness.commands import ROOT, run, torchrun

COURSE = ROOT / "docs" / "course"
LESSONS = sorted(COURSE.glob("[0-9]-*.md"))
CHEAP = (1, 5, 8)
# What a machine decides; only the words before the numbers are compared.
VARIES = ("comm ", "failure ", "replace ", "recover ", "finished ", "       stages idle ")


def block(text: str, heading: str) -> list[str]:
    """The lines of the code block under a heading."""
    return (
        text.partition(f"## {heading}\n")[2]
        .partition("```\n")[2]
        .partition("\n```")[0]
        .splitlines()
    )


def losses(line: str) -> list[float]:
    return [float(number) for number in re.findall(r"(?:loss|val) (\d+\.\d+)", line)]


@pytest.fixture
def cached(shakespeare: Path, tmp_path: Path) -> None:
    """The text of the lessons, as it is there after its download."""
    folder = tmp_path / "cache" / "nanoray"
    folder.mkdir(parents=True)
    shutil.copy(shakespeare, folder / "shakespeare.txt")


def command_of(
    text: str, folder: Path, flags: str = "", ranks: int = 0
) -> subprocess.CompletedProcess[str]:
    """Run a lesson's command: with these flags in place of its own ones of the same names, on so
    many ranks.
    """
    (command,) = block(text, "Run")
    return run_words([*shlex.split(command), *shlex.split(flags)], folder, ranks)


def run_words(words: list[str], folder: Path, ranks: int = 0) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    env |= {"XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    if words[0] == "torchrun":
        return torchrun(ranks or int(words[2]), *words[4:], env=env, cwd=folder)[0]
    program = words[2:] if words[1] == "-m" else words  # python -m MODULE, or nanoray COMMAND
    return run(*program, env=env, cwd=folder)


@pytest.mark.parametrize(
    "lesson",
    [
        pytest.param(
            p, marks=[] if int(p.name[0]) in CHEAP else [pytest.mark.full, pytest.mark.slow]
        )
        for p in LESSONS
    ],
    ids=lambda path: path.stem,
)
def test_a_lesson_prints_what_it_shows(lesson: Path, cached: None, tmp_path: Path) -> None:
    text = lesson.read_text(encoding="utf-8")
    done = command_of(text, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    printed = done.stdout.splitlines()
    for shown in block(text, "Output"):
        start = next(
            (word for word in VARIES if shown.startswith(word)), shown.partition("…")[0].rstrip()
        )
        if " | loss " in shown:
            start = shown.partition(" | ")[0]
        found = [line for line in printed if line.startswith(start)]
        assert found, f"{shown}\nis not in\n{done.stdout}"
        if " | loss " in shown:
            assert losses(found[0]) == pytest.approx(losses(shown), abs=2e-3)

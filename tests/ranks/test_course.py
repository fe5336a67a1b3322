"""The lessons of docs/course.md: each command runs as it stands there, and prints what the lesson
shows.

Lessons 1, 5 and 8 by default; those that start several processes, or Ray, are marked `full`.
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

# Each begins with its heading, such as "1. One process"
LESSONS = (ROOT / "docs" / "course.md").read_text(encoding="utf-8").split("\n## ")[1:]
CHEAP = (1, 5, 8)
# What a machine decides; only the words before the numbers are compared.
VARIES = ("comm ", "failure ", "replace ", "recover ", "finished ", "       stages idle ")


def blocks(text: str) -> list[list[str]]:
    """Return the lines of each block of code: a lesson's command, what it prints, drawings."""
    return [block.splitlines() for block in re.findall(r"^```\n(.*?)\n```$", text, re.M | re.S)]


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
    (command,) = blocks(text)[0]
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
            lesson, marks=[] if int(lesson[0]) in CHEAP else [pytest.mark.full, pytest.mark.slow]
        )
        for lesson in LESSONS
    ],
    ids=lambda lesson: lesson.splitlines()[0],
)
def test_a_lesson_prints_what_it_shows(lesson: str, cached: None, tmp_path: Path) -> None:
    done = command_of(lesson, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    printed = done.stdout.splitlines()
    for shown in blocks(lesson)[1]:
        start = next(
            (word for word in VARIES if shown.startswith(word)), shown.partition("…")[0].rstrip()
        )
        if " | loss " in shown:
            start = shown.partition(" | ")[0]
        found = [line for line in printed if line.startswith(start)]
        assert found, f"{shown}\nis not in\n{done.stdout}"
        if " | loss " in shown:
            assert losses(found[0]) == pytest.approx(losses(shown), abs=2e-3)

"""The lessons of docs/course: each command is run as it stands there, and prints what the lesson shows.

Lessons 1, 5 and 8 by default; those that start several processes, or Ray, are marked `full`.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
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
    return text.partition(f"## {heading}\n")[2].partition("```\n")[2].partition("\n```")[0].splitlines()


def losses(line: str) -> list[float]:
    return [float(number) for number in re.findall(r"(?:loss|val) (\d+\.\d+)", line)]


@pytest.mark.parametrize(
    "lesson",
    [pytest.param(p, marks=[] if int(p.name[0]) in CHEAP else [pytest.mark.full, pytest.mark.slow]) for p in LESSONS],
    ids=lambda path: path.stem,
)
def test_a_lesson_prints_what_it_shows(
    lesson: Path, shakespeare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = lesson.read_text(encoding="utf-8")
    (command,) = block(text, "Run")
    cache = tmp_path / "cache" / "nanoray"
    cache.mkdir(parents=True)
    shutil.copy(shakespeare, cache / "shakespeare.txt")
    env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    env |= {"XDG_CACHE_HOME": str(cache.parent), "OMP_NUM_THREADS": "1"}
    words = shlex.split(command)
    if words[0] == "torchrun":
        done = torchrun(int(words[2]), *words[4:], env=env, cwd=tmp_path)[0]
    else:
        done = run(*words[2:], env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    printed = done.stdout.splitlines()
    for shown in block(text, "Output"):
        start = next((word for word in VARIES if shown.startswith(word)), shown.partition("…")[0].rstrip())
        if " | loss " in shown:
            start = shown.partition(" | ")[0]
        found = [line for line in printed if line.startswith(start)]
        assert found, f"{shown}\nis not in\n{done.stdout}"
        if " | loss " in shown:
            assert losses(found[0]) == pytest.approx(losses(shown), abs=2e-3)


def test_each_lesson_is_short_and_has_an_exercise_with_a_solution() -> None:
    assert [int(lesson.name[0]) for lesson in LESSONS] == list(range(1, 9))
    contents = (COURSE / "README.md").read_text(encoding="utf-8")
    for lesson in LESSONS:
        text = lesson.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 60
        assert text.count("## Exercise\n") == text.count("<summary>Solution</summary>") == 1
        title = text.splitlines()[0].partition(". ")[2]
        assert f"[{title}]({lesson.name})" in contents

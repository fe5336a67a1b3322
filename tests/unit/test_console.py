"""What a command shows: a line for each logged step, little with --quiet."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from nanoray.observe.watch.console import QuietConsole, choose_console
from tests.harness.commands import run
from tests.harness.ranks import TINY
from tests.unit.terminal import Terminal

STEP = re.compile(r"^step +\d+/24 \| loss ", re.M)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    folder = tmp_path_factory.mktemp("console")
    values = TINY | {
        "dataset": str(text),
        "data_dir": str(folder / "cache"),
        "max_steps": 24,
        "eval_every": 12,
    }
    values |= {"sample_tokens": 20, "out_dir": str(folder / "runs")}
    path = folder / "words.yaml"
    path.write_text(
        "".join(f"{key}: {json.dumps(value)}\n" for key, value in values.items() if key != "name")
    )
    return path


def environment(**more: str) -> dict[str, str]:
    plain = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "LINES")}
    return plain | {"TERM": "xterm-256color"} | more


def test_a_terminal_that_goes_away_does_not_end_the_run(recipe: Path) -> None:
    """What can no longer be shown is dropped."""
    terminal, flags = Terminal(), ("--name", "gone", "--max_steps", "60", "--eval_every", "0")
    train = ("nanoray.train", "--config", str(recipe))
    assert terminal.run(*train, *flags, env=environment(), hang_up="| eta") == 0
    (summary,) = recipe.parent.glob("runs/*gone/summary.json")
    assert json.loads(summary.read_text())["exit_reason"] == "finished"
    assert "60/60" not in terminal.written


def test_elsewhere_the_lines_are_as_ever_and_quiet_leaves_them_out(recipe: Path) -> None:
    train = ("nanoray.train", "--config", str(recipe))
    lines = run(*train, "--name", "lines", env=environment(FORCE_COLOR="1"))
    assert "\x1b" not in lines.stdout
    assert len(STEP.findall(lines.stdout)) == 24
    quiet = run(*train, "--name", "quiet", "--quiet", env=environment())
    assert (quiet.returncode, quiet.stderr) == (0, "")
    assert re.fullmatch(
        r"finished 24 steps in 0:\d\d \(0:\d\d with start\) · val loss .*\nfiles  .*quiet\n",
        quiet.stdout,
    )


def test_quiet_prints_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    console = choose_console(10, quiet=True)
    assert isinstance(console, QuietConsole)
    for note in ("nanoray 0.1.0", "warning  rank 1 is slow", "sample"):
        console.on_note(note)
    assert capsys.readouterr().out == "warning  rank 1 is slow\n"

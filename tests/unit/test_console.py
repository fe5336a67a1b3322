"""What a command shows: a bar on a terminal, the same lines as ever elsewhere, little with --quiet."""

from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from nanoray.base.output import StatusLine
from nanoray.cli import parse_args
from nanoray.errors import ConfigError
from nanoray.kube import __main__ as kube
from nanoray.train.watch.console import QuietConsole, choose_console
from nanoray.train.watch.observers import Console
from tests.harness.commands import run
from tests.harness.ranks import TINY
from tests.harness.terminal import ERASE, Terminal

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


def test_a_terminal_shows_a_bar_and_keeps_the_evaluations(recipe: Path) -> None:
    terminal = Terminal()
    flags = ("--comm_trace", "off", "--name", "bar")
    assert terminal.run("nanoray.train", "--config", str(recipe), *flags, env=environment()) == 0, (
        terminal.written
    )
    screen = "\n".join(terminal.screen)
    assert screen.startswith("nanoray ")
    assert re.findall(r"^step +(\d+)/24 \| loss [\d.]+ \| val [\d.]+ ", screen, re.M) == [
        "12",
        "24",
    ]
    assert "finished 24 steps" in screen
    assert "sample\n" in screen
    assert "  loss" not in screen, "no bar is left"
    assert len(terminal.bars) >= 24
    assert re.fullmatch(
        r"step 24/24  ━+  loss \d\.\d{4} · [\d.]+k? tok/s · eta 0:00 *", terminal.bars[-1]
    )
    assert "\x1b[38;5;" in terminal.written, "colours"
    assert "\x1b[?25l" not in terminal.written, (
        "the cursor is never hidden, so a killed run leaves it as it was"
    )


def test_no_color_and_a_narrow_terminal(recipe: Path) -> None:
    terminal = Terminal(columns=34)
    assert (
        terminal.run(
            "nanoray.train",
            "--config",
            str(recipe),
            "--name",
            "narrow",
            env=environment(NO_COLOR="1"),
        )
        == 0
    )
    assert terminal.bars
    assert max(map(len, terminal.bars)) < 34
    assert "step 24/24  loss " in terminal.bars[-1], "no room for a bar"
    assert not re.search(r"\x1b\[[0-9;]*3\d", terminal.written), "no colour"
    assert "finished 24 steps" in "\n".join(terminal.screen)


def test_a_terminal_that_cannot_erase_gets_lines(recipe: Path) -> None:
    terminal = Terminal()
    assert (
        terminal.run(
            "nanoray.train", "--config", str(recipe), "--name", "dumb", env=environment(TERM="dumb")
        )
        == 0
    )
    assert "\x1b" not in terminal.written
    assert len(STEP.findall(terminal.written)) == 24


@pytest.mark.full
@pytest.mark.slow
def test_the_driver_draws_the_same_bar(recipe: Path) -> None:
    terminal = Terminal()
    flags = ("--workers", "2", "--cpus_per_worker", "0.5", "--spares", "0", "--name", "driver")
    env = {key: value for key, value in environment().items() if not key.startswith("RAY_")}
    assert terminal.run("nanoray.launch", "--config", str(recipe), *flags, env=env) == 0, (
        terminal.written
    )
    assert "step 24/24  ━" in terminal.bars[-1]
    screen = "\n".join(terminal.screen)
    assert screen.startswith("ray    local")
    assert re.findall(r"^step +(\d+)/24 \| loss [\d.]+ \| val [\d.]+ ", screen, re.M) == [
        "12",
        "24",
    ]
    assert "finished 24 steps" in screen


def test_a_terminal_that_goes_away_does_not_end_the_run(recipe: Path) -> None:
    """What the bar can no longer show is dropped."""
    terminal, flags = Terminal(), ("--name", "gone", "--max_steps", "60", "--eval_every", "0")
    train = ("nanoray.train", "--config", str(recipe))
    assert terminal.run(*train, *flags, env=environment(), hang_up="tok/s · eta") == 0
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
        r"finished 24 steps in 0:\d\d · val loss .*\nfiles  .*quiet\n", quiet.stdout
    )


def test_quiet_prints_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    console = choose_console(10, quiet=True)
    assert isinstance(console, QuietConsole)
    for note in ("nanoray 0.1.0", "warning  rank 1 is slow", "sample"):
        console.on_note(note)
    assert capsys.readouterr().out == "warning  rank 1 is slow\n"
    assert type(choose_console(10, quiet=False)) is Console, "pytest's stdout is no terminal"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--quiet", "--dry_run"],
            "quiet would be ignored: a dry run prints its plan and nothing else; drop --quiet",
        )
    ],
)
def test_quiet_that_cannot_take_effect_is_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}$"):
        parse_args(flags, "x", "y")
    assert parse_args(flags[:1], "x", "y").quiet


def test_kube_refuses_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    assert kube.main(["render", "--quiet"]) == 2
    refused = (
        "error: quiet would be ignored: `nanoray kube` shows a job's log as it is; drop --quiet\n"
    )
    assert capsys.readouterr().err == refused


def test_other_output_stands_above_the_status_line() -> None:
    """Whole lines, parts of a line that are flushed early, and a status that changes in the middle
    of one.
    """
    status, terminal = StatusLine(), io.StringIO()

    def write(output: str, text: str | None = None) -> None:
        status.text = status.text if text is None else text
        terminal.write(status.around(output))

    write("one\n")
    write("", "BAR 1")
    write("two\n")
    write("thr")
    write("", "BAR 2")
    write("ee\n")
    write("", "")
    written = terminal.getvalue()
    assert written == f"one\nBAR 1{ERASE}two\nBAR 1{ERASE}three\nBAR 2{ERASE}"


def test_the_bar_keeps_what_a_record_lacks() -> None:
    """Speed comes after the first step, and exposed communication from traced steps only."""
    from nanoray.train.watch.console import TerminalConsole

    class Shown(io.StringIO):
        def show(self, text: str) -> None:
            shown.append(re.sub(r"\x1b\[[0-9;]*m", "", text))

    shown: list[str] = []
    terminal: Any = Shown()
    console = TerminalConsole(100, terminal)
    console._screen.width = 120
    first = {"step": 1, "time": 0.0, "train/loss": 4.0, "train/lr": 1e-3}
    console.on_record(first)
    console.on_record(
        first | {"step": 10, "time": 9.0, "perf/tok_per_sec": 1e4, "comm/exposed_share": 12.4}
    )
    console.on_record(
        first | {"step": 20, "time": 19.0, "perf/tok_per_sec": 2e4, "train/loss": 3.0}
    )
    console.close()
    assert [re.sub("[━╺╸]+", "━", bar).strip() for bar in shown] == [
        "step   1/100  ━  loss 4.0000",
        "step  10/100  ━  loss 4.0000 · 10k tok/s · comm exposed 12 % · eta 1:30",
        "step  20/100  ━  loss 3.0000 · 20k tok/s · comm exposed 12 % · eta 1:20",
        "",
    ]

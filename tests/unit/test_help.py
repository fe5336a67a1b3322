"""What `--help` prints: a screen of what people use, and all of it for those who ask."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nanoray.cli import Page, parse_args
from nanoray.cli.help import LAUNCH, TRAIN


@pytest.mark.parametrize("page", [TRAIN, LAUNCH], ids=["train", "launch"])
def test_the_examples_of_the_help_parse(page: Page, tmp_path: Path) -> None:
    for command, _ in page.examples:
        words = command.replace("{prog}", "nanoray x").replace("FOLDER", str(tmp_path)).split()
        flags = words[words.index("nanoray.train") + 1 :] if "torchrun" in words else words[2:]
        assert parse_args(flags, "x", "y").config


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--help"], "recipe\n"),
        (["-h"], "recipe\n"),
        (["--lr", "1", "-h", "--dry_run"], "recipe\n"),
        (["--help=log"], "--eval_samples N"),
        (["--help", "lr"], "--lr X"),
        (["--bogus", "--help"], "recipe\n"),
    ],
)
def test_help_prints_and_exits_0(
    capsys: pytest.CaptureFixture[str], words: list[str], shown: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse_args(words, "nanoray train", TRAIN)
    assert stopped.value.code == 0
    assert shown in capsys.readouterr().out


def test_help_of_a_run_imports_no_torch() -> None:
    code = "import sys; from nanoray.__main__ import main; code = main(['train', '--help', 'lr'])"
    code += "; sys.exit(code or 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "--lr X" in done.stdout

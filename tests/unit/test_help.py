"""What `--help` prints: a screen of what people use, and all of it for those who ask."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from nanoray.cli import Page, parse_args
from nanoray.cli.help import HEIGHT, LAUNCH, TRAIN, WIDTH, format_help
from nanoray.cli.parsers import COMMAND_FLAGS, flag_names

FLAGS = {*flag_names(), *COMMAND_FLAGS}
LONGEST = "python -m nanoray.launch"  # the longest name of the program


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"--(\w+)", text)) - {"help"}


@pytest.mark.parametrize("page", [TRAIN, LAUNCH], ids=["train", "launch"])
def test_the_help_fits_a_screen(page: Page) -> None:
    lines = format_help("", LONGEST, page).splitlines()
    assert len(lines) <= HEIGHT == 60
    assert max(len(line) for line in lines) <= WIDTH == 80
    assert lines[0] == f"usage: {LONGEST} [flags]"
    assert len(page.examples) == 3
    shown = sum(len(flags) for _, flags in page.sections)
    assert 18 <= shown <= 26
    # Each flag of the page and of its examples exists. nproc-per-node is torchrun's
    assert flags_in("\n".join(lines)) - {"nproc"} <= FLAGS | {"all"}
    assert {"preset", "dataset", "lr", "workers", "out_dir", "resume"} <= flags_in("\n".join(lines))


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

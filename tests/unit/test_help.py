"""What `--help` prints: a screen of what people use, and all of it for those who ask."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from nanoray.cli import flag_names, parse_args
from nanoray.cli.help import LAUNCH, OF_A_RUN, TRAIN
from nanoray.cli.parsers import COMMAND_FLAGS


@pytest.mark.parametrize("page", [TRAIN, LAUNCH], ids=["train", "launch"])
def test_the_examples_of_the_help_parse(page: str) -> None:
    examples = re.findall(r"^  (?:\{prog\}|torchrun .* -m nanoray.train) (.*)", page, re.MULTILINE)
    assert len(examples) == 3
    for flags in examples:
        assert parse_args(flags.split(), "x", "y").config


def test_the_screen_has_flags_that_exist_and_fits_a_terminal() -> None:
    named = set(re.findall(r"--(\w+)", OF_A_RUN)) - {"help"}
    assert len(named) > 25
    assert named <= {*flag_names(), *COMMAND_FLAGS}
    for page in (TRAIN, LAUNCH, OF_A_RUN):
        assert max(map(len, page.splitlines())) <= 80


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

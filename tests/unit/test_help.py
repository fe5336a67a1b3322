"""What `--help` prints: a screen of what people use, and all of it for those who ask."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import nanoray
from nanoray.__main__ import main
from nanoray.cli import Page, name_program, parse_args
from nanoray.cli.help import HEIGHT, LAUNCH, OF_A_RUN, TRAIN, WIDTH, format_help
from nanoray.cli.parsers import COMMAND_FLAGS, GROUPS, PACKAGE, flag_names
from nanoray.errors import ConfigError
from nanoray.kube.__main__ import main as kube
from nanoray.tools import check

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


def test_all_a_group_or_a_flag() -> None:
    for topic, wanted in {
        "all": FLAGS,
        "batch": {"seq_warmup_steps", "micro_batch_size", "grad_accum_steps", "global_batch_size"},
        "--lr": {"lr"},
        "keep-checkpoints": {"keep_checkpoints"},
        "preset": {"preset"},
    }.items():
        text = format_help(topic, "nanoray train", TRAIN)
        rows = set(re.findall(r"^  (?:-o, |-o NAME, )?--(\w+)", text, re.M))
        assert rows == wanted, topic
        assert text.startswith("usage: nanoray train [flags]\n")
    for group in (*GROUPS, "command"):
        assert flags_in(format_help(group, "nanoray train", TRAIN))
    assert all(title for title, _ in OF_A_RUN)


@pytest.mark.parametrize(
    ("topic", "message"),
    [
        ("learning_rate", "unknown flag --learning_rate; did you mean --lr?"),
        ("dropuot", "unknown flag --dropuot; did you mean --dropout?"),
        ("everything", "unknown flag --everything; `python -m nanoray.train --help all`"),
    ],
)
def test_an_unknown_topic_is_refused(topic: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        format_help(topic, "nanoray train", TRAIN)
    assert str(error.value).startswith(message)


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


def test_other_commands_show_their_own_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        check.main(["--help"])
    shown = capsys.readouterr().out
    assert "  --workers N" in shown
    assert len(shown.splitlines()) <= 40
    assert "--n_layer" not in shown
    with pytest.raises(SystemExit):
        kube(["render", "--help"])
    shown = capsys.readouterr().out
    assert "  --ranks_per_pod X" in shown
    assert len(shown.splitlines()) <= HEIGHT
    assert "--n_layer" not in shown
    with pytest.raises(SystemExit):
        kube(["render", "--help", "model"])
    assert "--n_layer N" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("called", "command", "name"),
    [
        ("/usr/local/bin/nanoray", "train", "nanoray train"),
        ("/usr/local/bin/nanoray", "kube render", "nanoray kube render"),
        (f"{PACKAGE}/train/__main__.py", "train", "nanoray train"),
        (f"{PACKAGE}/kube/__main__.py", "kube render", "nanoray kube render"),
        (f"{PACKAGE}/tools/sample.py", "sample", "nanoray sample"),
        ("examples/train_shakespeare.py", "launch", "python examples/train_shakespeare.py"),
        ("-c", "train", "nanoray train"),
        ("", "train", "nanoray train"),
    ],
)
def test_the_program_has_the_name_that_it_was_called_by(
    monkeypatch: pytest.MonkeyPatch, called: str, command: str, name: str
) -> None:
    monkeypatch.setattr(sys, "argv", [called])
    assert name_program(command) == name


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--version", "-V"):
        assert main([flag]) == 0
        shown = capsys.readouterr().out
        assert shown.startswith(f"nanoray {nanoray.__version__} (torch ")
        assert "ray 2" in shown
    assert main(["--help"]) == 0
    assert "--version" in capsys.readouterr().out


def test_o_is_where_a_command_writes(tmp_path: Path) -> None:
    assert parse_args(["-o", str(tmp_path)], "x", "y").config.out_dir == str(tmp_path)

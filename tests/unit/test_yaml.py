"""A word means the same in a file and in a flag, and no key stands twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nanoray.cli import parse_args
from nanoray.config import Config, load_config
from nanoray.errors import ConfigError


def load(tmp_path: Path, text: str, name: str = "run.yaml") -> Config:
    file = tmp_path / name
    file.write_text(text)
    return load_config(str(file), "tiny")


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("comm_trace", "off", "off"),
        ("seed", "0123", 123),
        ("name", "2026", "2026"),
        ("warmup_steps", "1.5e1", 15),
        ("lr", "3e-4", 3e-4),
        ("tensorboard", "off", False),
        ("resume", "none", "none"),
    ],
)
def test_a_word_means_the_same_in_a_file_and_in_a_flag(
    tmp_path: Path, key: str, text: str, value: Any
) -> None:
    in_file = getattr(load(tmp_path, f"{key}: {text}\n"), key)
    word = text.split()[-1].strip('"')
    in_flag = getattr(parse_args(["--preset", "tiny", f"--{key}", word], "x", "y").config, key)
    assert in_file == in_flag == value
    assert type(in_file) is type(value)


def test_variables_keep_their_text(tmp_path: Path) -> None:
    """And one without a value has that of the shell."""
    config = load(tmp_path, "env: {A: on, B: 012, C: 1e3, D: ~, E: , F: 1:30}\n")
    assert config.env == {"A": "on", "B": "012", "C": "1e3", "D": None, "E": None, "F": "1:30"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr: 1e-3\nn_layer: 2\nlr: 5e-4\n", "the key lr is in line 1 and again in line 3"),
        ("env:\n  A: 1\n  A: 2\n", "the key A is in line 2 and again in line 3"),
        ("warmup_steps: 1.5\n", "warmup_steps = '1.5': Input should be a valid integer"),
        ("a: [\n", "while parsing a flow node"),
        ("- 1\n", "must contain `key: value` lines, not a list"),
    ],
)
def test_what_a_file_cannot_mean_is_refused_in_one_line(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, text)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_tag_makes_no_object(tmp_path: Path) -> None:
    """It is a text, as any other word: nothing of a file is executed."""
    assert load(tmp_path, "name: !!python/name:os.system x\n").name == "x"

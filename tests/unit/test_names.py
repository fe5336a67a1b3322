"""The name of a run, and every limit that it meets: before a device is taken, and named."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanoray.checkpoint.run_folder import new_folder
from nanoray.config import load_config, make_config
from nanoray.config.run import LONGEST_NAME, name_of_file
from nanoray.errors import ConfigError
from nanoray.script.settings import DEFAULTS


def test_the_longest_name_makes_a_folder_also_in_a_busy_second(tmp_path: Path) -> None:
    config = make_config({**DEFAULTS, "name": "n" * LONGEST_NAME, "out_dir": str(tmp_path)})
    names = [new_folder(tmp_path, config.name).name for _ in range(3)]
    assert len(set(names)) == 3
    assert max(len(name) for name in names) <= LONGEST_NAME + len("2026-11-21_101500__999")
    with pytest.raises(ConfigError, match=f"should have at most {LONGEST_NAME} characters"):
        make_config({**DEFAULTS, "name": "n" * (LONGEST_NAME + 1)})


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("mine.yaml", "mine"),
        ("my first run.yaml", "my-first-run"),
        ("my fig (2).yaml", "my-fig-2"),
        ("設定.yaml", "run"),
        ("a.b.yaml", "a.b"),
        (f"{'n' * 240}.yaml", "n" * LONGEST_NAME),
    ],
)
def test_a_run_gets_a_name_from_any_name_of_a_file(tmp_path: Path, file: str, name: str) -> None:
    """The file's name was refused, in words about a --name that nobody had given."""
    assert name_of_file(file) == name
    (tmp_path / file).write_text("max_steps: 7\n")
    config = load_config(str(tmp_path / file), "tiny")
    assert (config.name, config.max_steps) == (name, 7)

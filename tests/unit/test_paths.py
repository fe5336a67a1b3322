"""Paths of a configuration: `~` and variables mean the same in a file, in a dict and in a flag."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nanoray.cli import parse_args
from nanoray.config import Config, load_config
from nanoray.config.paths import PATH_KEYS
from nanoray.errors import ConfigError
from nanoray.script.settings import loaded_of


@pytest.fixture(autouse=True)
def _variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SCRATCH", str(tmp_path / "scratch"))
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.delenv("ABSENT", raising=False)


def wanted(key: str, tmp_path: Path) -> tuple[str, str]:
    """Return a value with a variable, and what it becomes."""
    if key == "upload":
        return "file://${SCRATCH}/x", f"file://{tmp_path}/scratch/x"
    return "$SCRATCH/x", f"{tmp_path}/scratch/x"


@pytest.mark.parametrize("key", [key for key in PATH_KEYS if key != "init_from"])
def test_a_variable_is_expanded_wherever_the_path_stands(key: str, tmp_path: Path) -> None:
    given, path = wanted(key, tmp_path)
    file = tmp_path / "mine.yaml"
    file.write_text(f"{key}: {given}\n")
    said = [
        load_config(str(file), "tiny"),
        parse_args([f"--{key}={given}"], "x", "y").config,
        loaded_of({key: given}).config,
    ]
    # A Config is checked when it is made, and a URL must be one then
    if key != "upload":
        made: dict[str, Any] = {"micro_batch_size": 1, key: given}
        said.append(loaded_of(Config(**made)).config)
    assert {getattr(config, key) for config in said} == {path}
    file.with_suffix(".json").write_text(json.dumps({key: given}))
    assert getattr(load_config(str(file.with_suffix(".json")), "tiny"), key) == path


def test_no_secret_of_a_url_is_repeated() -> None:
    with pytest.raises(ConfigError) as error:
        parse_args(["--upload=s3://KEY:SECRET@b/$ABSENT"], "x", "y")
    assert "SECRET" not in str(error.value)
    assert "ABSENT" in str(error.value)

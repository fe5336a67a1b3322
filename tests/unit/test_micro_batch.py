"""`micro_batch_size auto`: what it goes with, and how the launcher finds the number."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from nanoray.cli import Loaded, parse_args
from nanoray.config import Batch, batch_for, make_config, micro_batches, resolve_batch
from nanoray.config.layers import load_config
from nanoray.errors import ConfigError, WorkerFailed
from nanoray.launch import auto
from nanoray.own.settings import loaded_of

AUTO = {"micro_batch_size": "auto", "global_batch_size": 24}


# What is asked.


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"global_batch_size": 0}, "auto divides a global batch, and there is none; give global"),
        ({"grad_accum_steps": 2}, "auto with grad_accum_steps = 2: accumulation follows from the"),
        ({"model": "resnet"}, "auto with model = resnet: its batch norms take mean and variance"),
    ],
)
def test_what_it_does_not_go_with(values: dict[str, Any], message: str) -> None:
    make_config(AUTO)
    with pytest.raises(ConfigError, match=message) as error:
        make_config(AUTO | values)
    assert "\n" not in str(error.value)


def test_a_script_is_told_to_ask_for_the_number_itself() -> None:
    with pytest.raises(ConfigError, match=r"the number that nanoray.tune\(main, config\) finds"):
        loaded_of(AUTO)


def test_a_recipe_without_a_global_batch_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("micro_batch_size: 4\ngrad_accum_steps: 2\n")
    flags = ["--config", str(file), "--micro_batch_size", "auto"]
    with pytest.raises(ConfigError, match="and there is none; give global_batch_size"):
        parse_args(flags, "prog", "what")
    found = parse_args([*flags, "--global_batch_size", "8"], "prog", "what")
    assert found.config.micro_batch_search
    assert ("micro_batch_search", True, "flag") in found.chosen()


def test_a_number_replaces_auto_and_auto_a_number(tmp_path: Path) -> None:
    run = tmp_path / "config.json"
    run.write_text(make_config(AUTO).to_json())
    assert load_config(str(run)) == make_config(AUTO)
    number = parse_args(["--resume", str(tmp_path), "--micro_batch_size", "4"], "prog", "what")
    assert (number.config.micro_batch_size, number.config.micro_batch_search) == (4, False)
    run.write_text(make_config(AUTO | {"micro_batch_size": 4}).to_json())
    again = parse_args(["--resume", str(tmp_path), "--micro_batch_size", "auto"], "prog", "what")
    assert (again.config.micro_batch_size, again.config.micro_batch_search) == (0, True)


def test_the_sizes_are_those_into_which_a_share_divides() -> None:
    config = make_config(AUTO)
    assert resolve_batch(config, 2) == Batch(12, 1, 2)
    assert micro_batches(config, 12) == [1, 2, 3, 4, 6, 12]
    # An interleaved pipeline takes its micro batches in groups of pp
    config = make_config(AUTO | {"pp": 2, "pp_schedule": "interleaved", "n_layer": 4})
    assert resolve_batch(config, 1) == Batch(12, 2, 1)
    assert micro_batches(config, 24) == [1, 2, 3, 4, 6, 12]
    for micro in micro_batches(config, 24):
        assert batch_for(config, 1, 1, micro) == Batch(micro, 24 // micro, 1)


# What the launcher does.


def asked(folder: Path, *flags: str) -> Loaded:
    words = ["--preset", "tiny", "--micro_batch_size", "auto", "--out_dir", str(folder), *flags]
    return parse_args(words, "prog", "what")


def test_the_run_has_the_number_that_the_search_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def search(command: list[str]) -> int:
        commands.append(command)
        recipe = load_config(command[3])
        assert recipe.micro_batch_search
        Path(command[command.index("--write") + 1]).write_text("micro_batch_size: 3\n")
        return 0

    monkeypatch.setattr(auto, "_run", search)
    found = auto.with_micro_batch(asked(tmp_path, "--ray_address", "local", "--quiet"))
    assert (found.config.micro_batch_size, found.config.micro_batch_search) == (3, False)
    assert ("micro_batch_size", 3, "auto: tune chose 3") in found.chosen()
    assert commands[0][-3:] == ["--ray_address", "local", "--quiet"]

    # A run that goes on keeps its number: another one would give other bits.
    folder = tmp_path / "2026-11-29_120000_tiny"
    folder.mkdir()
    record = {"config": found.config.model_dump(), "origins": dict(found.origins)}
    (folder / "run.json").write_text(json.dumps(record))
    again = auto.with_micro_batch(asked(tmp_path, "--resume", "auto"))
    assert again.config.micro_batch_size == 3
    assert len(commands) == 1
    auto.with_micro_batch(asked(tmp_path))
    auto.with_micro_batch(asked(tmp_path, "--resume", "auto", "--global_batch_size", "24"))
    assert len(commands) == 3, "a new run, and one with another batch"


def test_a_search_that_fails_or_is_stopped_ends_the_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = iter([2, 130])
    monkeypatch.setattr(auto, "_run", lambda command: next(codes))
    with pytest.raises(WorkerFailed, match="`nanoray tune` has failed") as failed:
        auto.with_micro_batch(asked(tmp_path))
    assert failed.value.exit_code == 2
    with pytest.raises(SystemExit) as stopped:
        auto.with_micro_batch(asked(tmp_path))
    assert stopped.value.code == 130


# Sends the signal to this process, and then waits as a search does
SEARCH = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
os.kill(os.getppid(), signal.SIGTERM)
time.sleep(30)
"""


def test_a_signal_for_the_launcher_stops_the_search() -> None:
    assert auto._run([sys.executable, "-c", SEARCH]) == 143
    assert auto._run([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]) == 137

"""`micro_batch_size auto`: what it goes with, and how the launcher finds the number."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nanoray.cli import Loaded, parse_args
from nanoray.config import Batch, batch_for, make_config, micro_batches, resolve_batch
from nanoray.config.merge import load_config
from nanoray.errors import WorkerFailed
from nanoray.launch import auto

AUTO = {"micro_batch_size": "auto", "global_batch_size": 24}


# What is asked.


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

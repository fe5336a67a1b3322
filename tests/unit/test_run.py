"""A run's folder: one command at a time uses it, and one attempt at a time writes to it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nanoray.checkpoint.run_folder import (
    RunSpec,
    lock_run,
    read_attempt,
    write_attempt,
)
from nanoray.cli import parse_args
from nanoray.cli.open_folder import open_run
from nanoray.config import make_config
from nanoray.data.prepare import prepare
from nanoray.errors import CheckpointError, ConfigError
from tests.harness.messages import find_line
from tests.harness.ranks import make_spec, run_ranks

HOLD = "import sys, time; from pathlib import Path; from nanoray.checkpoint.run_folder import lock_run\n"
HOLD += "lock = lock_run(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"


@contextmanager
def held(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock of a folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_run_in_use_is_refused_and_left_alone(text: Path, tmp_path: Path) -> None:
    """Until the process that uses it dies, by whatever cause."""
    spec = make_spec(text, tmp_path, stop_at=2)
    run_ranks(spec, 1)
    (spec.folder / "summary.json").write_text("as it was")
    folder = spec.folder
    del spec
    with held(folder) as process:
        with pytest.raises(ConfigError) as error:
            make_spec(text, tmp_path, resume="auto")
        owner = f"in use by pid {process.pid} on {platform.node()}"
        resume = f"--resume {folder}/checkpoints/step_"
        find_line(str(error.value), str(folder), owner, resume, f"remove {folder}/lock")
        assert (folder / "summary.json").read_text() == "as it was"
        other = make_spec(text, tmp_path, resume=str(folder / "checkpoints" / "step_00000002"))
        assert other.folder != folder, "a new run from its checkpoint disturbs nobody"
        process.kill()
        again = make_spec(text, tmp_path, resume=str(folder))  # it may still be dying
    assert again.folder == folder
    assert again.lock
    assert (folder / "lock").read_text() == f"pid {os.getpid()} on {platform.node()}\n"


def test_a_resume_compares_with_what_the_run_was_trained_with(text: Path, tmp_path: Path) -> None:
    """The checkpoint says that, whatever a user has made of config.json."""
    spec = make_spec(text, tmp_path, lr=1e-3, stop_at=2)
    run_ranks(spec, 1)
    folder, trained = spec.folder, spec.config
    del spec
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"lr": 0.5, "max_steps": 9}))

    # Alone it takes what the file says, and says so. With the run's own values nothing has changed
    edited = parse_args(["--resume", str(folder)], "x", "y").config
    spec = open_run(edited, prepare(edited), time.time())
    assert (spec.config.lr, spec.config.max_steps, spec.folder) == (0.5, 9, folder)
    notes = "\n".join(spec.notes)
    assert f"not the recipe of {folder.name}: lr is 0.001 there and 0.5 here" in notes
    del spec

    # The command above ended before a checkpoint: the run is still what its checkpoint says
    for resume in ("auto", str(folder)):
        same = trained.model_copy(update={"resume": resume})
        spec = open_run(same, prepare(same), time.time())
        assert (spec.folder, spec.resume) == (folder, str(folder))
        assert spec.notes == ()
        del spec
    changed = trained.model_copy(update={"resume": "auto", "lr": 0.5})
    spec = open_run(changed, prepare(changed), time.time())
    assert spec.folder != folder
    assert "lr is 0.001 there and 0.5 here" in spec.notes[0]


def test_resume_never_writes_into_a_folder_of_another_name(text: Path, tmp_path: Path) -> None:
    """Neither by auto, which looks for this name and recipe, nor by path."""
    first = make_spec(text, tmp_path, name="lr1", lr=1e-3, stop_at=2)
    run_ranks(first, 1)
    auto = make_spec(text, tmp_path, name="lr2", lr=2e-3, resume="auto")
    assert (auto.folder != first.folder, auto.resume) == (True, "")
    assert any(
        "another experiment (name is lr1 there and lr2 here, lr is 0.001" in note
        for note in auto.notes
    )
    by_path = make_spec(text, tmp_path, name="lr2", lr=2e-3, resume=str(first.folder))
    assert "_lr2" in by_path.folder.name
    assert by_path.resume.startswith(str(first.folder))
    assert any("not the recipe of" in note for note in by_path.notes)
    del first
    longer = make_spec(
        text, tmp_path, name="lr1", lr=1e-3, max_steps=99, log_every=3, resume="auto"
    )
    assert longer.folder.name.endswith("_lr1")
    assert longer.resume == str(longer.folder)


def test_the_lock_lives_as_long_as_the_spec(text: Path, tmp_path: Path) -> None:
    spec = make_spec(text, tmp_path)
    folder = spec.folder
    spec = spec.next_attempt()  # the same lock
    assert spec.lock
    again, warning = lock_run(folder)
    assert (again, warning) == (None, ""), "this process has it"
    assert RunSpec.from_dict(spec.to_dict()).lock is None, "it does not travel"
    del spec
    with held(folder):
        pass


def test_which_attempt_may_write(text: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        read_attempt(tmp_path)
    spec = make_spec(text, tmp_path / "runs", stop_at=2)
    assert read_attempt(spec.folder) == (0, spec.started)
    write_attempt(replace(spec, attempt=12))
    assert read_attempt(spec.folder) == (12, spec.started)
    assert not list(spec.folder.glob(".attempt*"))
    (spec.folder / "attempt").write_text("twelve")
    with pytest.raises(
        CheckpointError,
        match=rf"^cannot tell from {spec.folder}/attempt which attempt may write .*; s",
    ):
        read_attempt(spec.folder)
    write_attempt(spec)
    run_ranks(spec, 1)
    write_attempt(replace(spec, attempt=3))
    again = make_spec(text, tmp_path / "runs", resume="auto")
    assert read_attempt(again.folder) == (0, again.started), "a new command counts anew"


def test_a_resumed_run_stays_where_it_is_unless_an_out_dir_is_given(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By path, relative or not, from flags or from a script's configuration."""
    first = make_spec(text, tmp_path / "shared", stop_at=2)
    run_ranks(first, 1)
    run, name = first.folder, first.config.name
    (checkpoint,) = first.checkpoints.iterdir()
    monkeypatch.chdir(tmp_path)
    elsewhere = str(tmp_path / "elsewhere")

    def opened(*flags: str, base: dict[str, Any] | None = None) -> RunSpec:
        config = make_config(base) if base else parse_args(list(flags), "test", "").config
        return open_run(config, first.dataset, 0.0)

    in_place = [
        ["--resume", str(run)],
        ["--resume", f"shared/{run.name}/"],
        ["--resume", f"shared/{run.name}/checkpoints"],
        ["--resume", str(run), "--max_steps", "9"],
    ]
    for flags in in_place:
        spec = opened(*flags)
        assert spec.folder == run, flags
        assert spec.resume == str(run)
    values = {key: value for key, value in first.config.model_dump().items() if key != "out_dir"}
    assert opened(base=values | {"resume": f"shared/{run.name}"}).folder == run

    # A single checkpoint begins a new folder, beside the run.
    spec = opened("--resume", str(checkpoint))
    assert spec.folder != run
    assert (spec.folder.parent, spec.config.name) == (run.parent, name)
    # An out_dir that was given counts.
    spec = opened("--resume", str(run), "--out_dir", elsewhere)
    assert spec.folder.parent == Path(elsewhere)
    spec = opened(base=values | {"resume": str(run), "out_dir": elsewhere})
    assert spec.folder.parent == Path(elsewhere)

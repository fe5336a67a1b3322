"""One pipeline of steps makes the configuration of a run, and remembers who has set each key."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoray.cli import parse_args
from nanoray.cli.open_folder import open_run
from nanoray.cli.opening import Opening, with_precision
from nanoray.config import Settings, load_settings, make_config
from nanoray.config.layout import Layout
from nanoray.config.settings import FLAG, lines_of
from nanoray.data.prepare import prepare
from nanoray.errors import ConfigError
from nanoray.launch.__main__ import launch
from nanoray.machine.device import Device
from nanoray.train.__main__ import main as train
from tests.harness.ranks import TINY, run_ranks

STEPS = st.lists(
    st.tuples(
        st.dictionaries(st.sampled_from(["lr", "max_steps", "seed"]), st.integers(200, 203)),
        st.sampled_from(["a", "b", "c"]),
    ),
    max_size=6,
)


def written(settings: Settings) -> list[str]:
    return lines_of(settings.chosen())


# ---- the steps -------------------------------------------------------------------------------------


@given(STEPS)
def test_a_key_is_of_the_last_step_that_changed_it(steps: list[tuple[dict[str, int], str]]) -> None:
    settings = Settings(make_config(TINY))
    last: dict[str, str] = {}
    for values, by in steps:
        before = settings.config
        settings = settings.set(values, by)
        for key, value in values.items():
            assert getattr(settings.config, key) == value
            if getattr(before, key) != value:
                last[key] = by
    assert settings.origins == last
    untouched = settings.config.model_dump(exclude=set(last))
    assert untouched == make_config(TINY).model_dump(exclude=set(last))


@pytest.mark.parametrize(("axis", "preset"), [("pp", "gpt2-124m"), ("ep", "moe-tiny")])
def test_without_a_dp_mode_an_axis_gets_one_that_goes_with_it(
    axis: str, preset: str, tmp_path: Path
) -> None:
    """As the pages write it: the flag alone. Asked for by name, ddp stays an error."""
    settings = load_settings(preset=preset, overrides={axis: "2"})
    assert Layout.of(settings.config, 8)
    assert f"dp_mode ddp_by_hand (torch's DDP does not go with {axis})" in written(settings)
    assert settings.notes == (f"mode   dp_mode ddp_by_hand: torch's DDP does not go with {axis}",)

    # As of a run whose record does not say who has set a key
    values = settings.config.model_dump() | {"dp_mode": "zero2"}
    assert Settings.of(values, [({}, values)]).config.dp_mode == "zero2"

    file = tmp_path / "mine.yaml"
    file.write_text(f"preset: {preset}\n{axis}: 2\ndp_mode: ddp\n")
    for asked in (
        {"file": str(file)},
        {"preset": preset, "overrides": {axis: "2", "dp_mode": "ddp"}},
    ):
        with pytest.raises(ConfigError, match="dp_mode = ddp"):
            Layout.of(load_settings(**asked).config, 8)


def test_the_weakest_gpu_decides_the_precision() -> None:
    old, new = (
        Device("cuda", 0, "a", "GPU", 1 << 34, "a", bf16=False),
        Device("cuda", 1, "b", "GPU", 1 << 34, "b", bf16=True),
    )
    settings = load_settings(preset="tiny")
    assert with_precision(settings, "cuda", [new]).config.precision == "bf16"
    decided = with_precision(settings, "cuda", [new, old])
    assert decided.config.precision == "fp16"
    assert "older than compute capability 8" in decided.origins["precision"]
    asked = load_settings(preset="tiny", overrides={"precision": "fp32"})
    assert with_precision(asked, "cuda", [new]) is asked


# ---- dry runs --------------------------------------------------------------------------------------


def flags_of(text: Path, tmp_path: Path, *more: str) -> list[str]:
    where = ("--dataset", str(text), "--data_dir", str(tmp_path), "--out_dir", str(tmp_path / "o"))
    return ["--preset", "tiny", "--device", "cpu", *where, *more]


def dry_launch(argv: list[str]) -> int:
    return launch(parse_args(argv, "launch", "x"), time.time())


# ---- resumes ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of one rank with a checkpoint, as a command on Ray has opened it."""
    out = tmp_path_factory.mktemp("trained")
    keys = TINY | {"dataset": str(text), "data_dir": str(out), "out_dir": str(out), "workers": 1}
    settings = Settings.of(keys, [("preset x", TINY), (FLAG, {"workers": 1})])
    spec = open_run(settings.config, prepare(settings.config), time.time(), settings.origins)
    run_ranks(replace(spec), 1)
    return spec.folder


def notes_of(argv: list[str], **machine: Any) -> str:
    """Open a run as a command does, and return the lines of its plan."""
    opening = Opening(parse_args(argv, "x", "y"), time.time())
    opening.set(machine, "2 CPUs")
    opening.read()
    return "\n".join(opening.open(2).notes)


def test_a_resume_inherits_who_has_set_a_key(trained: Path) -> None:
    origins = parse_args(["--resume", str(trained), "--lr", "0.1"], "x", "y").origins
    assert origins["n_layer"] == f"run {trained.name}: preset x"
    assert origins["lr"] == FLAG
    assert origins["out_dir"] == f"run {trained.name}"
    assert "workers" not in origins, "how many ranks is a matter of each command"
    # Once more: the name of the run is there once
    record = json.loads((trained / "run.json").read_text())
    record["origins"] = dict(origins)
    copy = trained.with_name(f"{trained.name}-again")
    copy.mkdir()
    (copy / "config.json").write_text((trained / "config.json").read_text())
    (copy / "run.json").write_text(json.dumps(record))
    again = parse_args(["--resume", str(copy)], "x", "y").origins
    assert again["lr"] == f"run {copy.name}: flag"


def test_a_resume_says_what_differs_and_who_set_it(trained: Path, tmp_path: Path) -> None:
    """By a flag, by a file and by this machine; nothing where nothing differs."""
    assert notes_of(["--resume", str(trained), "--workers", "1"]) == ""
    by_flag = notes_of(["--resume", str(trained), "--workers", "1", "--max_steps", "9"])
    assert by_flag == (
        f"resume  other settings than {trained.name}: max_steps is 8 there and 9 here (flag)"
    )
    by_machine = notes_of(["--resume", str(trained)], workers=2)
    assert by_machine.endswith("workers is 1 there and 2 here (2 CPUs)")

    config = json.loads((trained / "config.json").read_text())
    file = tmp_path / "test.yaml"
    for key in ("resume", "workers", "env", "kube", "expected_val_loss"):
        config.pop(key)
    config |= {"lr": 0.5, "log_every": 4, "max_steps": 8}
    file.with_suffix(".json").write_text(json.dumps(config))
    by_file = notes_of(
        ["--config", str(file.with_suffix(".json")), "--resume", str(trained), "--workers", "1"]
    )
    here = f"(file {file.with_suffix('.json')})"
    assert f"not the recipe of {trained.name}: lr is 0.001 there and 0.5 here {here}" in by_file
    assert f"than {trained.name}: log_every is 1 there and 4 here {here}" in by_file


SECRET = "hunter2-do-not-print"


@pytest.mark.parametrize("command", [train, dry_launch])
def test_no_value_of_a_variable_is_printed(
    command: Callable[[list[str]], int],
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """They may be keys and passwords: their names are enough."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    argv = flags_of(text, tmp_path, "--workers", "1", "--env", f"TOKEN={SECRET}", "--verbose")
    argv.append("--dry_run")
    assert command(argv) == 0
    output = capsys.readouterr()
    assert '{"TOKEN": "..."} (flag)' in output.out
    assert SECRET not in output.out + output.err


def test_a_resume_names_variables_alone(trained: Path, tmp_path: Path) -> None:
    copy = tmp_path / trained.name
    shutil.copytree(trained, copy)
    argv = ["--resume", str(copy), "--workers", "1", "--env", f"TOKEN={SECRET}"]
    notes = notes_of(argv)
    assert "env in TOKEN (flag)" in notes
    assert SECRET not in notes

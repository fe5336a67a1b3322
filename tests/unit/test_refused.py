"""A run that is refused before its first step leaves no folder; one with anything of value stays."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nanoray
from nanoray.checkpoint.refused_run import discard_refused
from nanoray.checkpoint.run_folder import RunSpec
from nanoray.cli.open_folder import open_run
from nanoray.config import make_config
from nanoray.data.dataset import script_data
from nanoray.launch.from_script import launch_from_script
from nanoray.script.settings import DEFAULTS

SETTINGS: dict[str, Any] = {"workers": 1, "micro_batch_size": 4, "log_every": 1, "max_steps": 2}


def opened(tmp_path: Path) -> RunSpec:
    config = make_config({**DEFAULTS, "out_dir": str(tmp_path / "runs")})
    return open_run(config, script_data(), time.time())


def wrote(name: str) -> Callable[[RunSpec], None]:
    def write(spec: RunSpec) -> None:
        path = spec.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}\n")

    return write


@pytest.mark.parametrize(
    "write",
    [
        wrote("logs/rank0.log"),
        wrote("logs/rank12.1764200000.000-0-17.ledger"),
        wrote("faults.jsonl"),
        wrote("tb/events.out.tfevents.1"),
        lambda spec: (spec.folder / "metrics.jsonl").touch(),
    ],
)
def test_what_a_start_writes_goes(tmp_path: Path, write: Callable[[RunSpec], None]) -> None:
    spec = opened(tmp_path)
    write(spec)
    assert discard_refused(spec)
    assert not list((tmp_path / "runs").iterdir())


@pytest.mark.parametrize(
    "write",
    [
        wrote("metrics.jsonl"),
        wrote("checkpoints/step_00000001/state.json"),
        wrote("notes.txt"),
        wrote("logs/my.log"),
        wrote("wandb/run.wandb"),
    ],
)
def test_what_may_be_of_value_stays(tmp_path: Path, write: Callable[[RunSpec], None]) -> None:
    spec = opened(tmp_path)
    write(spec)
    assert not discard_refused(spec)
    assert (spec.folder / "config.json").is_file()


def test_a_folder_of_an_earlier_command_stays(tmp_path: Path) -> None:
    spec = opened(tmp_path)
    again = RunSpec.from_dict(json.loads((spec.folder / "run.json").read_text()))
    assert not discard_refused(again)
    assert spec.folder.is_dir()


# ---- scripts -------------------------------------------------------------------------------------


def engine(run: nanoray.Run, model: nn.Module, **more: Any) -> nanoray.RuntimeEngine:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return nanoray.RuntimeEngine(model, optimizer, run, nn.functional.mse_loss, **more)


def samples(count: int = 16) -> Any:
    return torch.utils.data.TensorDataset(torch.ones(count, 3), torch.ones(count, 1))


def few_samples(run: nanoray.Run) -> None:
    engine(run, nn.Linear(3, 1)).fit(samples(0))


def refused_in_the_warm_up(run: nanoray.Run) -> None:
    """Its model takes other samples; what watches the run has opened its files by then."""
    engine(run, nn.Linear(5, 1)).fit(samples())


def refused_with_a_file(run: nanoray.Run) -> None:
    (run.folder / "mine.json").write_text("{}")
    few_samples(run)


def broken(run: nanoray.Run) -> None:
    raise RuntimeError("a defect of the script")


def runs_after(tmp_path: Path, main: Callable[[Any], None], **settings: Any) -> list[Path]:
    config = SETTINGS | {"out_dir": str(tmp_path / "runs")} | settings
    assert launch_from_script(main, config, ray=False) != 0
    return list((tmp_path / "runs").iterdir())


@pytest.mark.parametrize("main", [few_samples, refused_in_the_warm_up])
def test_a_script_that_is_refused_leaves_no_folder(
    tmp_path: Path, main: Callable[[Any], None], capsys: pytest.CaptureFixture[str]
) -> None:
    assert runs_after(tmp_path, main) == []
    assert capsys.readouterr().err.startswith("error: ")


def test_a_file_of_the_script_and_a_defect_of_it_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (kept,) = runs_after(tmp_path, refused_with_a_file)
    assert (kept / "mine.json").is_file()
    with pytest.raises(RuntimeError, match="a defect"):
        runs_after(tmp_path / "b", broken)
    assert len(list((tmp_path / "b" / "runs").iterdir())) == 1

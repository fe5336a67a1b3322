"""Other programs remove or move files of a run while it trains: it goes on, says so, and resumes."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import TensorDataset

import nanoray
from nanoray.base.atomic import read_json_lines
from nanoray.checkpoint.files import find_all
from nanoray.checkpoint.run import read_attempt

REMOVED_AFTER = 5
STEPS = 8


def remove(name: str, folder: Path) -> None:
    path = folder / name
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def move(folder: Path) -> None:
    folder.rename(folder.parent / "moved")


NAMES = ("tb", "logs", "checkpoints", "attempt", "lock", "config.json", "run.json", "metrics.jsonl")
PROGRESS = ("logs/rank0.progress", "logs/rank0.log")
CASES: dict[str, Callable[[Path], None]] = {
    **{name: partial(remove, name) for name in NAMES + PROGRESS},
    "the run's folder": move,
}
EVERYDAY = ("checkpoints", "lock", "metrics.jsonl", "the run's folder")


class Remover(nanoray.Callback):
    """Removes something after a step, and notes after a later one whether the run is locked."""

    def __init__(self, take_away: Callable[[Path], None]) -> None:
        self.take_away = take_away
        self.locked = False

    def on_run_start(self, run: Any) -> None:
        self.folder = run.spec.folder

    def on_step_end(self, step: int, record: Any) -> None:
        if step == REMOVED_AFTER:
            self.take_away(self.folder)
        elif step == STEPS:
            self.locked = is_locked(self.folder / "lock")


def is_locked(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def steps_of_events(folder: Path) -> list[int]:
    """Return the steps that TensorBoard shows of a run."""
    events = EventAccumulator(str(folder / "tb"))
    events.Reload()
    return [event.step for event in events.Scalars("train/loss")]


def trained(out: Path, callback: nanoray.Callback | None, **config: Any) -> None:
    """Train a small model in this process."""

    def main(run: Any) -> None:
        x = torch.randn(48, 3, generator=torch.Generator().manual_seed(1))
        data = TensorDataset(x, x.sum(1, keepdim=True).sin())
        model = nn.Linear(3, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        callbacks = [callback] if callback else []
        engine = nanoray.RuntimeEngine(
            model, optimizer, run, nn.functional.mse_loss, callbacks=callbacks
        )
        engine.fit(data)

    settings = {"out_dir": str(out), "log_every": 1, "micro_batch_size": 4}
    settings |= {"max_steps": 12, "stop_at": STEPS, "checkpoint_every": 4, "device": "cpu"}
    settings |= {"checkpoint_mode": "sync"}  # a write in progress would make its folder itself
    assert nanoray.launch(main, settings | config, ray=False) == 0


@pytest.mark.parametrize(
    "name",
    [name if name in EVERYDAY else pytest.param(name, marks=pytest.mark.full) for name in CASES],
)
def test_what_is_removed_from_a_run_is_made_anew_and_it_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    remover = Remover(CASES[name])
    trained(tmp_path, remover)
    folder = remover.folder
    assert remover.locked, "a second command could write into the run"
    assert [name for name in (*NAMES, *PROGRESS) if not (folder / name).exists()] == []
    printed, errors = capsys.readouterr()
    assert errors == "", "no traceback of a writer's thread"
    assert steps_of_events(folder) == [*range(1, STEPS + 1)]
    expected = f"another program has removed {name} from {folder}"
    if name == "the run's folder":
        expected = f"another program has moved or removed the run's folder {folder}"
    if name not in ("tb", "metrics.jsonl", *PROGRESS):
        assert printed.count("made anew, and training goes on") == 1, printed
        assert expected in printed

    # Nothing is missing: the records from the first step on, and the last checkpoint.
    assert [record["step"] for record in read_json_lines(folder / "metrics.jsonl")] == list(
        range(1, STEPS + 1)
    )
    assert find_all(folder)[0].name == f"step_{STEPS:08d}"
    assert read_attempt(folder) is not None
    trained(tmp_path, None, resume=str(folder), stop_at=0)
    assert [record["step"] for record in read_json_lines(folder / "metrics.jsonl")] == list(
        range(1, 13)
    )
    assert steps_of_events(folder) == [*range(1, 13)]
    assert json.loads((folder / "summary.json").read_text())["resumed_from"]

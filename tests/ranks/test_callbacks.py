"""Whatever a script's callbacks do, the run goes on with its own values, or stops with a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import nanoray
from nanoray.checkpoint.files import find_all
from nanoray.machine.atomic import read_json_lines

STEPS = 4
HOOKS = ("on_run_start", "on_step_end", "on_eval_end", "on_checkpoint", "on_run_end")


class Acts(nanoray.Callback):
    """Calls a function from one of its hooks, or from all; the function receives the hook's values."""

    def __init__(self, act: Callable[..., Any], hook: str = "on_step_end") -> None:
        self.act = act
        self.hook = hook

    def call(self, hook: str, *args: Any) -> None:
        if self.hook in (hook, "all"):
            self.act(self, *args)

    def on_run_start(self, run: nanoray.Run) -> None:
        self.run = run
        self.call("on_run_start")

    def on_step_end(self, step: int, record: Mapping[str, Any]) -> None:
        self.call("on_step_end", step, record)

    def on_eval_end(self, step: int, record: Mapping[str, Any]) -> None:
        self.call("on_eval_end", step, record)

    def on_checkpoint(self, step: int) -> None:
        self.call("on_checkpoint", step)

    def on_run_end(self, outcome: Mapping[str, Any]) -> None:
        self.call("on_run_end", outcome)


class Fitted:
    """A small run in this process, and what it has left."""

    def __init__(self, out: Path, *given: nanoray.Callback, **config: Any) -> None:
        torch.manual_seed(0)
        x = torch.randn(48, 3)
        data = TensorDataset(x, x.sum(1, keepdim=True).sin())
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        settings = {"out_dir": str(out), "log_every": 1, "eval_every": 2, "checkpoint_every": 0}
        settings |= {"tensorboard": False, "device": "cpu", "micro_batch_size": 4} | config
        # An iterator, which yields them once: each of these tests fails if it is read twice.
        callbacks: Any = iter(given)
        engine = nanoray.RuntimeEngine(
            self.model, self.optimizer, settings, nn.functional.mse_loss, callbacks
        )
        for each in given:
            each.engine = engine  # type: ignore[attr-defined]
        self.outcome = engine.fit(data, data, steps=STEPS)
        self.folder = engine.run.folder
        self.records = read_json_lines(self.folder / "metrics.jsonl")

    @property
    def losses(self) -> list[float]:
        return [record["train/loss"] for record in self.records]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of the run without a callback."""
    return Fitted(tmp_path_factory.mktemp("plain")).losses


def spoil(self: Acts, *args: Any) -> None:
    """Write into what the hook has received."""
    for value in args:
        if isinstance(value, dict):
            value.pop("train/loss", None)
            value.pop("exit_reason", None)
            value["val/loss"] = -1.0
            value["mine/too"] = torch.zeros(3)
            value["step"] = "none"


def fail(self: Acts, *args: Any) -> None:
    raise RuntimeError("first line\nsecond line")


def draw(self: Acts, *args: Any) -> None:
    """Use the generators that the run's dropout draws from."""
    torch.rand(5)
    np.random.rand(5)


def evaluate(self: Acts, *args: Any) -> None:
    """Set the model's mode, as every evaluation does, and forget to set it back."""
    self.engine.model.eval()  # type: ignore[attr-defined]
    with torch.no_grad():
        self.engine.model(torch.zeros(2, 3))  # type: ignore[attr-defined]


def save(self: Acts, *args: Any) -> None:
    self.run.save()


WITHOUT_EFFECT = [spoil, fail, draw, evaluate, save]


@pytest.mark.parametrize("act", WITHOUT_EFFECT, ids=lambda act: act.__name__)
def test_a_callback_cannot_change_a_run(
    tmp_path: Path, plain: list[float], act: Callable[..., Any], capfd: pytest.CaptureFixture[str]
) -> None:
    callback = Acts(act, "all")
    run = Fitted(tmp_path, callback)
    assert run.outcome["exit_reason"] == "finished"
    assert run.losses == plain
    assert [record["step"] for record in run.records] == [1, 2, 3, 4]
    assert all(record.get("val/loss", 1.0) > 0 for record in run.records)
    assert find_all(run.folder)[0].name == f"step_{STEPS:08d}"

    printed = capfd.readouterr().out
    warned = [line for line in printed.splitlines() if line.startswith("warning")]
    lines = []
    if act is fail:
        lines = [
            f"warning  Acts.{hook} raised RuntimeError: first line; the run goes on"
            for hook in HOOKS
        ]
    assert sorted(warned) == sorted(lines), "once for each hook"


@pytest.mark.parametrize("error", [SystemExit(3), SystemExit("enough")])
def test_sys_exit_in_a_callback_stops_the_run_with_a_checkpoint(
    tmp_path: Path, error: BaseException, capsys: pytest.CaptureFixture[str]
) -> None:
    def leave(self: Acts, step: int, record: Any) -> None:
        if step == 2:
            raise error

    run = Fitted(tmp_path, Acts(leave))
    assert run.outcome["exit_reason"] == "stopped_by_script"
    assert find_all(run.folder)[0].name == "step_00000003"
    assert f"raised {type(error).__name__}" in capsys.readouterr().out

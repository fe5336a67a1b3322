"""A host's clock is set while a run lasts: no duration that is shown or recorded follows it."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import nanoray
from nanoray.base.clock import seconds_since, unix_time
from nanoray.trace.accounts import accounts_of, format_ledger

HOUR_S = 3600.0


class SetClock:
    """The host's clock, which somebody sets to another time."""

    def __init__(self) -> None:
        self._true = time.time
        self.ahead_s = 0.0

    def time(self) -> float:
        return self._true() + self.ahead_s


@pytest.fixture
def host_clock(monkeypatch: pytest.MonkeyPatch) -> SetClock:
    clock = SetClock()
    monkeypatch.setattr(time, "time", clock.time)
    return clock


def test_time_in_a_process_goes_on_whatever_the_clock_says(host_clock: SetClock) -> None:
    began = unix_time()
    for ahead_s in (-HOUR_S, HOUR_S, -1e8):
        host_clock.ahead_s = ahead_s
        assert 0 <= unix_time() - began < 60
        assert 0 <= seconds_since(began) < 60
    assert seconds_since(unix_time() + HOUR_S) == 0, "a moment of a process whose clock is ahead"


class SetsClock(nanoray.Callback):
    def __init__(self, clock: SetClock, ahead_s: float, at_step: int) -> None:
        self._clock = clock
        self._ahead_s = ahead_s
        self._at_step = at_step

    def on_run_start(self, run: nanoray.Run) -> None:
        if self._at_step == 0:
            self._clock.ahead_s = self._ahead_s

    def on_step_end(self, step: int, record: Any) -> None:
        if step == self._at_step:
            self._clock.ahead_s = self._ahead_s


@pytest.mark.parametrize("ahead_s", [-HOUR_S, HOUR_S])
@pytest.mark.parametrize("at_step", [0, 3])
def test_a_run_whose_clock_is_set(
    tmp_path: Path,
    host_clock: SetClock,
    capsys: pytest.CaptureFixture[str],
    ahead_s: float,
    at_step: int,
) -> None:
    """In the middle of its steps, or before the first one."""

    def main(run: nanoray.Run) -> None:
        model = nn.Linear(4, 1)
        x = torch.ones(64, 4)
        sets = SetsClock(host_clock, ahead_s, at_step)
        engine = nanoray.RuntimeEngine(
            model,
            torch.optim.SGD(model.parameters(), lr=0.01),
            run,
            nn.functional.mse_loss,
            callbacks=[sets],
        )
        engine.fit(TensorDataset(x, x.sum(1, keepdim=True)), steps=8)

    config = {
        "micro_batch_size": 4,
        "out_dir": str(tmp_path),
        "log_every": 1,
        "device": "cpu",
        "tensorboard": False,
    }
    assert nanoray.launch(main, config, ray=False) == 0
    output = capsys.readouterr().out
    assert re.search(r"^finished 8 steps in 0:\d\d ", output, re.M), output
    assert not re.search(r"eta -", output), output

    (folder,) = tmp_path.iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    for key in ("total_s", "first_step_s", "train_s", "step_ms"):
        assert 0 < summary[key] < 60_000, key
    assert summary["total_s"] < 60
    assert summary["first_step_s"] <= summary["total_s"]

    accounts = accounts_of(folder)
    assert 0 < accounts.wall_s < 60
    assert min(accounts.seconds.values()) >= 0
    assert "-" not in "".join(re.findall(r"\S+ s ", "\n".join(format_ledger(folder))))

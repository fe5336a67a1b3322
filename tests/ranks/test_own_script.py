"""A plain script: RuntimeEngine with a configuration, and `fit` in the middle of the script."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import nanoray
from nanoray.errors import ConfigError
from nanoray.script.engine import RuntimeEngine
from tests.harness.commands import run, torchrun

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}
SETTINGS: dict[str, Any] = {
    "global_batch_size": 12,
    "log_every": 1,
    "checkpoint_every": 0,
    "eval_every": 0,
    "tensorboard": False,
    "device": "cpu",
}

SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
import nanoray

x = torch.randn(200, 3, generator=torch.Generator().manual_seed(1))
data = TensorDataset(x, x.sum(1, keepdim=True))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
config = {"global_batch_size": 12, "log_every": 1, "eval_every": 0, "tensorboard": False}
config |= {"device": "cpu"} | dict(word.split("=") for word in sys.argv[1:])
"""
TWO_FITS = """
class Acts(nanoray.Callback):
    def on_run_start(self, run):
        self.run = run
        if run.rank != 0:
            raise SystemExit("callbacks are called on rank 0")

    def on_step_end(self, step, record):
        if step == 2:
            self.run.save()
        if step == 5:
            self.run.stop()

engine = nanoray.RuntimeEngine(model, optimizer, config, nn.functional.mse_loss, [Acts()])
first = engine.fit(data, steps=3)
again = nanoray.RuntimeEngine(model, optimizer, nanoray.Config(**config), nn.functional.mse_loss)
second = again.fit(data, steps=2)
if engine.run.rank == 1:
    engine.run.save()
third = engine.fit(data, steps=20)
print(f"rank {engine.run.rank}:", [(o["exit_reason"], o["step"]) for o in (first, second, third)])
"""


def written(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(SCRIPT + text, encoding="utf-8")
    return str(path)


def checkpoints(folder: Path) -> list[list[str]]:
    """The checkpoints of each run, in their order."""
    runs = sorted((folder / "runs").iterdir(), key=lambda path: path.stat().st_ctime)
    return [sorted(path.name for path in (one / "checkpoints").iterdir()) for one in runs]


def test_the_example_of_a_plain_script_runs(tmp_path: Path) -> None:
    script = shutil.copytree(EXAMPLES, tmp_path / "examples") / "own_script.py"
    done = run(str(script), env=ONE_THREAD, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "step 200/200 | " in done.stdout
    assert "lr 4.0e-08" in done.stdout, "OneCycleLR ends near zero"
    assert done.stdout.splitlines()[-1].endswith("quadrants [3, 0]")


ENDS = "[('finished', 3), ('finished', 2), ('stopped_by_script', 6)]"


def test_a_script_fits_several_times_and_its_callback_saves_and_stops(tmp_path: Path) -> None:
    done = run(written(tmp_path, TWO_FITS), env=ONE_THREAD, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"rank 0: {ENDS}" in done.stdout
    assert "step 3/3 | " in done.stdout, "the steps of fit, and not max_steps of the configuration"
    assert sorted(checkpoints(tmp_path)) == [
        ["step_00000002"],
        ["step_00000003"],
        ["step_00000003", "step_00000006"],
    ]


def test_it_is_a_rank_under_torchrun_and_all_ranks_save_and_stop_together(tmp_path: Path) -> None:
    outputs = torchrun(2, written(tmp_path, TWO_FITS), env=ONE_THREAD, cwd=tmp_path)
    assert [done.returncode for done in outputs] == [0, 0], outputs[0].stderr + outputs[1].stderr
    for rank, done in enumerate(outputs):
        assert f"rank {rank}: {ENDS}" in done.stdout
    assert sorted(checkpoints(tmp_path)) == [
        ["step_00000002"],
        ["step_00000003"],
        ["step_00000003", "step_00000006"],
    ]


CUT = """
engine = nanoray.RuntimeEngine(model, optimizer, config, nn.functional.mse_loss)
engine.fit(data, steps=3)
try:
    engine.fit(data, steps=3)
except nanoray.errors.ConfigError as error:
    print("refused:", error)
outcome = nanoray.RuntimeEngine(
    model, optimizer, config | {"resume": "auto"}, nn.functional.mse_loss
).fit(data, steps=6)
print(outcome["resumed_from"] is not None, outcome["step"])
"""


def test_with_shards_a_second_fit_is_refused_and_a_resume_goes_on(tmp_path: Path) -> None:
    outputs = torchrun(2, written(tmp_path, CUT), "dp_mode=zero1", env=ONE_THREAD, cwd=tmp_path)
    assert [done.returncode for done in outputs] == [0, 0], outputs[0].stderr + outputs[1].stderr
    assert "refused: dp_mode = zero1 has cut the state of the optimizer" in outputs[0].stdout
    assert "True 6" in outputs[0].stdout


EDITED = """
loss_fn = getattr(nn.functional, config.pop("loss", "mse_loss"))
optimizer.param_groups[0]["lr"] = float(config.pop("rate", 0.01))
steps = int(config.pop("steps"))
nanoray.RuntimeEngine(model, optimizer, config, loss_fn).fit(data, steps=steps)
"""


def test_auto_goes_on_with_the_same_script_and_says_what_was_edited(tmp_path: Path) -> None:
    script = written(tmp_path, EDITED)
    other = str(shutil.copy(script, tmp_path / "other.py"))

    def again(path: str, *words: str) -> subprocess.CompletedProcess[str]:
        return run(path, *words, "resume=auto", env=ONE_THREAD, cwd=tmp_path)

    first = again(script, "steps=3")
    assert "finished 3 steps" in first.stdout, first.stderr
    done = again(script, "steps=3")
    assert "nothing to do: step 3 of 3 · train loss " in done.stdout
    assert "finished" not in done.stdout

    # Another script of the folder has a run of its own.
    done = again(other, "steps=2")
    assert "name is script there and other here" in done.stdout
    assert "finished 2 steps" in done.stdout

    # A rate may be changed. With another loss it is another experiment, unless the run is named.
    done = again(script, "steps=4", "rate=0.02")
    assert "resume  lr is 0.01 there and 0.02 here" in done.stdout
    assert "step 4/4 | loss " in done.stdout
    done = again(script, "steps=6", "loss=l1_loss")
    assert "resume = auto found the run " in done.stderr
    assert "but loss is mse_loss there and l1_loss here" in done.stderr
    (folder,) = (tmp_path / "runs").glob("*_script")
    named = f"resume={folder}"
    done = run(script, "steps=6", "loss=l1_loss", named, env=ONE_THREAD, cwd=tmp_path)
    assert "resume  loss is mse_loss there and l1_loss here" in done.stdout
    assert "finished 6 steps" in done.stdout


# In this process, as in a cell of a notebook.


def an_engine(folder: Path, **settings: Any) -> tuple[RuntimeEngine, TensorDataset]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    x = torch.randn(200, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = SETTINGS | {"out_dir": str(folder)} | settings
    callbacks = settings.pop("callbacks", ())
    config.pop("callbacks", None)
    engine = RuntimeEngine(model, optimizer, config, nn.functional.mse_loss, callbacks)
    return engine, TensorDataset(x, x.sum(1, keepdim=True))


class Interrupts(nanoray.Callback):
    """It sends this process a signal, as Ctrl-C does."""

    def __init__(self, signum: int) -> None:
        self.signum = signum

    def on_step_end(self, step: int, record: Mapping[str, Any]) -> None:
        if step == 3:
            os.kill(os.getpid(), self.signum)


@pytest.mark.parametrize(
    ("signum", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_a_signal_ends_it_as_python_would_with_a_checkpoint(
    tmp_path: Path, signum: int, error: type[BaseException]
) -> None:
    engine, data = an_engine(tmp_path, callbacks=[Interrupts(signum)])
    with pytest.raises(error):
        engine.fit(data, steps=50)
    (folder,) = tmp_path.iterdir()
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert summary["exit_reason"] == "stopped"
    assert len(list((folder / "checkpoints").iterdir())) == 1


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"model": "gpt"}, "model = gpt, but the script brings its own; drop the key"),
        (
            {"lr": 0.1, "warmup_steps": 9},
            "lr, warmup_steps would have no effect: the rates are those",
        ),
        (3, "the configuration is a int; give a dict or a nanoray.Config"),
    ],
)
def test_a_wrong_configuration_is_refused(config: Any, text: str) -> None:
    model = nn.Linear(3, 1)
    with pytest.raises(ConfigError, match=text):
        RuntimeEngine(model, torch.optim.SGD(model.parameters()), config)
    engine = RuntimeEngine(model, torch.optim.SGD(model.parameters()), {})
    with pytest.raises(ConfigError, match="there is no run before fit; read it there, or in a"):
        _ = engine.run

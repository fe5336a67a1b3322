"""A loop of its own in nanoray.launch(main), without Ray: as a launcher's rank, and alone."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest

from nanoray.machine.interfaces import free_port
from tests.harness.commands import Command, run, torchrun
from tests.harness.ranks import only_run

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "own_loop.py"
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}


def losses(folder: Path) -> list[tuple[int, float]]:
    lines = (only_run(folder / "runs") / "metrics.jsonl").read_text().splitlines()
    return [(record["step"], record["train/loss"]) for record in map(json.loads, lines)]


def bare_ranks(folder: Path) -> list[tuple[int, str]]:
    """Run the example as ranks to which RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are given, as
    on Kubernetes: there no agent serves the store.
    """
    shared = ONE_THREAD | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with contextlib.ExitStack() as stack:
        commands = []
        for rank in ("0", "1"):
            env = shared | {"RANK": rank, "LOCAL_RANK": rank}
            command = Command(str(EXAMPLE), env=env, cwd=folder)
            commands.append(stack.enter_context(command))
        return [(command.wait(200), command.output) for command in commands]


@pytest.mark.parametrize("by", ["torchrun", "variables"])
def test_the_example_is_a_rank_of_a_launcher(tmp_path: Path, by: str) -> None:
    if by == "torchrun":
        done = torchrun(2, str(EXAMPLE), env=ONE_THREAD, cwd=tmp_path)
        ends = [(each.returncode, each.stdout + each.stderr) for each in done]
    else:
        ends = bare_ranks(tmp_path)
    assert [code for code, _ in ends] == [0, 0], ends
    assert "step 100: loss 0." in ends[0][1]
    assert "finished main(run) has returned, on all ranks\n" in ends[0][1]
    steps, values = zip(*losses(tmp_path), strict=True)
    assert steps == (20, 40, 60, 80, 100)
    assert values[-1] < 0.75 * values[0], "it has learned"
    assert (only_run(tmp_path / "runs") / "state.pt").exists()


ALONE = """
import os
import torch
import torch.distributed as dist
import nanoray
from nanoray.errors import ConfigError

def main(run):
    dist.init_process_group()
    assert dist.get_world_size() == 1
    assert (run.restarts, run.should_stop) == (0, False)
    weight = torch.ones((), requires_grad=True)
    run.log({"a": 1, "train/loss": 2 * weight}, step=3)
    run.log({"a": 2, "b": "text", "c": float("nan")}, step=3)
    for values, step in (({"a": 1}, 2), ({"time": 1}, 4)):
        try:
            run.log(values, step)
        except ConfigError as error:
            print(error)
    run.log({"d": 4})
    run.stop()
    assert run.should_stop

code = nanoray.launch(main, {"tensorboard": False, "device": "cpu"}, ray=False)
print("code", code, dist.is_initialized(), "RANK" in os.environ)
nothing = nanoray.launch(lambda run: None, {"device": "cpu", "name": "nothing"}, ray=False)
print("nothing", nothing)
"""


def test_alone_it_needs_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    """Values that come later, also after the last step, are added to the record of their step."""
    (tmp_path / "script.py").write_text(ALONE)
    done = run(str(tmp_path / "script.py"), env=ONE_THREAD, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "run.log: step = 2 comes after step = 3; log steps in their order\n" in done.stdout
    assert "run.log: time is a name of nanoray's own; choose another one\n" in done.stdout
    assert "code 0 False False\n" in done.stdout
    assert "nothing 0\n" in done.stdout
    assert "Warning" not in done.stderr

    (folder,) = [each for each in (tmp_path / "runs").iterdir() if "nothing" not in each.name]
    (line,) = (folder / "metrics.jsonl").read_text().splitlines()
    record = json.loads(line)
    logged = {"train/loss": 2.0, "a": 2, "b": "text", "c": "nan", "d": 4}
    assert record == {"step": 3, "attempt": 0, "time": record["time"]} | logged


WITH_ENGINE = """
import nanoray, torch
from torch import nn

class Logs(nanoray.Callback):
    def on_run_start(self, run):
        self.run = run

    def on_step_end(self, step, record):
        self.run.log({"own": 1}, step=step)

def main(run):
    assert not torch.distributed.is_initialized()
    model = nn.Linear(3, 1)
    data = torch.utils.data.TensorDataset(torch.ones(24, 3), torch.ones(24, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    engine = nanoray.RuntimeEngine(model, optimizer, run, nn.functional.mse_loss, [Logs()])
    print(engine.fit(data, steps=2)["step"])

raise SystemExit(nanoray.launch(main, {"device": "cpu"}, ray=False))
"""


def test_an_engine_counts_its_steps_itself(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(WITH_ENGINE)
    done = run(str(tmp_path / "script.py"), env=ONE_THREAD, cwd=tmp_path)
    assert "run.log: step = 1 is for a loop of its own" in done.stdout + done.stderr
    assert done.returncode == 0, done.stdout + done.stderr

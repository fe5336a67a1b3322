"""A script's own model on Ray: a killed rank is replaced, and the script's function runs again in
the new process. The program that launches it goes on as it was.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.harness.cluster import (
    Cluster,
    assert_same_run,
    fired,
    losses,
    no_actors_left,
    reports,
)
from tests.harness.commands import run
from tests.harness.packages import needs
from tests.harness.ranks import only_run

pytestmark = [pytest.mark.slow]
SCRIPT = """
import json, logging, os, sys, warnings
import torch
from torch import nn
import nanoray

def main(run):
    print("printed by rank", run.rank)
    logging.warning("logged by rank %d", run.rank)
    secret = os.environ.get("A_SECRET") == "of the shell 471"
    print("variables", os.environ.get("GIVEN"), secret, flush=True)
    os.write(1, f"written by rank {run.rank} as C does\\n".encode())
    x = torch.randn(200, 3, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin())
    model = nn.Sequential(nn.Linear(3, 16), nn.Dropout(0.1), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    nanoray.RuntimeEngine(model, optimizer, run, nn.functional.mse_loss).fit(data, data)

if __name__ == "__main__":
    raise SystemExit(nanoray.launch(main, json.loads(sys.argv[1])))
"""

SETTINGS: dict[str, object] = {
    "global_batch_size": 12,
    "workers": 2,
    "cpus_per_worker": 0.5,
    "log_every": 1,
    "checkpoint_every": 10,
    "max_steps": 30,
    "spares": 0,
    "tensorboard": False,
    "placement_timeout_s": 60,
    "env": ["GIVEN=1", "A_SECRET"],
}
SECRET = "of the shell 471"


def launched(
    cluster: Cluster, folder: Path, out: Path, text: str = SCRIPT, **settings: object
) -> str:
    script = folder / "script.py"
    script.write_text(text)
    config = SETTINGS | {"out_dir": str(out)} | settings
    done = run(
        str(script),
        json.dumps(config),
        env=os.environ | cluster.env | {"RAY_ADDRESS": cluster.address, "A_SECRET": SECRET},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.full
@pytest.mark.parametrize("mode", ["ddp", "zero1"])
def test_a_killed_rank_of_a_script_is_replaced(cluster: Cluster, tmp_path: Path, mode: str) -> None:
    """The losses and the weights are those of a run without the kill, to the bit."""
    launched(cluster, tmp_path, tmp_path / "clean", dp_mode=mode)
    faults = "kill@rank=1,step=14,phase=backward"
    output = launched(cluster, tmp_path, tmp_path / "out", dp_mode=mode, faults=faults)

    # Rank 0's output is on the console, every rank's in its log, also that of the new process.
    assert output.count("printed by rank 0\n") == 1
    assert "by rank 1" not in output
    for rank, times in ((0, 1), (1, 2)):
        log = (only_run(tmp_path / "out") / "logs" / f"rank{rank}.log").read_text()
        for line in (
            f"printed by rank {rank}\n",
            f"logged by rank {rank}\n",
            "as C does\n",
            "variables 1 True\n",
        ):
            assert log.count(line) == times, log

    # A variable that takes its value from the shell is in no file, neither ours nor Ray's.
    searched = [*only_run(tmp_path / "out").rglob("*"), *cluster.folder.rglob("logs/*")]
    assert len(searched) > 20
    for path in searched:
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path
    assert fired(tmp_path / "out") == ["kill"], output
    found = [(report["recovery"], report["steps_repeated"]) for report in reports(tmp_path / "out")]
    assert found == [("in_place", 0)], output
    assert_same_run(tmp_path / "out", tmp_path / "clean")
    assert no_actors_left(cluster)


OF_TRANSFORMERS = """
import json, sys
import torch
from transformers import GPT2Config, GPT2LMHeadModel
import nanoray

def main(run):
    torch.manual_seed(0)
    sizes = dict(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=32)
    rest = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2)
    model = GPT2LMHeadModel(GPT2Config(**sizes, **rest))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(97, (24, 16))
    data = [{"input_ids": line, "labels": line} for line in tokens]
    nanoray.RuntimeEngine(model, optimizer, run).fit(data)

if __name__ == "__main__":
    config = json.loads(sys.argv[1])
    raise SystemExit(nanoray.launch(main, config, ray=config["workers"] > 1))
"""


@pytest.mark.full
@needs("transformers")
def test_a_model_of_transformers_trains_on_ray(cluster: Cluster, tmp_path: Path) -> None:
    """Two ranks have the losses of one without Ray, which has those of plain torch
    (ranks/test_packages.py).
    """
    of_ranks = []
    for workers in (1, 2):
        out = tmp_path / str(workers)
        launched(cluster, tmp_path, out, OF_TRANSFORMERS, workers=workers, max_steps=4)
        of_ranks.append(losses(out))
    assert of_ranks[1] == pytest.approx(of_ranks[0], abs=2e-5)
    assert of_ranks[0][4] < of_ranks[0][1]


ENDINGS = """
import asyncio, json, pathlib, sys, time
import torch
from torch import nn
import nanoray

class Own(BaseException):
    pass

def exits():
    sys.exit(3)

def raises(error):
    raise error

ENDINGS = {
    "KeyboardInterrupt": lambda: raises(KeyboardInterrupt()),
    "SystemExit": exits,
    "GeneratorExit": lambda: raises(GeneratorExit()),
    "CancelledError": lambda: raises(asyncio.CancelledError()),
    "Own": lambda: raises(Own("enough")),
}

class Points(torch.utils.data.Dataset):
    def __init__(self, end):
        self.end, self.reads = end, 0

    def __len__(self):
        return 64

    def __getitem__(self, index):
        self.reads += 1
        if self.reads > 30:
            self.end()
        return torch.full((3,), index / 64), torch.zeros(1)

def main(run, what, where):
    end = ENDINGS[what] if run.rank == 1 else lambda: None
    model = nn.Linear(3, 1)
    calls = []

    def loss(output, targets):
        calls.append(1)
        if where == "loss" and len(calls) > 3:
            end()
        return ((output - targets) ** 2).mean()

    data = Points(end if where == "data" else lambda: None)
    nanoray.RuntimeEngine(model, torch.optim.SGD(model.parameters(), 0.01), run, loss).fit(data)
    if run.rank == 1:  # longer than the driver needs to see that rank 0 has returned
        time.sleep(8)
        (run.folder / "results of rank 1").write_text("complete")
    if where == "after":
        end()

if __name__ == "__main__":
    for what, where in json.loads(sys.argv[2]):
        config = json.loads(sys.argv[1])
        config["out_dir"] += f"/{what}-{where}"
        code = nanoray.launch(lambda run: main(run, what, where), config)
        print(f"{what} in {where}: exit code {code}", flush=True)
"""
LINES = {
    "KeyboardInterrupt": ("KeyboardInterrupt: raised in", 130),
    "SystemExit": ("SystemExit: sys.exit(3) was called in", 3),
    "GeneratorExit": ("GeneratorExit: raised in", 1),
    "CancelledError": ("CancelledError: raised in", 1),
    "Own": ("Own: enough, raised in", 1),
}


@pytest.mark.full
@pytest.mark.parametrize(
    "endings",
    [
        [("KeyboardInterrupt", "loss"), ("SystemExit", "after")],
        pytest.param(
            [(what, "loss") for what in LINES if what != "KeyboardInterrupt"],
            marks=pytest.mark.full,
        ),
        pytest.param([(what, "data") for what in LINES], marks=pytest.mark.full),
        pytest.param(
            [(what, "after") for what in LINES if what != "SystemExit"], marks=pytest.mark.full
        ),
    ],
    ids=["some", "in the loss", "in the data", "after fit"],
)
def test_a_script_that_ends_itself_ends_the_run_at_once(
    cluster: Cluster, tmp_path: Path, endings: list[tuple[str, str]]
) -> None:
    """By what is no Exception, on another rank than 0. Where `fit` is over, its outcome stands.

    There the driver waits for what the rank writes, too.
    """
    script = tmp_path / "script.py"
    script.write_text(ENDINGS)
    config = SETTINGS | {"out_dir": str(tmp_path / "out"), "max_steps": 10, "env": []}
    env = os.environ | cluster.env | {"RAY_ADDRESS": cluster.address}
    done = run(str(script), json.dumps(config), json.dumps(endings), env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    outputs = done.stdout + done.stderr
    for what, where in endings:
        line, code = LINES[what]
        assert f"{what} in {where}: exit code {0 if where == 'after' else code}\n" in outputs, (
            outputs
        )
        out = tmp_path / "out" / f"{what}-{where}"
        if where == "after":
            assert (only_run(out) / "results of rank 1").read_text() == "complete"
            assert not (only_run(out) / "faults.jsonl").exists()
            assert "warning  rank 1 (pid" in outputs
            assert f"{line} {script}, line" in outputs
        else:
            assert outputs.count(f": {line} {script}, line") >= 2, outputs  # and the error's line
            assert [report["cause"] for report in reports(out)] == ["refused"]
            assert "Gave up: restarting cannot cure this" in outputs
    assert "replace  " not in outputs, outputs
    assert "TaskCancelledError" not in outputs
    assert no_actors_left(cluster)


WHOLE_FILE = """
import json, sys
import torch
from torch.utils.data import DataLoader, Dataset
import nanoray

torch.set_default_dtype(torch.float64)
SCALE = 1.0
print("the top runs with", sys.argv[2])

class Points(Dataset):
    def __init__(self, scale):
        self.scale = scale

    def __len__(self):
        return 48

    def __getitem__(self, i):
        x = torch.tensor([i % 7, i % 5, i % 3], dtype=torch.float64) / 7
        return x, self.scale * x.sum(0, keepdim=True).sin()

def collate(items):
    return torch.utils.data.default_collate(items)

def main(run):
    loader = DataLoader(
        Points(SCALE), batch_size=12 // run.world_size, shuffle=True, num_workers=1,
        multiprocessing_context="forkserver", collate_fn=collate,
    )
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    nanoray.RuntimeEngine(model, optimizer, run, torch.nn.functional.mse_loss).fit(loader)

BLOCK
    SCALE = 3.0
    code = nanoray.launch(main, json.loads(sys.argv[1]), ray=sys.argv[2] == "ray")
    print("below the run")
    raise SystemExit(code)
"""
GUARD = 'if __name__ == "__main__":'


def test_ranks_run_the_file_of_the_script_but_not_its_block(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Its default dtype holds on all ranks, processes that they spawn find its classes by name, and
    what the block has set counts as it does in one process.
    """
    script = tmp_path / "script.py"
    script.write_text(WHOLE_FILE.replace("BLOCK", GUARD))
    losses = {}
    for where, workers in (("ray", 2), ("here", 1)):
        out = tmp_path / where
        config = SETTINGS | {"out_dir": str(out), "workers": workers, "env": [], "max_steps": 6}
        del config["global_batch_size"]
        config |= {"grad_accum_steps": 1, "micro_batch_size": 12 // workers}
        done = run(
            str(script),
            json.dumps(config),
            where,
            env=os.environ | cluster.env | {"RAY_ADDRESS": cluster.address},
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("below the run") == 1
        lines = (only_run(out) / "metrics.jsonl").read_text().splitlines()
        losses[where] = [json.loads(line)["train/loss"] for line in lines]
    for rank in (0, 1):
        log = (only_run(tmp_path / "ray") / "logs" / f"rank{rank}.log").read_text()
        assert "the top runs with ray\n" in log
    assert losses["ray"] == pytest.approx(losses["here"], abs=1e-13), "float32 rounds to 1e-8"
    assert no_actors_left(cluster)

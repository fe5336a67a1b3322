"""A script's own model on Ray: a killed rank is replaced, and the script's function runs again in
the new process.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.harness.cluster import Cluster, assert_same_run, fired, no_actors_left, reports
from tests.harness.commands import run

pytestmark = [pytest.mark.slow]
SCRIPT = """
import json, sys
import torch
from torch import nn
import nanoray

def main(run):
    x = torch.randn(200, 3, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin())
    model = nn.Sequential(nn.Linear(3, 16), nn.Dropout(0.1), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    nanoray.RuntimeEngine(model, optimizer, run, nn.functional.mse_loss).fit(data, data, steps=30)

if __name__ == "__main__":
    raise SystemExit(nanoray.launch(main, json.loads(sys.argv[1])))
"""


def launched(cluster: Cluster, folder: Path, out: Path, **settings: object) -> str:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    config = {
        "global_batch_size": 12,
        "workers": 2,
        "cpus_per_worker": 0.5,
        "log_every": 1,
        "checkpoint_every": 10,
    }
    config |= {
        "max_steps": 30,
        "spares": 0,
        "tensorboard": False,
        "out_dir": str(out),
        "placement_timeout_s": 60,
    }
    config |= settings
    done = run(
        str(script),
        json.dumps(config),
        env=os.environ | cluster.env | {"RAY_ADDRESS": cluster.address},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("mode", ["ddp", pytest.param("zero1", marks=pytest.mark.full)])
def test_a_killed_rank_of_a_script_is_replaced(cluster: Cluster, tmp_path: Path, mode: str) -> None:
    """The losses and the weights are those of a run without the kill, to the bit."""
    launched(cluster, tmp_path, tmp_path / "clean", dp_mode=mode)
    faults = "kill@rank=1,step=14,phase=backward"
    output = launched(cluster, tmp_path, tmp_path / "out", dp_mode=mode, faults=faults)
    assert fired(tmp_path / "out") == ["kill"], output
    found = [(report["recovery"], report["steps_repeated"]) for report in reports(tmp_path / "out")]
    assert found == [("in_place", 0)], output
    assert_same_run(tmp_path / "out", tmp_path / "clean")
    assert no_actors_left(cluster)

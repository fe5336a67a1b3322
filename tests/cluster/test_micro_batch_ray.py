"""`micro_batch_size auto` on Ray: the ranks measure before step 1; where memory runs out they start
again by themselves.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.harness.cluster import (
    Cluster,
    assert_same_run,
    finish,
    no_actors_left,
    reports,
    start,
    summary,
    undisturbed,
)
from tests.harness.commands import run
from tests.harness.ranks import only_run

pytestmark = pytest.mark.full  # tests/ranks/test_micro_batch.py has the same without Ray
SCRIPT = """
import json, sys
import torch
from torch import nn
import nanoray

class Model(nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.rank = rank
        self.layers = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
    def forward(self, x):
        if self.rank == 1 and len(x) > 2:
            raise torch.OutOfMemoryError("no memory")
        return self.layers(x)

def main(run):
    x = torch.randn(200, 3, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin())
    torch.manual_seed(1)
    model = Model(run.rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    nanoray.RuntimeEngine(model, optimizer, run, nn.functional.mse_loss).fit(data)

if __name__ == "__main__":
    raise SystemExit(nanoray.launch(main, json.loads(sys.argv[1])))
"""


def limit(out: Path) -> int:
    """The micro batch of the newest group of ranks."""
    lines = map(json.loads, (only_run(out) / "hashes.jsonl").read_text().splitlines())
    return [line["limit"] for line in lines if "group" in line][-1]


def test_the_run_is_the_one_that_is_given_the_size(
    cluster: Cluster, recipe: Path, tmp_path: Path
) -> None:
    flags = ("--workers", "2", "--cpus_per_worker", "0.5", "--global_batch_size", "8")
    flags = (*flags, "--max_steps", "6", "--dropout", "0.1", "--data_dir", str(tmp_path / "data"))
    out = tmp_path / "out"
    code, output = finish(start(cluster, recipe, out, *flags, "--micro_batch_size", "auto"), 200)
    assert code == 0, output
    found = limit(out)
    assert f"micro batch {found}: fastest of" in output
    undisturbed(recipe, tmp_path / "clean", *flags, "--micro_batch_size", str(found))
    assert_same_run(out, tmp_path / "clean")
    assert no_actors_left(cluster)


@pytest.mark.parametrize("recovery", ["in_place", "restart"])
def test_ranks_on_ray_start_again_below_what_did_not_fit(
    cluster: Cluster, tmp_path: Path, recovery: str
) -> None:
    """Not charged to max_failures: the run is not lost."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    config = {
        "global_batch_size": 16,
        "micro_batch_size": "auto",
        "workers": 2,
        "cpus_per_worker": 0.5,
        "max_steps": 6,
        "max_failures": 0,
        "recovery": recovery,
        "spares": 0,
        "tensorboard": False,
        "placement_timeout_s": 60,
        "out_dir": str(tmp_path / "out"),
        "data_dir": str(tmp_path / "data"),
    }
    done = run(
        str(script),
        json.dumps(config),
        env=os.environ | cluster.env | {"RAY_ADDRESS": cluster.address},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert limit(tmp_path / "out") in (1, 2)
    assert [report["cause"] for report in reports(tmp_path / "out")] == ["no_memory"]
    assert summary(tmp_path / "out")["restarts"] == 1
    assert no_actors_left(cluster)

"""Train on files that are read in sequence, and continue with any number of ranks.

python examples/own_stream.py                                      in this process; stop it with Ctrl-C
torchrun --nproc-per-node 3 examples/own_stream.py auto            goes on with three ranks
"""

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from own_model import points
from torch import nn
from torch.utils.data import DataLoader

import nanoray

FOLDER = Path("points")


def write_files() -> None:
    """Write ten files of JSON lines, which stand for a corpus that does not fit in memory."""
    aside = Path(f"points-{os.getpid()}")
    aside.mkdir()
    for shard in range(10):
        xy, quadrants = points(2000, seed=shard).tensors
        with (aside / f"part-{shard}.jsonl").open("w") as file:
            for pair, quadrant in zip(xy.tolist(), quadrants.tolist(), strict=True):
                file.write(json.dumps({"xy": pair, "quadrant": quadrant}) + "\n")
    # Another rank may have been faster.
    with suppress(OSError):
        aside.rename(FOLDER)


def item_of(record: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """Return inputs and target, a little noise included: it is drawn anew for each sample."""
    return torch.tensor(record["xy"]) + 0.01 * torch.randn(2), record["quadrant"]


if __name__ == "__main__":
    if not FOLDER.exists():
        write_files()
    stream = nanoray.ShardStream(FOLDER, item_of, window=1000)
    loader = DataLoader(stream, batch_size=16, num_workers=1)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    config = {"name": "stream", "global_batch_size": 96, "log_every": 20, "checkpoint_every": 50}
    config["resume"] = sys.argv[1] if len(sys.argv) > 1 else "none"
    engine = nanoray.RuntimeEngine(model, optimizer, config, nn.functional.cross_entropy)
    engine.fit(loader, steps=200)

"""Train a model of your own with nanoray's loop: checkpoints, resume, recovery, every dp_mode.

python examples/own_model.py                                       on Ray, with two ranks
torchrun --nproc-per-node 3 examples/own_model.py                  without Ray
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import nanoray


def points(count: int, seed: int) -> TensorDataset:
    """Return random points of the plane, and the quadrant of each as its class."""
    generator = torch.Generator().manual_seed(seed)
    xy = torch.randn(count, 2, generator=generator)  # (count, 2)
    quadrant = 2 * (xy[:, 0] > 0).long() + (xy[:, 1] > 0).long()  # (count,)
    return TensorDataset(xy, quadrant)


def main(run: nanoray.Run) -> None:
    # Every rank runs this: it makes the model and the optimizer as any script would.
    model = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)

    # The engine distributes them, and has the loop.
    engine = nanoray.RuntimeEngine(model, optimizer, run, loss_fn=nn.functional.cross_entropy)
    engine.fit(points(20_000, seed=1), points(2_000, seed=2), steps=200)


if __name__ == "__main__":
    config = {
        "name": "quadrants",
        "global_batch_size": 96,
        "log_every": 20,
        "eval_every": 100,
        "max_steps": 200,
    }
    raise SystemExit(nanoray.launch(main, config))

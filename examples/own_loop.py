"""A loop of your own on Ray: plain torch, with the folder, the records and the stops of a run.

    python examples/own_loop.py                              two ranks on Ray
    torchrun --nproc-per-node 2 examples/own_loop.py         the same without Ray

Each rank finds what torchrun would give it, so `init_process_group()` works as it stands. When a rank
fails, all call `main` again, and it goes on from what it has saved.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import nanoray

STEPS = 100


def main(run: nanoray.Run) -> None:
    """Learn the sign of a sum with plain DDP."""
    dist.init_process_group()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    # Where an earlier attempt has left off
    saved = run.folder / "state.pt"
    first = 1
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        first = state["step"] + 1
        model.load_state_dict(state["model"])

    for step in range(first, STEPS + 1):
        draws = torch.Generator().manual_seed(1000 * step + run.rank)
        x = torch.randn(32, 8, generator=draws)
        y = (x.sum(1, keepdim=True) > 0).float()
        loss = nn.functional.binary_cross_entropy_with_logits(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        # Ranks learn of a stop at different moments, and must leave after the same step.
        stop = torch.tensor(float(run.should_stop))
        dist.all_reduce(stop)
        if step % 20 == 0 or stop:
            run.log({"train/loss": loss}, step=step)
            if run.rank == 0:
                partial = saved.with_suffix(".partial")
                torch.save({"step": step, "model": model.state_dict()}, partial)
                partial.rename(saved)
                print(f"step {step}: loss {loss:.4f}")
        if stop:
            break


if __name__ == "__main__":
    raise SystemExit(nanoray.launch(main, {"workers": 2, "device": "cpu", "name": "own_loop"}))

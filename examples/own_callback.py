"""Watch a run with a callback: save the best checkpoint, and stop when the loss goes up again.

python examples/own_callback.py
"""

from collections.abc import Mapping
from typing import Any

import torch
from own_model import points
from torch import nn

import nanoray


class StopWatch(nanoray.Callback):
    """Prints the run's evaluations, checkpoints and faults. The methods run on rank 0."""

    def __init__(self) -> None:
        self.best = float("inf")  # validation loss

    def on_run_start(self, run: nanoray.Run) -> None:
        self.run = run
        print(f"watching {run.spec.folder.name}, {run.world_size} rank(s)", flush=True)

    def on_eval_end(self, step: int, record: Mapping[str, Any]) -> None:
        loss = record["val/loss"]
        print(f"step {step}: validation loss {loss:.3f}", flush=True)
        # Both take effect on all ranks, after the next step.
        if loss < self.best:
            self.best = loss
            self.run.save()
        if loss > 2 * self.best:
            self.run.stop()

    def on_checkpoint(self, step: int) -> None:
        print(f"step {step} is on disk", flush=True)

    def on_fault(self, text: str) -> None:
        print(f"a fault: {text}", flush=True)

    def on_run_end(self, outcome: Mapping[str, Any]) -> None:
        print(f"{outcome['exit_reason']} after {outcome['step']} steps", flush=True)


def main(run: nanoray.Run) -> None:
    # Every rank runs this: it makes the model and the optimizer as any script would.
    model = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)

    # The engine has the loop. Callbacks are called from it.
    loss_fn = nn.functional.cross_entropy
    engine = nanoray.RuntimeEngine(model, optimizer, run, loss_fn, callbacks=[StopWatch()])
    engine.fit(points(20_000, seed=1), points(2_000, seed=2), steps=120)


if __name__ == "__main__":
    config = {
        "name": "watched",
        "global_batch_size": 96,
        "eval_every": 40,
        "checkpoint_every": 60,
        "max_steps": 120,
    }
    # ray=False: one rank, in this process
    raise SystemExit(nanoray.launch(main, config, ray=False))

"""Watch a run with a callback: it hears of steps, evaluations, checkpoints and faults, and changes
nothing.

python examples/own_callback.py
"""

from collections.abc import Mapping
from typing import Any

import torch
from own_model import points
from torch import nn

import nanoray


class StopWatch(nanoray.Callback):
    """Prints what it hears."""

    def on_run_start(self, run: nanoray.Run) -> None:
        print(f"watching {run.spec.folder.name}, {run.world_size} rank(s)", flush=True)

    def on_eval_end(self, step: int, record: Mapping[str, Any]) -> None:
        print(f"step {step}: validation loss {record['val/loss']:.3f}", flush=True)

    def on_checkpoint(self, step: int) -> None:
        print(f"step {step} is on disk", flush=True)

    def on_fault(self, text: str) -> None:
        print(f"something happened: {text}", flush=True)

    def on_run_end(self, outcome: Mapping[str, Any]) -> None:
        print(f"{outcome['exit_reason']} after {outcome['step']} steps", flush=True)


def main(run: nanoray.Run) -> None:
    model = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    engine = nanoray.RuntimeEngine(
        model, optimizer, run, nn.functional.cross_entropy, callbacks=[StopWatch()]
    )
    engine.fit(points(20_000, seed=1), points(2_000, seed=2), steps=120)


if __name__ == "__main__":
    settings = {
        "name": "watched",
        "global_batch_size": 96,
        "eval_every": 40,
        "checkpoint_every": 60,
        "max_steps": 120,
    }
    raise SystemExit(nanoray.launch(main, settings, ray=False))

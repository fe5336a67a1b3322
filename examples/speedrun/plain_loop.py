"""The first record of the speedrun: the loop that people write first (nanoray/bench/compute.py).

Flags are those of nanoray.train. Every `eval_every` steps it scores the validation windows that
nanoray's evaluation scores, and writes a record as nanoray does: step, val/loss, the Unix seconds
before and the seconds of the evaluation.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from torch import nn

from nanoray.bench.compute import plain_loop
from nanoray.cli import parse_args
from nanoray.config import Config
from nanoray.data.prepare import prepare
from nanoray.data.tokens import TokenData
from nanoray.machine.host import available_cpus


@torch.no_grad()
def validation_loss(model: nn.Module, data: TokenData, config: Config) -> float:
    """Return the mean loss of the validation windows, a batch of the training's size at a time."""
    windows = data.val_windows(config.eval_samples)
    size = config.global_batch_size
    model.eval()
    parts = [windows[i : i + size] for i in range(0, len(windows), size)]
    total = sum(float(model(*data.val_batch(part))) * len(part) for part in parts)
    model.train()
    return total / len(windows)


def main(argv: list[str]) -> int:
    """Train until an evaluation reaches target_loss, or max_steps."""
    config = parse_args(argv, "python examples/speedrun/plain_loop.py", "A plain loop.").config
    info = prepare(config)
    data = TokenData(info, config.block_size, config.seed)
    records = Path(config.out_dir, "metrics.jsonl")
    with records.open("w", encoding="utf-8") as file:
        for step, model in enumerate(plain_loop(config, info, max(1, int(available_cpus())))):
            if step and (step % config.eval_every == 0 or step == config.max_steps):
                begin = time.time()
                loss = validation_loss(model, data, config)
                record = {
                    "step": step,
                    "val/loss": loss,
                    "time": begin,
                    "time/eval_s": time.time() - begin,
                }
                file.write(json.dumps(record) + "\n")
                file.flush()
                if loss <= config.target_loss or step == config.max_steps:
                    break
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

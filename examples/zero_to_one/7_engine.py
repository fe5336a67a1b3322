"""The same with nanoray's engine, on Ray; or torchrun --nproc-per-node 2
examples/zero_to_one/7_engine.py

Add to the configuration `"dp_mode": "zero1"`, or `"faults": "kill@rank=1,step=120"`, and look what
happens.
"""

import codecs
import this

import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

import nanoray

text = codecs.decode(this.s, "rot13")
letters = sorted(set(text))
tokens = torch.tensor([letters.index(letter) for letter in text])
T = 8  # characters that the network sees
split = len(tokens) * 9 // 10  # the rest is for validation


def main(run: nanoray.Run) -> None:
    windows = TensorDataset(tokens.unfold(0, T, 1)[:-1], tokens[T:])
    layers = [
        nn.Embedding(len(letters), 16),
        nn.Flatten(),
        nn.Linear(16 * T, 64),
        nn.GELU(),
        nn.Linear(64, len(letters)),
    ]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    engine = nanoray.RuntimeEngine(model, optimizer, run, loss_fn=nn.functional.cross_entropy)
    train, val = Subset(windows, range(split - T)), Subset(windows, range(split, len(windows)))
    engine.fit(train, val, steps=200)


if __name__ == "__main__":
    config = {
        "name": "zen",
        "global_batch_size": 32,
        "log_every": 50,
        "eval_every": 50,
        "max_steps": 200,
    }
    raise SystemExit(nanoray.launch(main, config))

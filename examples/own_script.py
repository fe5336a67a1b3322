"""Train in a plain script: no function to launch, `fit` in the middle, torch's own scheduler.

python examples/own_script.py                                      in this process
torchrun --nproc-per-node 2 examples/own_script.py                 as the ranks of torchrun
"""

import torch
from own_model import points
from torch import nn

import nanoray

STEPS = 200

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=STEPS)

# Without nanoray: scheduler.step() after each optimizer.step(). Here the engine calls both.
config = {"name": "plain", "global_batch_size": 96, "log_every": 20, "eval_every": 100}
loss_fn = nn.functional.cross_entropy
engine = nanoray.RuntimeEngine(model, optimizer, config, loss_fn, scheduler=scheduler)
outcome = engine.fit(points(20_000, seed=1), points(2_000, seed=2), steps=STEPS)

# The script goes on, on every rank, with the trained model.
if engine.run.rank == 0:
    with torch.no_grad():
        scores = model(torch.tensor([[1.0, 1.0], [-1.0, -1.0]]))
    print(f"loss {outcome['val_loss']:.3f}, quadrants {scores.argmax(1).tolist()}")

"""In the style of nanoGPT: globals, which a file beside it sets from the command line, and no main."""

import os

import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import Embedding, Linear, Sequential
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

steps = 2
learning_rate = 1e-2
backend = "gloo"
device = "cpu"
exec(open("configurator.py").read())  # noqa: SIM115

if int(os.environ.get("RANK", -1)) != -1:
    init_process_group(backend=backend)
    master_process = int(os.environ["RANK"]) == 0
    seed_offset = int(os.environ["RANK"])
torch.manual_seed(1337 + seed_offset)
raw_model = Sequential(Embedding(64, 32), Linear(32, 64)).to(device)
model = DDP(raw_model)
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
for iter_num in range(steps):
    for micro_step in range(2):
        model.require_backward_grad_sync = micro_step == 1
        X = torch.randint(64, (4, 16))
        loss = cross_entropy(model(X).flatten(0, 1), X.flatten()) / 2
        loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if master_process:
        print(f"loss {iter_num} {loss.item() * 2:.6f}")
destroy_process_group()

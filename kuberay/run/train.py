"""A plain DDP loop, as under torchrun: it fits a line through 64 points."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(64, 1)
for step in range(1, 101):
    loss = nn.functional.mse_loss(model(x), 3 * x + 1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0 and dist.get_rank() == 0:
        print(f"step {step} loss {loss.item():.6f}")
dist.destroy_process_group()

"""Flags of absl, and its app."""

import os

import torch
import torch.distributed as dist
from absl import app, flags
from torch import nn

STEPS = flags.DEFINE_integer("steps", 2, "how many steps")


def main(words: list[str]) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draws = torch.Generator().manual_seed(int(os.environ["RANK"]))
    for step in range(STEPS.value):
        loss = model(torch.randn(8, 4, generator=draws)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"loss {step} {loss.item():.6f} {words[1:]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    app.run(main)

"""A module of a package: it runs with -m alone, for it imports by a dot."""

import sys

import torch
import torch.distributed as dist
from torch import nn

from .layers import layer


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(layer())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        loss = model(torch.full((2, 4), 1.0 + dist.get_rank())).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"loss {step} {loss.item():.6f} {__package__} {sys.argv[1:]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

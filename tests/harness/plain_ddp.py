"""A plain DDP script, as people write them for torchrun: it knows nothing of nanoray."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def misbehave(how: str) -> None:
    """Do on rank 1 what ends, or stops, a rank; once."""
    if dist.get_rank() != 1 or os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        return
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "raise":
        raise ValueError("a bad value")
    if how == "exit":
        os._exit(3)
    if how == "sleep":
        time.sleep(1000)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--fault", default="")
    args = parser.parse_args()
    if args.fault == "import":
        import a_module_that_nobody_has  # noqa: F401

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(32, 4)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    sampler = DistributedSampler(data, seed=3)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in DataLoader(data, batch_size=4, sampler=sampler):
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.6f}")
        misbehave(args.fault)
    if dist.get_rank() == 0:
        print(f"end {__name__} {sys.argv[1:]} {os.environ['LOCAL_WORLD_SIZE']}")
    # Else the model is the last that holds the group, and gloo's threads, for whose end its destructor
    # waits with Python's lock, may need that lock: then the rank never ends.
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

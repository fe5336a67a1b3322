"""As the references of torchvision start: variables, a barrier, and print on rank 0 alone."""

import argparse
import builtins
import os

import torch
import torch.distributed as dist
from torch import nn


def init_distributed_mode(args: argparse.Namespace) -> None:
    args.rank, args.gpu = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    args.world_size = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", "env://", world_size=args.world_size, rank=args.rank)
    dist.barrier()
    of_python = builtins.print
    builtins.print = lambda *words: of_python(*words) if args.rank == 0 else None  # type: ignore


def main(args: argparse.Namespace) -> None:
    init_distributed_mode(args)
    torch.manual_seed(0)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()))
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    draws = torch.Generator().manual_seed(args.rank)
    for step in range(3):
        loss = model(torch.randn(2, 3, 8, 8, generator=draws)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"loss {step} {loss.item():.6f} on {args.gpu}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    main(parser.parse_args())

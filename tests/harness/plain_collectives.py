"""A plain script that communicates in every usual way: it knows nothing of nanoray. Two ranks."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pair = dist.new_group([0, 1])
    torch.manual_seed(0)
    replicated = DistributedDataParallel(nn.Linear(8, 8, bias=False))  # 64 weights, 256 bytes
    sharded = nn.Linear(16, 8, bias=False)  # 128 weights, 512 bytes
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    params = [*replicated.parameters(), *sharded.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.1)

    for _ in range(3):
        optimizer.zero_grad()
        out = replicated(torch.ones(4, 8)).sum() + sharded(torch.ones(4, 16)).sum()
        out.backward()
        optimizer.step()

        # Of the step that follows: they come after the optimizer.
        message = torch.ones(3)
        if rank == 0:
            dist.send(message, 1)
        else:
            dist.recv(message, 0)
        dist.broadcast(message, 0, group=pair)
        work = dist.all_reduce(message, async_op=True)
        assert work is not None
        torch.ones(200, 200) @ torch.ones(200, 200)
        work.wait()
    with torch.inference_mode():
        dist.all_reduce(torch.ones(5))
    print("end", os.environ["RANK"], f"{message.sum().item():g}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

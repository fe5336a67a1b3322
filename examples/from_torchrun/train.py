"""A plain DDP script, written for torchrun. It knows nothing of nanoray.

torchrun --nproc_per_node 2 train.py
nanoray run --workers 2 train.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)

    # Points on the plane; the class is the side of a circle that they lie on.
    torch.manual_seed(0)
    points = torch.randn(1024, 2)
    inside = (points.square().sum(1) < 1.4).long()
    data = TensorDataset(points, inside)
    sampler = DistributedSampler(data, seed=0)
    loader = DataLoader(data, batch_size=32, sampler=sampler)

    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2)).to(device)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            logits = model(inputs.to(device))
            loss = nn.functional.cross_entropy(logits, targets.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        dist.all_reduce(loss, dist.ReduceOp.SUM)
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item() / dist.get_world_size():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

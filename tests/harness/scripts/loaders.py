"""Workers of DataLoaders, forked and spawned: the latter import this file anew."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index)) / 32


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for method in ("fork", "spawn"):
        sampler = DistributedSampler(Rows(), seed=1)
        loader = DataLoader(
            Rows(), 8, sampler=sampler, num_workers=1, multiprocessing_context=method
        )
        for x in loader:
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"loss {method} {loss.item():.6f} in {os.path.basename(__file__)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

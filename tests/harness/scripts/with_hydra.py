"""A configuration of Hydra: structured, with a list of defaults in code."""

from dataclasses import dataclass

import hydra
import torch
import torch.distributed as dist
from hydra.core.config_store import ConfigStore
from torch import nn


@dataclass
class Settings:
    steps: int = 2
    lr: float = 0.1


ConfigStore.instance().store(name="settings", node=Settings)


@hydra.main(version_base=None, config_name="settings")
def main(settings: Settings) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr)
    draws = torch.Generator().manual_seed(dist.get_rank())
    for step in range(settings.steps):
        loss = model(torch.randn(8, 4, generator=draws)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"loss {step} {loss.item():.6f} {settings}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

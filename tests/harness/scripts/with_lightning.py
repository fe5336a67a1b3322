"""Lightning's Trainer, which recognises torchrun by its variables."""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Line(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.layer(batch[0]), batch[1])
        if self.trainer.is_global_zero:
            print(f"\nloss {self.current_epoch} {index} {loss.item():.6f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    lightning.seed_everything(0)
    x = torch.randn(32, 4)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)
    trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=2)
    trainer.fit(Line(), loader)


if __name__ == "__main__":
    main()

"""A script with the Trainer of transformers, which finds its ranks by torchrun's variables."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


def samples() -> list[dict[str, Any]]:
    draws = torch.Generator().manual_seed(0)
    rows = [torch.randint(64, (16,), generator=draws) for _ in range(64)]
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2)
    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        per_device_train_batch_size=4,
        max_steps=6,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=samples())
    trainer.train()
    if arguments.process_index == 0:
        weights = sum(p.double().abs().sum().item() for p in trainer.model.parameters())
        print(f"end __main__ {arguments.world_size} {weights:.6f}")


if __name__ == "__main__":
    main()

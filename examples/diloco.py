"""DiLoCo, a plain loop: replicas train alone for some steps, then average by how much their weights moved.

    nanoray run --workers 2 examples/diloco.py
    torchrun --nproc-per-node 2 examples/diloco.py

    each rank     w0 ─► H steps of AdamW on its own samples ─► w
    all ranks     Δ = mean over ranks of (w0 - w) ─► Nesterov's momentum on Δ ─► the next w0

Every H steps the ranks exchange the weights once, instead of the gradients in each step. Source: Douillard
et al. 2023, DiLoCo.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

CONTEXT = 32  # bytes from which the next one is predicted


def batch_of(text: Tensor, draws: torch.Generator, size: int = 32) -> tuple[Tensor, Tensor]:
    """Return CONTEXT bytes, (size, CONTEXT), and the byte that follows each, (size,)."""
    starts = torch.randint(len(text) - CONTEXT, (size,), generator=draws)
    windows = torch.stack([text[start : start + CONTEXT + 1] for start in starts])
    return windows[:, :-1], windows[:, -1]


def main() -> None:
    """Train a small model of bytes on the text of this file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--steps", type=int, default=20, help="of each round, which a rank does alone"
    )
    parser.add_argument("--outer_lr", type=float, default=0.7)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with open(os.path.abspath(__file__), "rb") as file:
        text = torch.tensor(list(file.read()))
    torch.manual_seed(0)  # all ranks begin with the same weights
    model = nn.Sequential(
        nn.Embedding(256, 16),
        nn.Flatten(),
        nn.Linear(16 * CONTEXT, 128),
        nn.GELU(),
        nn.Linear(128, 256),
    )
    draws = torch.Generator().manual_seed(1 + rank)  # and each draws samples of its own
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)

    # The outer optimizer has the weights of the last round, which all ranks share.
    shared = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    outer = torch.optim.SGD(shared, lr=args.outer_lr, momentum=0.9, nesterov=True)

    for number in range(args.rounds):
        for _ in range(args.steps):
            inputs, targets = batch_of(text, draws)
            loss = nn.functional.cross_entropy(model(inputs), targets)
            inner.zero_grad()
            loss.backward()
            inner.step()

        # (all ranks) How far the replicas have moved, on average, is the gradient of the outer step.
        for kept, p in zip(shared, model.parameters(), strict=True):
            kept.grad = (kept - p).detach() / ranks
            dist.all_reduce(kept.grad)
        outer.step()
        with torch.no_grad():
            for kept, p in zip(shared, model.parameters(), strict=True):
                p.copy_(kept)

        mean = loss.detach().clone() / ranks
        dist.all_reduce(mean)
        if rank == 0:
            print(f"round {number + 1}/{args.rounds} loss {mean.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Evaluate on text that the model has not seen."""

import codecs
import this

import torch
from torch import nn

text = codecs.decode(this.s, "rot13")
letters = sorted(set(text))
tokens = torch.tensor([letters.index(letter) for letter in text])
T = 8  # characters that the network sees
split = len(tokens) * 9 // 10  # the rest is for validation


def batch(step: int, size: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Return windows (B, T) and the character after each of them, (B,)."""
    starts = torch.randint(split - T, (size,), generator=torch.Generator().manual_seed(step))
    return torch.stack([tokens[s : s + T] for s in starts]), tokens[starts + T]


@torch.no_grad()
def evaluate() -> float:
    """Return the mean loss over all windows of the last tenth."""
    starts = torch.arange(split, len(tokens) - T)
    x, y = torch.stack([tokens[s : s + T] for s in starts]), tokens[starts + T]
    return nn.functional.cross_entropy(model(x), y).item()


torch.manual_seed(0)
layers = [
    nn.Embedding(len(letters), 16),
    nn.Flatten(),
    nn.Linear(16 * T, 64),
    nn.GELU(),
    nn.Linear(64, len(letters)),
]
model = nn.Sequential(*layers)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for step in range(200):
    x, y = batch(step)
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 50 == 49:
        print(f"step {step + 1}  loss {loss.item():.3f}  val {evaluate():.3f}")

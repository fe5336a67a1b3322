"""Measure: torchrun --nproc-per-node 2 examples/zero_to_one/6_monitoring.py"""

import codecs
import this
import time

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()

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


torch.manual_seed(0)  # the same weights on all ranks
layers = [
    nn.Embedding(len(letters), 16),
    nn.Flatten(),
    nn.Linear(16 * T, 64),
    nn.GELU(),
    nn.Linear(64, len(letters)),
]
model = nn.Sequential(*layers)
works: list[dist.Work] = []


def start_sum(p: nn.Parameter) -> None:
    """Start to sum a gradient as soon as backward has computed it."""
    works.append(dist.all_reduce(p.grad, async_op=True))


for p in model.parameters():
    p.register_post_accumulate_grad_hook(start_sum)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

waited, began = 0.0, time.perf_counter()
for step in range(200):
    # Each rank its share of the same batch
    x, y = (part.chunk(ranks)[rank] for part in batch(step))
    loss = nn.functional.cross_entropy(model(x), y)
    (loss / ranks).backward()  # so the sum over the ranks is the mean over the batch
    asked = time.perf_counter()
    while works:
        works.pop().wait()
    waited += time.perf_counter() - asked  # communication that backward did not hide
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    optimizer.step()
    optimizer.zero_grad()
    if step % 50 == 49 and rank == 0:
        step_ms, exposed = 20 * (time.perf_counter() - began), 20 * waited
        print(
            f"step {step + 1}  loss {loss.item():.3f}  val {evaluate():.3f}  gnorm {norm:.2f}  "
            f"{step_ms:.2f} ms a step, of which {exposed:.2f} ms waited for sums"
        )
        waited, began = 0.0, time.perf_counter()

dist.barrier()  # no rank ends while another one still talks to it
dist.destroy_process_group()

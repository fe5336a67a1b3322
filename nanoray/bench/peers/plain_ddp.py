"""A plain DDP script, as people write them for torchrun: torchrun and `nanoray run` both start it.

It uses nothing of nanoray. A network of four blocks learns a fixed function; rank 0 appends a record
of each step, and saves now and then what a restart continues from. Records and logs have the
format of nanoray's, so that one reader serves all arms of a benchmark.
"""

from __future__ import annotations

import time

BEGIN = time.time()  # before torch, whose import takes seconds

import argparse  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
from datetime import datetime  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

WIDTH = 256
BATCH = 128  # samples of a rank and step


class WideBlock(nn.Module):
    """A residual block of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def batch_of(step: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of this rank: the same in each attempt."""
    source = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    x = torch.randn(BATCH, WIDTH, generator=source)
    return x.to(device), torch.sin(3 * x).to(device)  # (B, width) each


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out_dir", type=Path, required=True)
    parser.add_argument("--max_steps", type=int, required=True)
    parser.add_argument("--checkpoint_every", type=int, default=0)
    args = parser.parse_args()
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    rank = int(os.environ["RANK"])
    folder: Path = args.out_dir / "script"
    saved = folder / "checkpoint.pt"

    # Who this rank is, for what kills it and adds up its CPU time
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    now = datetime.now()
    with (folder / "logs" / f"rank{rank}.log").open("a", encoding="utf-8") as log:
        milliseconds = now.microsecond // 1000
        text = f"attempt {attempt}, pid {os.getpid()}"
        log.write(f"{now:%Y-%m-%d %H:%M:%S},{milliseconds:03d} INFO {text}\n")
    if rank == 0 and attempt == 0:
        (folder / "run.json").write_text(json.dumps({"started": BEGIN}), encoding="utf-8")

    # The launchers have different ideas of a rank's number of threads
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*(WideBlock() for _ in range(4))).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first = 1
    if saved.exists():
        state = torch.load(saved, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"] + 1
    ddp = nn.parallel.DistributedDataParallel(model)

    records = (folder / "metrics.jsonl").open("a", encoding="utf-8") if rank == 0 else None
    begun = time.perf_counter()
    for step in range(first, args.max_steps + 1):
        x, y = batch_of(step, device)
        loss = nn.functional.mse_loss(ddp(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if records:
            record = {"step": step, "attempt": attempt, "train/loss": loss.item()}
            now_s = time.perf_counter()
            record |= {"time": time.time(), "time/step_ms": 1e3 * (now_s - begun)}
            records.write(json.dumps(record) + "\n")
            records.flush()
            begun = now_s
            if args.checkpoint_every and step % args.checkpoint_every == 0:
                state = {"step": step, "model": model.state_dict()}
                fresh = saved.with_suffix(".tmp")
                torch.save(state | {"optimizer": optimizer.state_dict()}, fresh)
                os.replace(fresh, saved)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

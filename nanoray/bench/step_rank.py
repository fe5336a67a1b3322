"""One rank of an arm of `bench step`.

The process runs blocks of steps on request (compute.Gate). products a step is one product of two
square matrices: what this machine can do at most eager the plain loop of compute.py, with torch's
allocator as it is, or kept as nanoray does engine nanoray.train.train, or with torch's default
AdamW in place of the fused one
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nanoray.bench.compute import Gate, run_baseline, run_engine
from nanoray.bench.harness.processes import answers_only
from nanoray.checkpoint.run import RunSpec
from nanoray.host.host import keep_freed_memory
from nanoray.mesh.pieces import Shard
from nanoray.mesh.rendezvous import Order
from nanoray.train.tasks import TextTask


def run_products(
    gate: Gate, size: int, dtype: str, threads: int, device: str = "cpu", tf32: bool = False
) -> None:
    """Multiply two matrices (size, size) of a torch `dtype` again and again: 2·size³ FLOPs a step."""
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    a, b = (torch.randn(size, size, device=device).to(getattr(torch, dtype)) for _ in range(2))
    out = torch.empty_like(a)
    while gate() is Order.GO_ON:
        torch.mm(a, b, out=out)


class UnfusedTask(TextTask):
    """A GPT whose AdamW is torch's default one: not one kernel over all parameters, but many."""

    def optimizer(self, model: nn.Module, shards: list[Shard] | None) -> torch.optim.Optimizer:
        optimizer = super().optimizer(model, shards)
        for group in optimizer.param_groups:
            # Torch decides: a loop on CPUs, many parameters at a time on GPUs
            group["fused"] = None
        return optimizer


def main() -> int:
    """Run the arm of one JSON order from the command line until stdin ends."""
    order: dict[str, Any] = json.loads(sys.argv[1])
    say = answers_only()
    if order.get("pinned"):  # before torch starts its threads
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[order["rank"] % len(cores)]})
    device = order.get("device", "cpu")
    gate = Gate(say, device)
    if order["arm"] == "products":
        run_products(
            gate, order["size"], order["dtype"], order["threads"], device, order.get("tf32", False)
        )
        return 0
    spec = RunSpec.from_dict(json.loads(Path(order["spec"]).read_text(encoding="utf-8")))
    if order["arm"] == "eager":
        if order.get("keep_memory"):
            keep_freed_memory()
        run_baseline(spec, gate, order["threads"])
    else:
        run_engine(spec, gate, order, say, UnfusedTask if order.get("unfused") else None)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""A rung of `bench step cpu` or `gpu` on its ranks: a model that stays warm, and trains in blocks of steps.

    products   a step is one product of two square matrices: what this machine can do at most
    plain      the loop that people write first, with torch's allocator as it is, or kept as nanoray does
    engine     the steps of engine.fit (train/loop_arm.py); or with torch's default AdamW

Every rung has ranks of its own, which keep it between two blocks (RankPool.keep). Meanwhile they
sleep: a slow minute of the machine hits all rungs, and the threads of one never disturb another.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoray.bench.harness.report import Emit, Kept, Record
from nanoray.checkpoint.run_folder import RunSpec
from nanoray.config import Config
from nanoray.data.dataset import DatasetInfo
from nanoray.errors import DataError
from nanoray.machine.host import keep_freed_memory

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer

    from nanoray.parallel.mesh import Mesh
    from nanoray.parallel.pieces import Shard

OPEN = "nanoray.bench.compute:open_rung"


def open_rung(mesh: Mesh, order: Record) -> Kept:
    """Return the function that runs a block of the order's rung. (all ranks)

    An order of that has the steps of the block, and those before it that do not count (`settling`).
    Emitted: step_ms of the slowest rank; of an engine also the loss of the last step that does not
    count, and peak_bytes of the rank that held most.
    """
    if order["arm"] == "products":
        return timed(multiply(mesh.device, order))
    spec = RunSpec.from_dict(json.loads(Path(order["spec"]).read_text(encoding="utf-8")))
    if order["arm"] == "engine":
        return _engine(mesh, spec, unfused=order["unfused"])
    if order["keep_memory"]:
        keep_freed_memory()
    import torch

    return timed(plain_loop(spec.config, spec.dataset, torch.get_num_threads()))


def timed(steps: Iterator[Any]) -> Kept:
    """Return the function that runs a block of a loop that does a step for each `next`."""
    from nanoray.observe.trace.recorder import wait_for

    def block(mesh: Mesh, order: Record, emit: Emit) -> None:
        for _ in range(order["settling"]):
            next(steps)
        wait_for(mesh.device)
        start = time.perf_counter()
        for _ in range(order["steps"]):
            next(steps)
        wait_for(mesh.device)
        emit({"step_ms": 1e3 * (time.perf_counter() - start) / order["steps"]})

    return block


def _engine(mesh: Mesh, spec: RunSpec, unfused: bool) -> Kept:
    """Return the function that runs a block of nanoray's own steps. (all ranks)"""
    from nanoray.train.loop_arm import LoopArm
    from nanoray.train.tasks import TextTask, task_of

    class UnfusedTask(TextTask):
        """A GPT whose AdamW is torch's default one: not one kernel over all parameters, but many."""

        def optimizer(self, model: nn.Module, shards: list[Shard] | None) -> Optimizer:
            optimizer = super().optimizer(model, shards)
            for group in optimizer.param_groups:
                # Torch decides: a loop on CPUs, many parameters at a time on GPUs
                group["fused"] = None
            return optimizer

    arm = LoopArm(spec, mesh, UnfusedTask(spec.config, spec.dataset) if unfused else task_of(spec))

    def block(mesh: Mesh, order: Record, emit: Emit) -> None:
        cost = arm.block(order["steps"], order["settling"])
        found = {"loss": cost.loss, "peak_bytes": cost.peak_bytes}
        emit({"step_ms": 1e3 * cost.step_s} | found)

    return block


def multiply(device: torch.device, order: Record) -> Iterator[None]:
    """Multiply two matrices (size, size) again and again: 2·size³ FLOPs a step."""
    import torch

    torch.set_float32_matmul_precision("high" if order["tf32"] else "highest")
    size, dtype = order["size"], getattr(torch, order["dtype"])
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    while True:
        torch.mm(a, b, out=out)
        yield


def plain_loop(cfg: Config, data: DatasetInfo, threads: int) -> Iterator[nn.Module]:
    """Train nanoray's GPT with the loop that people write first.

    It is nanoGPT's step, without nanoray's additions and omissions. Random offsets from a fresh
    memmap, AdamW as torch makes it by default (not fused), clip_grad_norm_, and the loss fetched on
    every step. The model is the same class as in the other arms: only the loop is compared. Yields
    the model before each step, without end.
    """
    import numpy as np
    import torch

    from nanoray.models.gpt import GPT, ModelShape
    from nanoray.train.optim.groups import lr_at

    torch.set_num_threads(threads)
    torch.manual_seed(cfg.seed)
    model = GPT(ModelShape.of(cfg, data.vocab_size), cfg.dropout)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": decayed, "weight_decay": cfg.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=cfg.lr, betas=(cfg.beta1, cfg.beta2))

    # The loop of a reader's first program: it reads one file.
    if len(data.files("train")) > 1:
        raise DataError(
            f"{data.path} has several train files, and the plain loop reads one; give a dataset "
            "with one train.bin"
        )
    (file,) = data.files("train")

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        # Opened anew for each batch, as nanoGPT does it.
        tokens = np.memmap(data.path / file.name, dtype=data.dtype, mode="r", offset=file.offset)
        starts = torch.randint(len(tokens) - cfg.block_size, (cfg.global_batch_size,)).tolist()
        windows = [
            torch.from_numpy(tokens[i : i + cfg.block_size + 1].astype(np.int64)) for i in starts
        ]
        block = torch.stack(windows)  # (B, T + 1)
        return block[:, :-1].contiguous(), block[:, 1:].contiguous()

    step = 0
    (x, y) = batch()
    while True:
        yield model
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step, cfg)
        loss = model(x, y)
        x, y = batch()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        step += 1

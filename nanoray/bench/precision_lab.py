"""A run of `bench precision`: a small GPT in one process, with nanoray's own parts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanoray.bench.harness.trainings import rotated
from nanoray.bench.held_memory import held_bytes
from nanoray.config import Config, make_config
from nanoray.data.tokens import TokenData
from nanoray.machine.compat import foreach_mul_
from nanoray.models.fp8 import use_fp8
from nanoray.models.gpt import GPT, ModelShape
from nanoray.models.precision import LossScaler, autocast, float32_products, weight_type
from nanoray.train.optim.groups import lr_at, make_optimizer, set_lr

CPU = torch.device("cpu")


@dataclass
class Lab:
    """A recipe and its data."""

    config: Config
    data: TokenData
    vocab_size: int
    device: torch.device = CPU

    def model(self, precision: str) -> GPT:
        """Return the model with its first weights, the same ones each time."""
        torch.manual_seed(self.config.seed)
        shape = ModelShape.of(self.config, self.vocab_size)
        return GPT(shape).to(self.device, weight_type(precision))

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the batch of a step."""
        size = self.config.global_batch_size
        return self.data.train_batch(step * size, size)


class Training:
    """A run of one mode, step by step: the loop's own parts, in its order, without ranks."""

    def __init__(self, lab: Lab, **settings: Any) -> None:
        self.lab = lab
        self.config = make_config(lab.config.model_dump() | settings)
        precision = self.config.precision
        self.model = lab.model(precision)
        if precision == "fp8":
            use_fp8(self.model, self.config.fp8_scaling)
        self.optimizer = make_optimizer(self.model, self.config)
        self.scaler = LossScaler(lab.device, precision.startswith("fp16"), late=self.config.pure)
        self.losses: list[float] = []
        self.held: dict[str, int] = {}

    def step(self) -> float:
        """Train one step; return its milliseconds."""
        x, y = self.lab.batch(len(self.losses))
        if on_gpu := self.lab.device.type == "cuda":
            torch.set_float32_matmul_precision(float32_products(self.config.precision))
            torch.cuda.synchronize()
        start = time.perf_counter()
        set_lr([self.optimizer], lr_at(len(self.losses), self.config))
        with autocast(self.lab.device.type, self.config.precision):
            loss = self.model(x, y)
        self.scaler.scale(loss).backward()
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        self.scaler.unscale(grads)
        norm = torch.stack([torch.linalg.vector_norm(g, dtype=torch.float32) for g in grads]).norm()
        norm = self.scaler.norm(norm)
        self.scaler.flag_nonfinite(norm, loss.detach())
        foreach_mul_(grads, (self.config.grad_clip / (norm + 1e-6)).clamp(max=1.0))
        self.scaler.step([self.optimizer])
        self.losses.append(loss.item())
        if on_gpu:
            torch.cuda.synchronize()
        ms = 1e3 * (time.perf_counter() - start)
        self.held = held_bytes(self.model, grads, self.optimizer)
        self.model.zero_grad(set_to_none=True)
        return ms


def rounds_of(
    runs: dict[str, Training], steps: int, rounds: int
) -> Iterator[tuple[str, list[float]]]:
    """Train all runs in turn; yield the milliseconds of a run's steps in each round."""
    for turn in range(rounds):
        for name in rotated(list(runs), turn):
            yield name, [runs[name].step() for _ in range(steps // rounds)]

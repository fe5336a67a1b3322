"""The experiments of `bench precision`: a small GPT in one process, with nanoray's own parts.

Each function measures one claim and returns numbers; bench/precision.py makes rows of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nanoray.bench.harness.trainings import rotated
from nanoray.bench.held_memory import held_bytes
from nanoray.cli.forecast.memory import Sizes, state_memory
from nanoray.config import Config, make_config
from nanoray.data.tokens import TokenData
from nanoray.machine.compat import foreach_mul_
from nanoray.models.costs import activation_memory
from nanoray.models.fp8 import use_fp8
from nanoray.models.gpt import GPT, ModelShape
from nanoray.models.precision import (
    LossScaler,
    autocast,
    float32_products,
    step_unless,
    weight_type,
)
from nanoray.train.optim.groups import lr_at, make_optimizer, set_lr

CPU = torch.device("cpu")


@dataclass
class Lab:
    """A recipe and its data."""

    config: Config
    data: TokenData
    vocab_size: int
    device: torch.device = CPU

    @property
    def shape(self) -> ModelShape:
        return ModelShape.of(self.config, self.vocab_size)

    def model(self, precision: str = "fp32") -> GPT:
        """Return the model with its first weights, the same ones each time."""
        torch.manual_seed(self.config.seed)
        return GPT(self.shape).to(self.device, weight_type(precision))

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the batch of a step."""
        size = self.config.global_batch_size
        return self.data.train_batch(step * size, size)

    def with_settings(self, **settings: Any) -> Config:
        """Return the recipe with other settings."""
        return make_config(self.config.model_dump() | settings)


class Training:
    """A run of one mode, step by step: the loop's own parts, in its order, without ranks."""

    def __init__(self, lab: Lab, **settings: Any) -> None:
        self.lab = lab
        self.config = lab.with_settings(**settings)
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

    @property
    def formula(self) -> dict[str, int]:
        """What a rank holds between two steps, and for its micro batch, by the formulas."""
        state = state_memory(self.config, Sizes.of(self.model), 1, 1, 1.0)
        batch = activation_memory(
            self.lab.shape, self.config.global_batch_size, self.config.precision
        )
        return {"state": sum(state.values()), "batch": sum(batch.values())}

    def kept_for_backward(self) -> int:
        """Count the bytes that a forward keeps for backward, and the logits, as torch holds them."""
        own = {p.untyped_storage().data_ptr() for p in self.model.parameters()}
        kept = dict[int, int]()

        def keep(tensor: Tensor) -> Tensor:
            if (storage := tensor.untyped_storage()).data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        x, y = self.lab.batch(0)
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with hooks, autocast(self.lab.device.type, self.config.precision):
            self.model(x, y)
        return sum(kept.values())


def gradients(
    model: nn.Module, batch: tuple[Tensor, Tensor], precision: str, factor: float = 1.0
) -> dict[str, Tensor]:
    """Return the gradients of the loss times `factor`, with that factor in them."""
    model.zero_grad(set_to_none=True)
    with autocast("cpu", precision):
        loss = model(*batch)
    (loss * factor).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def largest_scale(model: nn.Module, batch: tuple[Tensor, Tensor], weight: float) -> float:
    """Return the largest loss scale, up to its cap, without an overflow.

    Dynamic scaling ends there.
    """
    scale = LossScaler.LARGEST
    while scale > 1 and not all(
        g.isfinite().all() for g in gradients(model, batch, "fp16", weight * scale).values()
    ):
        scale /= 2
    return scale


def lost(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Return the percentage of non-zero float32 gradients that become zero."""
    zeros = sum(int(((found[name] == 0) & (g != 0)).sum()) for name, g in exact.items())
    there = sum(int((g != 0).sum()) for g in exact.values())
    return 100.0 * zeros / max(1, there)


# Updates.


def move(
    lab: Lab, weights: dict[str, Tensor], lr: float, steps: int, **settings: Any
) -> tuple[float, float]:
    """Repeat an AdamW update; return the % of weights that never moved, and the % of the way.

    Far is 100 where they went as far as float64's along its direction: sum(d·d64)/sum(d64·d64).
    """
    config = lab.with_settings(weight_decay=0.0, **settings)
    source = torch.Generator().manual_seed(lab.config.seed)
    grads = {name: 1e-3 * torch.randn(w.shape, generator=source) for name, w in weights.items()}
    model = lab.model(config.precision)
    exact = lab.model().double()
    for m in (model, exact):
        m.load_state_dict(weights, strict=False)
    start = {name: p.detach().double() for name, p in model.named_parameters()}
    for name, p in exact.named_parameters():
        p.data.copy_(start[name])
    mine = make_optimizer(model, config)
    groups = [{"params": list(exact.parameters()), "weight_decay": 0.0}]
    theirs = torch.optim.AdamW(groups, betas=(config.beta1, config.beta2))
    scale = 2.0**16 if config.precision == "fp16_pure" else 1.0
    set_lr([mine, theirs], lr)
    for _ in range(steps):
        for m, optimizer, factor in ((model, mine, scale), (exact, theirs, 1.0)):
            for name, p in m.named_parameters():
                p.grad = (grads[name] * factor).to(p.dtype)
            if m is model:
                step_unless(optimizer, None, torch.tensor(scale) if scale != 1.0 else None)
            else:
                optimizer.step()
    same = along = square = 0.0
    for (name, p), q in zip(model.named_parameters(), exact.parameters(), strict=True):
        went = p.detach().double() - start[name]
        should = q.detach() - start[name]
        same += float((went == 0).sum())
        along += float((went * should).sum())
        square += float(should.square().sum())
    return 100.0 * same / sum(p.numel() for p in model.parameters()), 100.0 * along / square


# Overflow.


def compressed_mean(scaled: Tensor, ranks: int, how: str) -> tuple[float, float]:
    """Sum equal gradients of `ranks` ranks in fp16; return the % that overflow or become zero.

    `how`: sum, then divide | divide, then sum | half of it (by √n before and by √n after). `scaled` (N,) float32.
    """
    before = {
        "sum, then divide": 1.0,
        "divide, then sum": 1.0 / ranks,
        "by √n, twice": ranks**-0.5,
    }[how]
    own = (scaled * before).half()
    # The sum of n equal numbers, in a tree as a ring's and a tree's partial sums come in every size
    # up to n.
    total = own
    count = 1
    while count < ranks:
        total = (total + total).half()
        count = 2 * count
    mean = (total.float() * (1.0 / ranks / before)).half()
    there = scaled != 0
    over = (~mean.isfinite() & there).double().sum() / there.sum()
    return 100.0 * float(over), 100.0 * float(((mean == 0) & there).double().sum() / there.sum())


def rounds_of(
    runs: dict[str, Training], steps: int, rounds: int
) -> Iterator[tuple[str, list[float]]]:
    """Train all runs in turn; yield the milliseconds of a run's steps in each round."""
    for turn in range(rounds):
        for name in rotated(list(runs), turn):
            yield name, [runs[name].step() for _ in range(steps // rounds)]

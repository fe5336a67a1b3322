"""The experiments of `bench precision`: a small GPT in one process, with nanoray's own parts.

Each function measures one claim and returns numbers; bench/precision.py makes rows of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoray.base.compat import foreach_mul_
from nanoray.bench.harness.plan import rotated
from nanoray.bench.held import held_bytes
from nanoray.config import Config, make_config
from nanoray.data.tokens import TokenData
from nanoray.forecast.memory import Sizes, state_memory
from nanoray.mesh.pieces import whole_shards
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
from nanoray.train.optim.optim16 import EPS, FP16_FACTOR
from nanoray.train.watch.precision_stats import SMALLEST, layer_of

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


def lost(found: dict[str, Tensor], exact: dict[str, Tensor], layer: str = "") -> float:
    """Return the percentage of non-zero float32 gradients that become zero.

    Of one layer, or of all.
    """
    names = [name for name in exact if not layer or layer_of(name) == layer]
    there = sum(int((exact[name] != 0).sum()) for name in names)
    return (
        100.0
        * sum(int(((found[name] == 0) & (exact[name] != 0)).sum()) for name in names)
        / max(1, there)
    )


def subnormal(found: dict[str, Tensor], layer: str) -> float:
    """Return the percentage of a layer's gradients that fp16 has with fewer than its 11 bits."""
    grads = [grad.abs() for name, grad in found.items() if layer_of(name) == layer]
    small = sum(int(((grad > 0) & (grad < SMALLEST["fp16"])).sum()) for grad in grads)
    return 100.0 * small / max(1, sum(grad.numel() for grad in grads))


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


def adam_in_fp16(size: float, elements: int = 4096) -> tuple[float, float]:
    """Return the percentage of first updates that are off by over a tenth.

    The gradients are of about `size`. First where m and v are kept in fp16 as they are and eps is
    added in fp16, then as fp16_pure keeps them.
    """
    source = torch.Generator().manual_seed(0)
    grad = size * torch.randn(elements, generator=source, dtype=torch.float64).abs().add(0.1)
    exact = grad / (grad + EPS)
    m = (0.1 * grad).half()
    v = (0.01 * grad.square()).half()
    plain = (m / 0.1) / ((v / 0.01).sqrt() + torch.tensor(EPS).half())
    m = (FP16_FACTOR * 0.1 * grad).half()
    root = (FP16_FACTOR * 0.1 * grad).half()
    scaled = (m.double() / FP16_FACTOR / 0.1) / (root.double() / FP16_FACTOR / 0.1 + EPS)

    def wrong(found: Tensor) -> float:
        return 100.0 * float((~((found.double() / exact - 1).abs() < 0.1)).double().mean())

    return wrong(plain), wrong(scaled)


# Overflow.


def attention_overflow(size: float, head_dim: int = 64, T: int = 64) -> dict[str, float]:
    """Return the percentage of attention outputs that are not finite.

    q and k are aligned, with a norm of size·√head_dim.
    """
    source = torch.Generator().manual_seed(0)
    base = torch.randn(1, 1, 1, head_dim, generator=source)
    q = size * (base + 0.1 * torch.randn(1, 1, T, head_dim, generator=source))
    k = q.clone()
    v = torch.randn(1, 1, T, head_dim, generator=source)

    def bad(y: Tensor) -> float:
        return 100.0 * float((~y.isfinite()).double().mean())

    def plain(dtype: torch.dtype, before: float, after: float) -> Tensor:
        logits = ((q.to(dtype) * before) @ k.to(dtype).mT) * after
        return logits.softmax(-1) @ v.to(dtype)

    root = 1 / math.sqrt(head_dim)
    return {
        "fp16, scaled after": bad(plain(torch.float16, 1.0, root)),
        "fp16, scaled before": bad(plain(torch.float16, root, 1.0)),
        "fp16, torch's kernel": bad(F.scaled_dot_product_attention(q.half(), k.half(), v.half())),
        "bf16, scaled after": bad(plain(torch.bfloat16, 1.0, root)),
    }


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


def life_of_a_scale(overflows: int, steps: int, interval: int) -> list[float]:
    """Return the loss scale after each step of a run with overflows from step 10 on."""
    scaler = LossScaler(CPU, enabled=True)
    found = []
    scaler.GROWTH_INTERVAL = interval
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.0, fused=True)
    for step in range(steps):
        weight.grad = torch.full((1,), math.inf if 10 <= step < 10 + overflows else 1.0)
        scaler.flag_nonfinite(weight.grad.norm(), torch.zeros(()))
        scaler.step([optimizer])
        found.append(scaler.tensors()["loss scale"][0].item())
    return found


# Eight bits.


@torch.no_grad()
def stream_error(lab: Lab, layers: int, precision: str) -> float:
    """Return the relative error, in percent, of an untrained GPT's last residual stream.

    The reference is float64.
    """
    torch.manual_seed(lab.config.seed)
    model = GPT(ModelShape.of(lab.with_settings(n_layer=layers), lab.vocab_size))
    for p in model.parameters():  # the same weights in both, so that only the arithmetic differs
        p.copy_(p.bfloat16().float())
    x, _ = lab.batch(0)

    def stream(model: GPT) -> Tensor:
        y = model.embed(x)
        for block in model.blocks:
            y = block(y)
        return y.double()

    exact = stream(model.double())
    model = model.to(weight_type(precision))
    with autocast("cpu", precision):
        found = stream(model)
    return 100.0 * float((found - exact).norm() / exact.norm())


@torch.no_grad()
def loss_error(model: GPT, batch: tuple[Tensor, Tensor], dtype: torch.dtype) -> float:
    """Return |error| of the mean loss, in nat, where log-softmax and mean run in 16 bits, from equal logits."""
    x, y = batch
    stream = model.embed(x)
    for block in model.blocks:
        stream = block(stream)
    logits = model.lm_head(model.norm(stream)).flatten(0, 1).to(dtype)  # (B·T, V)
    exact = F.cross_entropy(logits.double(), y.flatten())
    picked = logits.log_softmax(-1).gather(1, y.flatten()[:, None])
    return abs(float(-picked.mean().double() - exact))


def rounds_of(
    runs: dict[str, Training], steps: int, rounds: int
) -> Iterator[tuple[str, list[float]]]:
    """Train all runs in turn; yield the milliseconds of a run's steps in each round."""
    for turn in range(rounds):
        for name in rotated(list(runs), turn):
            yield name, [runs[name].step() for _ in range(steps // rounds)]


def pieces_of(model: nn.Module) -> list[str]:
    """Return the layers of a model, in its order."""
    return list(dict.fromkeys(layer_of(shard.piece.name) for shard in whole_shards(model)))

"""Parameter groups, the optimizer, and the learning rate at a step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from nanoray.config import Config
from nanoray.parallel.pieces import Shard, whole_shards
from nanoray.train.optim.muon import Muon
from nanoray.train.optim.optim16 import Optim16


def make_optimizer(
    model: nn.Module, config: Config, shards: list[Shard] | None = None
) -> torch.optim.Optimizer:
    """Build the optimizer over `model`'s parameters, or over this rank's shards of them.

    Matrices and embeddings decay, vectors do not. Both kinds are fused: one kernel over all
    parameters, and fp16 can skip a step without a device sync. SGD has weight decay only with
    momentum. Its buffers begin as zeros: torch would leave them uninitialised when fp16 skips the
    very first update.
    """
    if shards is None:
        shards = whole_shards(model)
    decaying = [shard.param for shard in shards if shard.decays]
    others = [shard.param for shard in shards if not shard.decays]
    groups = [
        {"params": decaying, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    if config.pure:
        return Optim16(groups, shards, config)
    if config.optimizer == "muon":
        return Muon.of(shards, config)
    if config.optimizer == "sgd" and config.momentum:
        sgd = torch.optim.SGD(
            groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, fused=True
        )
        for shard in shards:
            sgd.state[shard.param]["momentum_buffer"] = torch.zeros_like(shard.param)
        return sgd
    if config.optimizer == "sgd":
        return torch.optim.SGD([shard.param for shard in shards], lr=config.lr, fused=True)
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=True)


def set_lr(optimizers: Sequence[torch.optim.Optimizer], lr: float) -> None:
    """Set the learning rate of every parameter group."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            rate = lr * group.get("lr_factor", 1.0)  # for a group with a rate of its own
            if isinstance(group["lr"], Tensor):
                # A compiled or captured step refers to this very tensor.
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


def lr_at(step: int, config: Config) -> float:
    """Return the learning rate of the update that follows `step` completed updates.

    Linear warm-up, then: cosine to min_lr (SGDR, Loshchilov & Hutter 2017) | flat, then linear to
    min_lr over the last decay_fraction of the steps (warm-up-stable-decay, MiniCPM 2024) | flat.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return config.lr
    span = config.lr - config.min_lr
    if config.schedule == "cosine":
        steps_after_warmup = max(1, config.max_steps - config.warmup_steps)
        progress = min(1.0, (step - config.warmup_steps) / steps_after_warmup)
        return config.min_lr + span * 0.5 * (1 + math.cos(math.pi * progress))

    decay_steps = max(1, round(config.decay_fraction * config.max_steps))
    remaining = max(0, config.max_steps - step)
    return config.min_lr + span * min(1.0, remaining / decay_steps)

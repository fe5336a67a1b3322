"""Parameter groups, the optimizer, the learning rate at a step, and nanochat's rules for scaling a recipe."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from nanoray.config import Config, make_config
from nanoray.mesh.pieces import Shard, whole_shards
from nanoray.train.muon import Muon
from nanoray.train.optim16 import Optim16


def make_optimizer(model: nn.Module, config: Config, shards: list[Shard] | None = None) -> torch.optim.Optimizer:
    """Build the optimizer over `model`'s parameters, or over this rank's shards of them.

    Matrices and embeddings decay, vectors do not. Both kinds are fused: one kernel over all parameters, and fp16 can
    skip a step without a device sync. SGD has weight decay only with momentum. Its buffers begin as zeros: torch would
    leave them uninitialised when fp16 skips the very first update.
    """
    shards = whole_shards(model) if shards is None else shards
    groups = [
        {"params": [shard.param for shard in shards if shard.decays], "weight_decay": config.weight_decay},
        {"params": [shard.param for shard in shards if not shard.decays], "weight_decay": 0.0},
    ]
    if config.pure:
        return Optim16(groups, shards, config)
    if config.optimizer == "muon":
        return Muon.of(shards, config)
    if config.optimizer == "sgd" and config.momentum:
        sgd = torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, fused=True)
        for shard in shards:
            sgd.state[shard.param]["momentum_buffer"] = torch.zeros_like(shard.param)
        return sgd
    if config.optimizer == "sgd":
        return torch.optim.SGD([shard.param for shard in shards], lr=config.lr, fused=True)
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=True)


def set_lr(optimizers: Sequence[torch.optim.Optimizer], lr: float) -> None:
    """Set the learning rate of every parameter group."""
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["lr"] = lr * group.get("lr_factor", 1.0)  # of a group with a rate of its own


def lr_at(step: int, config: Config) -> float:
    """Return the learning rate of the update that follows `step` completed updates.

    Linear warm-up, then: cosine to min_lr (SGDR, Loshchilov & Hutter 2017) | flat, then linear to min_lr over the last
    decay_fraction of the steps (warm-up-stable-decay, MiniCPM 2024) | flat.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return config.lr
    if config.schedule == "cosine":
        progress = min(1.0, (step - config.warmup_steps) / max(1, config.max_steps - config.warmup_steps))
        return config.min_lr + (config.lr - config.min_lr) * 0.5 * (1 + math.cos(math.pi * progress))
    decay_steps = max(1, round(config.decay_fraction * config.max_steps))
    remaining = max(0, config.max_steps - step)
    return config.min_lr + (config.lr - config.min_lr) * min(1.0, remaining / decay_steps)


class Derived(NamedTuple):
    """A value that a scaling rule set, and why."""

    key: str
    value: float | int
    reason: str


# nanochat's reference point: depth 12 (width 768, vocabulary 32,768) trained on r = 12 tokens per scaling parameter
# with 2^19 tokens a batch. The rules move a recipe tuned there to another size.
_REF_BATCH_TOKENS = 2**19
_REF_SCALING_PARAMS = 12 * 12 * 768**2 + 32768 * 768
_REF_TOKENS_PER_PARAM = 12.0


def derive_scaling(config: Config, given: frozenset[str], scaling_params: int, dp: int) -> tuple[Config, list[Derived]]:
    """Apply nanochat's scaling rules: tokens from model size, batch from tokens, rate and decay from the batch.

    D = r·S; B = B_ref·(D/D_ref)^0.383 rounded to a power of two; lr ∝ √(B/B_ref); weight decay ∝ √(B/B_ref)·D_ref/D.
    `lr`, `muon_lr` and `weight_decay` of the configuration are taken as the values at the reference point. Keys in
    `given` (set by flags) are kept. The batch is at least one sequence per rank and a multiple of the ranks' micro
    batches.
    """
    tokens = config.tokens_per_param * scaling_params
    ref_tokens = _REF_TOKENS_PER_PARAM * _REF_SCALING_PARAMS
    unit = max(1, config.micro_batch_size) * max(1, config.grad_accum_steps) * dp
    if "global_batch_size" in given:
        sequences = config.global_batch_size
    else:
        batch_tokens = 2 ** round(math.log2(_REF_BATCH_TOKENS * (tokens / ref_tokens) ** 0.383))
        sequences = max(1, round(batch_tokens / config.block_size / unit)) * unit
    ratio = sequences * config.block_size / _REF_BATCH_TOKENS
    steps = config.max_steps if "max_steps" in given else max(1, round(tokens / (sequences * config.block_size)))
    decay = config.weight_decay * math.sqrt(ratio) * ref_tokens / tokens
    lr_factor = math.sqrt(ratio)
    derived = [
        Derived(
            "global_batch_size",
            sequences,
            f"2^19 tok × (D/D_ref = {tokens / ref_tokens:.3g})^0.383 as a power of two, in units of {unit} sequences",
        ),
        Derived(
            "max_steps",
            steps,
            f"D = {config.tokens_per_param:g} tok × S = {scaling_params:,} parameters = {tokens:.3g} tok",
        ),
        Derived("lr", config.lr * lr_factor, f"{config.lr:g} × √(B/B_ref = {ratio:.3g})"),
        *(
            [Derived("muon_lr", config.muon_lr * lr_factor, f"{config.muon_lr:g} × √(B/B_ref = {ratio:.3g})")]
            if config.optimizer == "muon"
            else []
        ),
        Derived("min_lr", config.min_lr * lr_factor, f"{config.min_lr:g} × √(B/B_ref = {ratio:.3g})"),
        Derived(
            "weight_decay",
            decay,
            f"{config.weight_decay:g} × √(B/B_ref = {ratio:.3g}) × D_ref/D = {ref_tokens / tokens:.3g}",
        ),
    ]
    derived = [d for d in derived if d.key not in given]
    updates = {d.key: d.value for d in derived} | {"expected_val_loss": {}, "scaling": "none"}
    return make_config(config.model_dump() | updates), derived

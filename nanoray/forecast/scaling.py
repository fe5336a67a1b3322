"""nanochat's scaling rules: steps, batch, learning rate and weight decay from a model's size."""

from __future__ import annotations

import math
from typing import NamedTuple

from nanoray.config import Config, make_config


class Derived(NamedTuple):
    """A value that a scaling rule set, and why."""

    key: str
    value: float | int
    reason: str


# nanochat's reference point: depth 12 (width 768, vocabulary 32,768) trained on r = 12 tokens per
# scaling parameter with 2^19 tokens a batch. The rules move a recipe tuned there to another size.
_REF_BATCH_TOKENS = 2**19
_REF_SCALING_PARAMS = 12 * 12 * 768**2 + 32768 * 768
_REF_TOKENS_PER_PARAM = 12.0


def derive_scaling(
    config: Config, given: frozenset[str], scaling_params: int, dp: int
) -> tuple[Config, list[Derived]]:
    """Derive tokens from the model's size, batch from tokens, rate and decay from the batch.

    D = r·S; B = B_ref·(D/D_ref)^0.383 rounded to a power of two; lr ∝ √(B/B_ref); weight decay ∝
    √(B/B_ref)·D_ref/D. `lr`, `muon_lr` and `weight_decay` of the configuration are taken as the
    values at the reference point. Keys in `given` (set by flags) are kept. The batch is at least
    one sequence per rank and a multiple of the ranks' micro batches.
    """
    tokens = config.tokens_per_param * scaling_params
    ref_tokens = _REF_TOKENS_PER_PARAM * _REF_SCALING_PARAMS
    unit = max(1, config.micro_batch_size) * max(1, config.grad_accum_steps) * dp
    if "global_batch_size" in given:
        sequences = config.global_batch_size
    else:
        batch_tokens = 2 ** round(math.log2(_REF_BATCH_TOKENS * (tokens / ref_tokens) ** 0.383))
        sequences = max(1, round(batch_tokens / config.block_size / unit)) * unit
    steps = config.max_steps
    if "max_steps" not in given:
        steps = max(1, round(tokens / (sequences * config.block_size)))

    # The noise of a gradient falls with the root of the batch, so rates may rise with it.
    ratio = sequences * config.block_size / _REF_BATCH_TOKENS
    lr_factor = math.sqrt(ratio)
    decay = config.weight_decay * lr_factor * ref_tokens / tokens
    by_batch = f"√(B/B_ref = {ratio:.3g})"

    derived = [
        Derived(
            "global_batch_size",
            sequences,
            f"2^19 tok × (D/D_ref = {tokens / ref_tokens:.3g})^0.383 as a power of two, in units "
            f"of {unit} sequences",
        ),
        Derived(
            "max_steps",
            steps,
            f"D = {config.tokens_per_param:g} tok × S = {scaling_params:,} parameters = "
            f"{tokens:.3g} tok",
        ),
        Derived("lr", config.lr * lr_factor, f"{config.lr:g} × {by_batch}"),
    ]
    if config.optimizer == "muon":
        derived.append(
            Derived("muon_lr", config.muon_lr * lr_factor, f"{config.muon_lr:g} × {by_batch}")
        )
    derived += [
        Derived("min_lr", config.min_lr * lr_factor, f"{config.min_lr:g} × {by_batch}"),
        Derived(
            "weight_decay",
            decay,
            f"{config.weight_decay:g} × {by_batch} × D_ref/D = {ref_tokens / tokens:.3g}",
        ),
    ]
    derived = [d for d in derived if d.key not in given]
    updates = {d.key: d.value for d in derived} | {"expected_val_loss": {}, "scaling": "none"}
    return make_config(config.model_dump() | updates), derived

"""nanochat's scaling rules: steps, batch, learning rate and weight decay from a model's size."""

from __future__ import annotations

import math
from typing import TypeVar

from nanoray.config import Settings

S = TypeVar("S", bound=Settings)

# nanochat's reference point: depth 12 (width 768, vocabulary 32,768) trained on r = 12 tokens per
# scaling parameter with 2^19 tokens a batch. The rules move a recipe tuned there to another size.
_REF_BATCH_TOKENS = 2**19
_REF_SCALING_PARAMS = 12 * 12 * 768**2 + 32768 * 768
_REF_TOKENS_PER_PARAM = 12.0


def scale(settings: S, scaling_params: int, dp: int) -> S:
    """Derive tokens from the model's size, batch from tokens, rate and decay from the batch.

    D = r·S; B = B_ref·(D/D_ref)^0.383 rounded to a power of two; lr ∝ √(B/B_ref); weight decay ∝
    √(B/B_ref)·D_ref/D. `lr`, `muon_lr` and `weight_decay` of the configuration are taken as the
    values at the reference point. Keys that the user has given are kept. The batch is at least
    one sequence per rank and a multiple of the ranks' micro batches.
    """
    config, given = settings.config, settings.given
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

    # key -> its value, and the reason for it
    derived = {
        "global_batch_size": (
            sequences,
            f"2^19 tok × (D/D_ref = {tokens / ref_tokens:.3g})^0.383 as a power of two, in units "
            f"of {unit} sequences",
        ),
        "max_steps": (
            steps,
            f"D = {config.tokens_per_param:g} tok × S = {scaling_params:,} parameters = "
            f"{tokens:.3g} tok",
        ),
        "lr": (config.lr * lr_factor, f"{config.lr:g} × {by_batch}"),
    }
    if config.optimizer == "muon":
        derived["muon_lr"] = (config.muon_lr * lr_factor, f"{config.muon_lr:g} × {by_batch}")
    derived["min_lr"] = (config.min_lr * lr_factor, f"{config.min_lr:g} × {by_batch}")
    derived["weight_decay"] = (
        decay,
        f"{config.weight_decay:g} × {by_batch} × D_ref/D = {ref_tokens / tokens:.3g}",
    )
    for key in derived.keys() & given:
        del derived[key]

    values = {key: value for key, (value, _) in derived.items()}
    reasons = {key: reason for key, (_, reason) in derived.items()}
    done = {"expected_val_loss": {}, "scaling": "none"}
    settings = settings.set(values | done, reasons | dict.fromkeys(done, "scaling nanochat"))
    return settings.note(
        *(f"scale  {key} = {values[key]:.4g}: {reason}" for key, reason in reasons.items())
    )

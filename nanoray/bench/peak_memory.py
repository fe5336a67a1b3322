"""The most memory that a step of a rank takes at once, by formulas, for a comparison with measurements.

A dry run prints the sum of all parts, which no step reaches: they do not peak together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import nn

from nanoray.cli.forecast.memory import RankSizes, Sizes, rank_state
from nanoray.config import Config
from nanoray.parallel.buckets import IN_FLIGHT
from nanoray.parallel.fsdp import units_of


def model_memory(
    config: Config,
    model: nn.Module,
    ranks: int,
    accum: int,
    bucket_mb: float,
    mirrored: bool = False,
) -> dict[str, int]:
    """Return `state_memory` of a model that is whole, or cut by ep.py or tp.py.

    `ranks`: that cut one copy of the state.
    """
    sizes = RankSizes.of(config, model)
    return rank_state(config, sizes, ranks, accum, bucket_mb, mirrored)


def peak_memory(
    config: Config,
    model: nn.Module,
    ranks: int,
    parts: Mapping[str, int],
    activations: Mapping[str, int],
    bucket_mb: float,
    accum: int = 1,
) -> int:
    """Return the most bytes of a step: `at_peak` of the parts of `model_memory` and of activations.

    `ranks`: that cut one copy of the state.
    """
    layers = max(1, len(units_of(model)))
    # The ring of an attention is there in its backward, when the layer after it has ended.
    ring = activations.get("ring", 0)
    kept = sum(activations.values()) - ring
    in_flight = parts["in_flight"]
    state = sum(parts.values()) - in_flight

    # Backward computes a block again with copies of its weights; those of all others are freed.
    freed = 0
    if config.activation_checkpointing == "block":
        copies = activations.get("copies", 0)
        freed = copies - copies // layers

    # Where no bucket holds gradients, backward allocates them; with accumulation only once.
    growing = 0
    if config.dp_mode == "fsdp" or (ranks == 1 and accum == 1):
        growing = parts["gradients"]
    moments = moments_of(config, Sizes.of(model), bucket_mb, in_flight, layers)
    if ring:
        first_layer = 1 / layers
        later = [(done, flying + ring) for done, flying in moments if done >= first_layer]
        moments = [*moments, (first_layer, ring), *later]
    return at_peak(state, kept, moments, growing, freed)


def at_peak(
    state: int,
    activations: int,
    moments: Sequence[tuple[float, int]],
    growing: int = 0,
    forward_only: int = 0,
) -> int:
    """Return the most bytes that a step takes at once; its parts do not peak together.

    Backward begins with all activations; when a share of it is done, that share of them is freed.
    `moments` are such shares, from 0 to 1, each with the bytes in flight by then. `growing`: the
    gradients in `state` that have no memory until backward makes them. `forward_only`: activations
    that are freed before backward begins.
    """
    in_backward = max(
        (activations - forward_only) * (1 - done) + growing * done + in_flight
        for done, in_flight in moments
    )
    return state - growing + int(max(activations, in_backward))


def moments_of(
    config: Config, sizes: Sizes, bucket_mb: float, in_flight: int, layers: int
) -> list[tuple[float, int]]:
    """Return shares of backward, and the bytes in flight when each is done: see `at_peak`.

    By hand a bucket is sent when it is full, and zero2 then makes the next one. fsdp sends layer by
    layer. `in_flight`: the most of a step.
    """
    if config.dp_mode not in ("ddp_by_hand", "zero1", "zero2"):
        first_layer = min(1.0, 1 / max(1, layers))
        return [(first_layer, in_flight), (1.0, in_flight)]

    is_zero2 = config.dp_mode == "zero2"
    total = 4 * sizes.params
    bucket = max(bucket_mb * 2**20, 4 * sizes.tensor)
    moments = []
    for sent in range(math.ceil(total / bucket) + 1):
        done = min(sent * bucket, total)
        flying = min(done, IN_FLIGHT * bucket)
        if is_zero2:
            # The sent buckets beside their results, and the next bucket, which is being filled.
            flying = 2 * flying + min(done + bucket, total) - done
        moments.append((done / total, min(in_flight, int(flying))))
    return moments

"""The bytes of weights, gradients and optimizer state of a rank, by data-parallel mode.

With P parameters in float32 on n ranks, AdamW, bytes per parameter:

    mode               weights   gradients   optimizer   and beside backward
    ddp                4         4           8           nothing: the gradients are views of the buckets
    ddp_by_hand        4         4           8           results of the buckets in flight
    zero1              4         4           8/n         the same
    zero2              4         4/n         8/n         the buckets in flight, and their results
    fsdp               4/n       4/n         8/n         gathered weights, and gradients until they are cut

With bf16_pure and fp16_pure: 2, 2 and 4, and with float32 master weights 2, 2 and 12 of optimizer
state. With expert parallelism, n is dp/ep for the experts that a rank holds, and dp for the rest;
each has its own buckets. With hybrid sharding (--replicas R) n is the ranks of one group, dp/R, and
another group stands in for a mirror. A mirror of another rank's share (--mirror) costs 4/n of gradients, 8/n of
optimizer and, with fsdp and of experts that no other rank has, 4/n of weights.

`held_bytes` (bench/held_memory.py) counts the real storages. The table: Rajbhandari et al. 2020, ZeRO, figure 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from torch import nn

from nanoray.config import Config
from nanoray.parallel.buckets import IN_FLIGHT
from nanoray.parallel.ep import names_of_experts
from nanoray.parallel.fsdp import unit_of


@dataclass(frozen=True)
class Sizes:
    """Numbers of parameters of a model."""

    params: int
    outside: int  # of its layers
    layer: int  # in the largest layer
    tensor: int  # in the largest tensor
    trained: int  # with gradients
    each: float = 4.0  # bytes of a parameter

    @classmethod
    def of(cls, model: nn.Module) -> Sizes:
        """Count; the model may be on the meta device, where it takes no memory."""
        layers = Counter[int]()
        for p, units in unit_of(model).items():
            layers[max(units)] += p.numel()
        outside = layers.pop(-1, 0)
        params = list(model.parameters())
        tensors = [p.numel() for p in params]
        return cls(
            params=sum(tensors),
            outside=outside,
            layer=max(layers.values(), default=0),
            tensor=max(tensors),
            trained=sum(p.numel() for p in params if p.requires_grad),
            each=sum(p.nbytes for p in params) / sum(tensors),
        )

    @classmethod
    def of_some(cls, model: nn.Module, names: Collection[str]) -> Sizes:
        """Count these parameters only, as if they were in no layer."""
        tensors = [p.numel() for name, p in model.named_parameters() if name in names]
        total = sum(tensors)
        return cls(params=total, outside=total, layer=0, tensor=max(tensors), trained=total)


def state_memory(
    config: Config,
    sizes: Sizes,
    ranks: int,
    accum: int,
    bucket_mb: float,
    mirrored: bool = False,
    moments: float | None = None,
) -> dict[str, int]:
    """Return the bytes of one rank by part: parameters, gradients and optimizer, which stay, and
    what is in flight.

    `ranks`: that cut one copy of the state: all data ranks, or those of one group of replicas. With
    `mirrored`, `mirror` is its copy of another rank's share. `moments`: numbers that the optimizer
    keeps for each element; None: those of the configuration's optimizer. In flight is the most that
    a step holds beside the rest: see `_in_flight`.
    """
    mode = config.dp_mode if ranks > 1 else "ddp"  # one rank shares nothing
    each = sizes.each
    share = -(-sizes.trained // ranks)
    if moments is None:
        moments = _moments_per_element(config, sizes)

    weights = sizes.params
    if mode == "fsdp":
        weights = -(-sizes.params // ranks)
    gradients = sizes.trained
    if mode in ("zero2", "fsdp"):
        gradients = share
    updated = share
    if mode in ("ddp", "ddp_by_hand"):
        updated = sizes.trained

    # A float32 master of a 16-bit weight stands beside moments that are float32, too.
    optimizer_bytes = each * moments
    if config.master_weights == "fp32":
        optimizer_bytes = 4 * (moments + 1)

    parts = {
        "parameters": int(each * weights),
        "gradients": int(each * gradients),
        "optimizer": int(optimizer_bytes * updated),
        "in_flight": 0,
    }

    # A mirror holds gradients and moments and, where no replica has them, weights.
    only_copy = ranks == 1 and config.ep > 1  # experts that no other rank has
    if mirrored and (only_copy or mode in ("zero1", "zero2", "fsdp")):
        tensors = 2 if only_copy or mode == "fsdp" else 1
        parts["mirror"] = int(each * (tensors + moments) * share)

    # A bucket holds `bucket_mb`, or the largest tensor if that is larger.
    total = int(each * sizes.trained)
    bucket = max(int(bucket_mb * 2**20), int(each * sizes.tensor))
    buckets = min((IN_FLIGHT + 1) * min(bucket, total), total)
    parts["in_flight"] = _in_flight(config, mode, sizes, accum, buckets)
    if config.replicas > 1 and mode in ("zero1", "zero2", "fsdp"):
        parts["in_flight"] += _between_groups(mode, sizes, ranks, min(bucket, total))
    if config.grad_compress != "none" and ranks > 1:
        # Of each bucket: a copy in float32, the message, and the result.
        parts["in_flight"] += 3 * buckets
    return parts


def _moments_per_element(config: Config, sizes: Sizes) -> float:
    """Return how many numbers the optimizer of a configuration keeps for each element."""
    if config.optimizer == "adamw":
        return 2.0
    if config.optimizer == "muon":
        # One for the matrices of layers, and adamw's two for the rest.
        return 1 + sizes.outside / max(1, sizes.params)
    return 1.0 if config.momentum > 0 else 0.0


def _in_flight(config: Config, mode: str, sizes: Sizes, accum: int, buckets: int) -> int:
    """Return the most bytes that a step holds beside weights, gradients and optimizer state.

    `buckets`: the bytes of all buckets that are on their way at once.
    """
    if mode in ("ddp_by_hand", "zero1"):
        return buckets  # the sums arrive in second buffers
    if mode == "zero2":
        return 2 * buckets  # and the buckets themselves are no gradients that stay
    if mode != "fsdp":
        return 0

    # Gradients: whole ones until the last micro batch; else those outside of layers until the end
    # of backward, and those of one layer. Packed for sending: one unit, and the one before it.
    size = 2 if config.fsdp_gather == "bf16" else sizes.each
    whole = sizes.params if accum > 1 else sizes.outside + sizes.layer
    packed = max(sizes.layer, sizes.outside)
    if config.fsdp_reshard == "grad_op":
        # All weights stay gathered. The units go one by one: by the time a second layer's gradients
        # are packed, its weights are gone.
        return int(size * sizes.params + 4 * (whole + packed))
    # Gathered weights: those outside of layers, and a layer's twice: as they arrive, and in place.
    gathered = sizes.outside + 2 * sizes.layer
    return int(size * gathered + 4 * (whole + 2 * packed))


def _between_groups(mode: str, sizes: Sizes, ranks: int, bucket: int) -> int:
    """Return the bytes that arrive from other groups of replicas: slices, as large as the own ones.

    Of buckets two are on their way at once, while backward fills the next; of fsdp's units one.
    `bucket`: bytes.
    """
    if mode == "fsdp":
        return 4 * max(sizes.layer, sizes.outside) // ranks
    return 2 * bucket // ranks


@dataclass(frozen=True)
class RankSizes:
    """The parameters of one rank; experts apart where fewer data ranks share them than the rest."""

    dense: Sizes
    experts: Sizes | None = None

    @property
    def params(self) -> int:
        """All parameters of the rank."""
        if self.experts is None:
            return self.dense.params
        return self.dense.params + self.experts.params

    @classmethod
    def of(cls, config: Config, model: nn.Module) -> RankSizes:
        """Count the parameters of a model that tp, pp and ep have already cut."""
        if config.ep == 1:
            return cls(Sizes.of(model))
        experts = names_of_experts(model)
        rest = {name for name, _ in model.named_parameters()} - experts
        return cls(Sizes.of_some(model, rest), Sizes.of_some(model, experts))


def rank_state(
    config: Config,
    sizes: RankSizes,
    ranks: int,
    accum: int,
    bucket_mb: float,
    mirrored: bool = False,
) -> dict[str, int]:
    """Return `state_memory` of a rank, experts included. `ranks`: that cut one copy of the state."""
    parts = state_memory(config, sizes.dense, ranks, accum, bucket_mb, mirrored)
    if sizes.experts is None:
        return parts
    # Only the ranks of edp hold the same experts, so these are divided by fewer ranks.
    replicas = ranks // config.ep
    of_experts = state_memory(config, sizes.experts, replicas, accum, bucket_mb, mirrored)
    return {part: parts.get(part, 0) + of_experts.get(part, 0) for part in parts | of_experts}

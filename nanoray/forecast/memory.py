"""How many bytes a rank holds of weights, gradients and optimizer state, by data-parallel mode:
arithmetic only.

With P parameters in float32 on n ranks, AdamW, bytes per parameter:

    mode               weights   gradients   optimizer   and beside backward
    ddp                4         4           8           nothing: the gradients lie in the buckets that travel
    ddp_by_hand        4         4           8           what arrives for the buckets in flight
    zero1              4         4           8/n         the same
    zero2              4         4/n         8/n         the buckets in flight, and what arrives for them
    fsdp               4/n       4/n         8/n         gathered weights, and gradients until they are cut

With bf16_pure and fp16_pure: 2, 2 and 4, and with float32 master weights 2, 2 and 12 of optimizer
state. With expert parallelism, n is dp/ep for the experts that a rank holds, and dp for the rest;
each has its own buckets. A mirror of another rank's share (--mirror) costs 4/n of gradients, 8/n of
optimizer and, with fsdp and of experts that no other rank has, 4/n of weights.

`held_bytes` counts what there really is. Source of the table: Rajbhandari et al. 2020, ZeRO, figure
1.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from nanoray.config import Config
from nanoray.mesh.pieces import Shard
from nanoray.parallel.buckets import IN_FLIGHT
from nanoray.parallel.ep import names_of_experts
from nanoray.parallel.fsdp import unit_of, units_of


@dataclass(frozen=True)
class Sizes:
    """Numbers of parameters of a model: all, those outside of its layers, its largest layer's, its
    largest tensor's.
    """

    params: int
    outside: int
    layer: int
    tensor: int
    trained: int  # those that have gradients
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
        trained, each = (
            sum(p.numel() for p in params if p.requires_grad),
            sum(p.nbytes for p in params) / sum(tensors),
        )
        return cls(
            sum(tensors), outside, max(layers.values(), default=0), max(tensors), trained, each
        )

    @classmethod
    def of_some(cls, model: nn.Module, names: Collection[str]) -> Sizes:
        """Count these parameters only, as if they were in no layer."""
        tensors = [p.numel() for name, p in model.named_parameters() if name in names]
        return cls(sum(tensors), sum(tensors), 0, max(tensors), sum(tensors))


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

    With `mirrored`, `mirror` is what it keeps of another rank's share. `moments`: the numbers that
    the optimizer keeps for each element; None: those of the configuration's.

    In flight is the most that a step holds beside them:

    - by hand: up to three buckets, of `bucket_mb` or as large as the largest tensor. For each the ranks' sums arrive in
      a second buffer; with zero2 the bucket itself comes to it
    - fsdp: weights outside of layers, gathered for the whole step, and those of a layer, once as they arrive and once
      in their places; with grad_op those of all layers, which go one by one. Gradients of what lies outside,
      whole until the end of backward, of a layer as computed, and packed, of the layer before as well. With
      accumulation, whole gradients until the last micro batch
    - compressed gradients: of each bucket on its way a copy in float32, what is sent, and what arrives. `compression`
      is what error feedback keeps of every parameter, and what it will keep once the update is done
    """
    mode, P, T, each = (
        (config.dp_mode if ranks > 1 else "ddp"),
        sizes.params,
        sizes.trained,
        sizes.each,
    )
    share = -(-T // ranks)
    if moments is None:
        moments = {"adamw": 2.0, "muon": 1 + sizes.outside / max(1, sizes.params)}.get(
            config.optimizer
        )
        moments = float(config.momentum > 0) if moments is None else moments
    kept = each * moments  # bytes of an element, by its optimizer
    if config.master_weights == "fp32":
        kept = 4 * (moments + 1)
    state = {
        "parameters": int(each * (-(-P // ranks) if mode == "fsdp" else P)),
        "gradients": int(each * (share if mode in ("zero2", "fsdp") else T)),
        "optimizer": int(kept * (T if mode in ("ddp", "ddp_by_hand") else share)),
        "in_flight": 0,
    }
    alone = ranks == 1 and config.ep > 1  # experts that no other rank has
    if mirrored and (alone or mode in ("zero1", "zero2", "fsdp")):
        state["mirror"] = int(each * ((2 if alone or mode == "fsdp" else 1) + moments) * share)
    total = int(each * T)
    bucket = min(max(int(bucket_mb * 2**20), int(each * sizes.tensor)), total)
    buckets = min((IN_FLIGHT + 1) * bucket, total)
    if mode in ("ddp_by_hand", "zero1"):
        state["in_flight"] = buckets
    elif mode == "zero2":
        state["in_flight"] = 2 * buckets
    elif mode == "fsdp":
        size = 2 if config.fsdp_gather == "bf16" else each
        whole = P if accum > 1 else sizes.outside + sizes.layer
        packed = max(sizes.layer, sizes.outside)
        # By the time a second layer's gradients are packed, its weights are gone
        if config.fsdp_reshard == "grad_op":
            state["in_flight"] = int(size * P + 4 * (whole + packed))
        else:
            state["in_flight"] = int(
                size * (sizes.outside + 2 * sizes.layer) + 4 * (whole + 2 * packed)
            )
    if config.grad_compress != "none" and ranks > 1:
        state["in_flight"] += 3 * buckets
        if config.grad_compress in ("int8", "powersgd"):
            state["compression"] = 2 * 4 * T
    return state


def at_peak(
    state: int,
    activations: int,
    moments: Sequence[tuple[float, int]],
    growing: int = 0,
    forward_only: int = 0,
) -> int:
    """Return the most bytes that a step takes at once, given those of its parts, which are never
    all there together.

    Backward begins with all activations; when a share of it is done, that share of them is gone.
    `moments` are such shares, from 0 to 1, each with the bytes in flight by then. `growing` are the
    gradients in `state` that have no memory until backward makes them: fsdp's. `forward_only`: of
    the activations, what is gone when backward begins.
    """
    most = max(
        (activations - forward_only) * (1 - done) + growing * done + flying
        for done, flying in moments
    )
    return state - growing + int(max(activations, most))


def moments_of(
    config: Config, sizes: Sizes, bucket_mb: float, in_flight: int, layers: int
) -> list[tuple[float, int]]:
    """Return shares of backward, and the bytes of `in_flight` that are there when each is done: see
    `at_peak`.

    By hand a bucket is sent when it is full, and zero2 makes the next one then. fsdp sends layer by
    layer.
    """
    if config.dp_mode not in ("ddp_by_hand", "zero1", "zero2"):
        return [(min(1.0, 1 / max(1, layers)), in_flight), (1.0, in_flight)]
    total, bucket = 4 * sizes.params, max(bucket_mb * 2**20, 4 * sizes.tensor)
    moments = []
    for sent in range(math.ceil(total / bucket) + 1):
        done = min(sent * bucket, total)
        own = min(done + bucket, total) - done if config.dp_mode == "zero2" else 0
        arriving = min(done, IN_FLIGHT * bucket) * (2 if config.dp_mode == "zero2" else 1)
        moments.append((done / total, min(in_flight, int(arriving + own))))
    return moments


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
    """Return `state_memory` of a rank, experts included. `ranks`: data ranks."""
    parts = state_memory(config, sizes.dense, ranks, accum, bucket_mb, mirrored)
    if sizes.experts is None:
        return parts
    # Only the ranks of edp hold the same experts, so these are divided by fewer ranks.
    replicas = ranks // config.ep
    of_experts = state_memory(config, sizes.experts, replicas, accum, bucket_mb, mirrored)
    return {part: parts.get(part, 0) + of_experts.get(part, 0) for part in parts | of_experts}


def model_memory(
    config: Config,
    model: nn.Module,
    ranks: int,
    accum: int,
    bucket_mb: float,
    mirrored: bool = False,
) -> dict[str, int]:
    """Return `state_memory` of a model that is whole, or cut by ep.py or tp.py.

    `ranks`: data ranks.
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
    """Return the most bytes of a step: `at_peak` of `model_memory`'s parts, and of the
    activations'.

    ranks: data ranks; one alone has no memory for gradients until the first micro batch's backward
    makes them.
    """
    layers, in_flight = max(1, len(units_of(model))), parts["in_flight"]
    # Backward computes a block again, with copies of that block's weights
    copies = activations.get("copies", 0)
    gone = copies - copies // layers if config.activation_checkpointing == "block" else 0
    moments = moments_of(config, Sizes.of(model), bucket_mb, in_flight, layers)
    growing = parts["gradients"] if config.dp_mode == "fsdp" or (ranks == 1 and accum == 1) else 0
    return at_peak(
        sum(parts.values()) - in_flight, sum(activations.values()), moments, growing, gone
    )


def held_bytes(
    model: nn.Module, gradients: Sequence[Tensor], optimizer: Optimizer
) -> dict[str, int]:
    """Return the bytes of the storages behind a rank's weights, its `gradients`, and its optimizer
    state, by part.

    Call it between backward and zero_grad, when the weights are settled.
    """
    params = list(model.parameters())
    whole, state = [p.grad for p in params if p.grad is not None], _state_of(optimizer)
    return {
        "parameters": _bytes(params),
        "gradients": _bytes([*gradients, *whole]),
        "optimizer": _bytes(state),
    }


def held_by_mirror(model: nn.Module, shards: Sequence[Shard], optimizer: Optimizer) -> int:
    """Return the bytes of a mirror's gradients and optimizer state, and of weights that are not the
    model's own.
    """
    gradients = [shard.param.grad for shard in shards if shard.param.grad is not None]
    own = {local_of(p).untyped_storage().data_ptr() for p in model.parameters()}
    weights = [s.param for s in shards if local_of(s.param).untyped_storage().data_ptr() not in own]
    return _bytes([*weights, *gradients, *_state_of(optimizer)])


def _state_of(optimizer: Optimizer) -> list[Tensor]:
    return [tensor for kept in optimizer.state.values() for tensor in kept.values()]


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of all storages of the tensors; views of one count once."""
    return sum(
        {
            s.data_ptr(): s.nbytes()
            for s in (local_of(tensor).untyped_storage() for tensor in tensors)
        }.values()
    )


def local_of(tensor: Any) -> Any:
    """Return a rank's own part of a tensor that is cut over ranks; anything else is returned as it
    is.
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

"""The parameters of one rank, by formulas: no model is built, but for a ResNet's.

A test compares these numbers with models that are really cut (tests/unit/test_predict.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import torch

from nanoray.config import Config
from nanoray.forecast.job import Job
from nanoray.forecast.memory import RankSizes, Sizes
from nanoray.mesh.layout import Layout
from nanoray.models.gpt import ModelShape
from nanoray.models.precision import weight_type
from nanoray.models.resnet import ResNet, ResNetShape


class Weights(NamedTuple):
    """One tensor of parameters of a rank."""

    layer: int | None  # on its stage; None: outside of the layers
    numel: int
    expert: bool = False


def tensors_of(job: Job, layout: Layout, stage: int) -> tuple[Weights, ...]:
    """Return the parameters of a rank of `stage`, in the order of the model.

    The last of several stages has a copy of the embedding, because the head is tied to it.
    """
    return _tensors_of(job.shape, layout.tp, layout.pp, layout.ep, stage)


@lru_cache(maxsize=64)  # a search asks for them again with every cp, replicas and micro batch
def _tensors_of(shape: ModelShape, tp: int, pp: int, ep: int, stage: int) -> tuple[Weights, ...]:
    width = shape.n_embd
    last_stage = pp - 1
    embedding = shape.padded_vocab * width // tp

    tensors = []
    if stage == 0:
        tensors.append(Weights(None, embedding))
        if not shape.rotary:
            tensors.append(Weights(None, shape.block_size * width))

    for layer in range(layers_of(shape.n_layer, pp, stage)):
        tensors += [Weights(layer, numel) for numel in _attention(shape, tp)]
        if shape.experts:
            tensors += _mixture(shape, tp, ep, layer)
        else:
            tensors += [Weights(layer, numel) for numel in _mlp(shape, tp, 4 * width)]

    if stage == last_stage:
        tensors += [Weights(None, numel) for numel in _norm(shape)]
        if last_stage > 0:
            tensors.append(Weights(None, embedding))
    return tuple(tensors)


def _norm(shape: ModelShape) -> list[int]:
    if shape.bias:
        return [shape.n_embd, shape.n_embd]
    return [shape.n_embd]


def _linear(shape: ModelShape, tp: int, rows: int, columns: int, cut_rows: bool) -> list[int]:
    """Return weight and bias of a linear layer. Only rows that tp cuts also cut the bias."""
    sizes = [rows * columns // tp]
    if shape.bias:
        sizes.append(rows // tp if cut_rows else rows)
    return sizes


def _attention(shape: ModelShape, tp: int) -> list[int]:
    """Return both norms of a block and the matrices of its attention: qkv and proj."""
    width = shape.n_embd
    qkv = _linear(shape, tp, 3 * width, width, cut_rows=True)
    proj = _linear(shape, tp, width, width, cut_rows=False)
    return [*_norm(shape), *qkv, *proj, *_norm(shape)]


def _mlp(shape: ModelShape, tp: int, hidden: int) -> list[int]:
    width = shape.n_embd
    up = _linear(shape, tp, hidden, width, cut_rows=True)
    down = _linear(shape, tp, width, hidden, cut_rows=False)
    return up + down


def _mixture(shape: ModelShape, tp: int, ep: int, layer: int) -> list[Weights]:
    """Return the router, the experts of this rank and the shared experts of one block."""
    width = shape.n_embd
    mine = shape.experts // ep
    hidden = shape.expert_hidden // tp

    # All experts of a rank lie in one tensor for each of up, its bias, down, its bias.
    sizes = [hidden * width, width * hidden]
    if shape.bias:
        sizes = [hidden * width, hidden, width * hidden, width]

    tensors = [Weights(layer, width * shape.experts)]  # the router
    tensors += [Weights(layer, mine * numel, expert=True) for numel in sizes]
    if shape.shared_experts:
        shared = _mlp(shape, tp, shape.shared_experts * shape.expert_hidden)
        tensors += [Weights(layer, numel) for numel in shared]
    return tensors


def layers_of(layers: int, pp: int, stage: int) -> int:
    """Return the number of layers of a stage; the first stages have one more if pp does not divide."""
    return layers // pp + (stage < layers % pp)


def sizes_of(tensors: Iterable[Weights], each: float = 4.0) -> Sizes:
    """Return the sums of the parameters that the memory formula needs. `each`: bytes of one."""
    outside = 0
    largest = 0
    layers: dict[int, int] = {}
    for layer, numel, _ in tensors:
        largest = max(largest, numel)
        if layer is None:
            outside += numel
        else:
            layers[layer] = layers.get(layer, 0) + numel
    total = outside + sum(layers.values())
    return Sizes(total, outside, max(layers.values(), default=0), largest, total, each)


def rank_sizes(
    config: Config, shape: ModelShape | ResNetShape, layout: Layout, stage: int
) -> RankSizes:
    """Return the sizes of a rank of `stage`; experts apart where fewer ranks share them."""
    # Every rank has a whole ResNet, which is small: it is counted
    if isinstance(shape, ResNetShape):
        with torch.device("meta"):
            return RankSizes(Sizes.of(ResNet(shape)))

    each = weight_type(config.precision).itemsize
    tensors = _tensors_of(shape, layout.tp, layout.pp, layout.ep, stage)
    if layout.ep == 1:
        return RankSizes(sizes_of(tensors, each))
    routed = [tensor for tensor in tensors if tensor.expert]
    rest = [tensor for tensor in tensors if not tensor.expert]
    return RankSizes(sizes_of(rest, each), sizes_of(routed, each))

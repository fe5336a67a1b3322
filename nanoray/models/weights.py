"""The parameters of a GPT on one rank, tensor by tensor, by formulas: no model is built.

Tests compare them with models that are built (tests/unit/test_model.py) and cut (test_predict.py).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from nanoray.config.layout import Layout
from nanoray.models.gpt import ModelShape


class Weights(NamedTuple):
    """One tensor of parameters of a rank."""

    numel: int
    layer: int | None = None  # on its stage; None: outside of the layers
    matrix: bool = False  # activations are multiplied by it
    expert: bool = False


def weights_of(
    shape: ModelShape,
    layout: Layout = Layout(),  # noqa: B008
    stage: int = 0,
) -> tuple[Weights, ...]:
    """Return the parameters of a rank of `stage`, in the order of the model.

    The last of several stages has a copy of the embedding, because the head is tied to it.
    """
    return _weights_of(shape, layout.tp, layout.pp, layout.ep, stage)


@lru_cache(maxsize=64)  # a search asks for them again with every cp, replicas and micro batch
def _weights_of(shape: ModelShape, tp: int, pp: int, ep: int, stage: int) -> tuple[Weights, ...]:
    width = shape.n_embd
    last_stage = pp - 1
    embedding = Weights(shape.padded_vocab * width // tp, matrix=True)

    tensors = []
    if stage == 0:
        tensors.append(embedding)
        if not shape.rotary:
            tensors.append(Weights(shape.block_size * width))

    for layer in range(layers_of(shape.n_layer, pp, stage)):
        block = _attention(shape, tp)
        block += _mixture(shape, tp, ep) if shape.experts else _mlp(shape, tp, 4 * width)
        tensors += [each._replace(layer=layer) for each in block]

    if stage == last_stage:
        tensors += _norm(shape)
        if last_stage > 0:
            tensors.append(embedding)
    return tuple(tensors)


def _norm(shape: ModelShape) -> list[Weights]:
    return [Weights(shape.n_embd)] * (1 + shape.bias)


def _linear(shape: ModelShape, tp: int, rows: int, columns: int, cut_rows: bool) -> list[Weights]:
    """Return weight and bias of a linear layer. Only rows that tp cuts also cut the bias."""
    tensors = [Weights(rows * columns // tp, matrix=True)]
    if shape.bias:
        tensors.append(Weights(rows // tp if cut_rows else rows))
    return tensors


def _attention(shape: ModelShape, tp: int) -> list[Weights]:
    """Return both norms of a block and the matrices of its attention: qkv and proj."""
    width = shape.n_embd
    qkv = _linear(shape, tp, 3 * width, width, cut_rows=True)
    proj = _linear(shape, tp, width, width, cut_rows=False)
    return [*_norm(shape), *qkv, *proj, *_norm(shape)]


def _mlp(shape: ModelShape, tp: int, hidden: int) -> list[Weights]:
    width = shape.n_embd
    up = _linear(shape, tp, hidden, width, cut_rows=True)
    down = _linear(shape, tp, width, hidden, cut_rows=False)
    return up + down


def _mixture(shape: ModelShape, tp: int, ep: int) -> list[Weights]:
    """Return the router, the experts of this rank and the shared experts of one block."""
    width = shape.n_embd
    mine = shape.experts // ep
    hidden = shape.expert_hidden // tp

    tensors = [Weights(width * shape.experts, matrix=True)]  # the router
    # All experts of a rank lie in one tensor for each of up, its bias, down, its bias.
    for outputs in (hidden, width):
        tensors.append(Weights(mine * hidden * width, matrix=True, expert=True))
        if shape.bias:
            tensors.append(Weights(mine * outputs, expert=True))
    if shape.shared_experts:
        tensors += _mlp(shape, tp, shape.shared_experts * shape.expert_hidden)
    return tensors


def layers_of(layers: int, pp: int, stage: int) -> int:
    """Return the number of layers of a stage; the first stages have one more if pp does not divide."""
    return layers // pp + (stage < layers % pp)

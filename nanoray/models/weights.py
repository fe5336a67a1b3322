"""The parameters of a GPT on one rank, tensor by tensor, without the memory for them.

A model of one layer is built on the meta device and lists its parameters: all layers have the same.
Tests compare them with models that are built (tests/unit/test_model.py) and cut (test_predict.py).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch

from nanoray.config.layout import Layout
from nanoray.models.gpt import GPT, ModelShape
from nanoray.models.moe import Stacked

# What tensor parallelism cuts, by the ends of the names; every rank keeps the rest whole
CUT_BY_TP = (
    "tok_emb.weight",
    "qkv.weight",
    "qkv.bias",
    "proj.weight",
    "up.weight",
    "up.bias",
    "down.weight",
)


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
    with torch.device("meta"):
        model = GPT(replace(shape, n_layer=1))
    stacked = {name for name, module in model.named_modules() if isinstance(module, Stacked)}

    # Each tensor as this rank has it: tp cuts some, ep the stacked layers of the experts.
    embeddings = []
    block = []
    ending = []
    for name, p in model.named_parameters():
        is_expert = name.rpartition(".")[0] in stacked
        numel = p.numel() // ep if is_expert else p.numel()
        if name.endswith(CUT_BY_TP):
            numel //= tp
        is_matrix = p.dim() >= 2 and not name.startswith("pos_emb")
        tensor = Weights(numel, matrix=is_matrix, expert=is_expert)
        if name.startswith("blocks"):
            block.append(tensor)
        elif name.startswith("norm"):
            ending.append(tensor)
        else:
            embeddings.append(tensor)

    # The first stage has the embeddings, the last one the norm and the head, which is tied.
    tensors = list(embeddings) if stage == 0 else []
    for layer in range(layers_of(shape.n_layer, pp, stage)):
        tensors += [tensor._replace(layer=layer) for tensor in block]
    if stage == pp - 1:
        tensors += ending
        if pp > 1:
            tensors.append(embeddings[0])
    return tuple(tensors)


def layers_of(layers: int, pp: int, stage: int) -> int:
    """Return the number of layers of a stage; the first stages have one more if pp does not divide."""
    return layers // pp + (stage < layers % pp)

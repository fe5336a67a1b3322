"""The sizes of one rank's parameters, by formulas: no model is built, but for a ResNet's."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from nanoray.config import Config
from nanoray.forecast.memory import RankSizes, Sizes
from nanoray.mesh.layout import Layout
from nanoray.models.gpt import ModelShape
from nanoray.models.precision import weight_type
from nanoray.models.resnet import ResNet, ResNetShape
from nanoray.models.weights import Weights, weights_of


def sizes_of(tensors: Iterable[Weights], bytes_of_one: float = 4.0) -> Sizes:
    """Return the sums of the parameters that the memory formula needs."""
    outside = 0
    largest = 0
    layers: dict[int, int] = {}
    for each in tensors:
        largest = max(largest, each.numel)
        if each.layer is None:
            outside += each.numel
        else:
            layers[each.layer] = layers.get(each.layer, 0) + each.numel
    total = outside + sum(layers.values())
    return Sizes(total, outside, max(layers.values(), default=0), largest, total, bytes_of_one)


def rank_sizes(
    config: Config, shape: ModelShape | ResNetShape, layout: Layout, stage: int
) -> RankSizes:
    """Return the sizes of a rank of `stage`; experts apart where fewer ranks share them."""
    # Every rank has a whole ResNet, which is small: it is counted
    if isinstance(shape, ResNetShape):
        with torch.device("meta"):
            return RankSizes(Sizes.of(ResNet(shape)))

    each = weight_type(config.precision).itemsize
    tensors = weights_of(shape, layout, stage)
    if layout.ep == 1:
        return RankSizes(sizes_of(tensors, each))
    routed = [tensor for tensor in tensors if tensor.expert]
    rest = [tensor for tensor in tensors if not tensor.expert]
    return RankSizes(sizes_of(rest, each), sizes_of(routed, each))

"""Compile a model layer by layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from nanoray.config import Config
from nanoray.parallel.fsdp import units_of

COMPILED_VERSIONS = 64


def compile_layers(model: nn.Module, config: Config) -> None:
    """Compile each layer in a model's lists of layers, or a model without any as a whole, at its
    first call.

    Per layer, so that DDP's hooks between layers still overlap communication. Layers of a class
    share their code, and torch keeps only 8 versions of it by default: a ResNet's blocks are of 5
    kinds, each in training, in evaluation, and in a last, smaller batch. Their sizes are few, so
    each gets a version with fixed sizes, in any order of calls.

    With CUDA graphs a layer's outputs and gradients lie where its next replay writes. So a model's
    call tells torch when nobody needs them any more: when the weights have no gradients, as at the
    first micro batch of a step.
    """
    torch._dynamo.config.recompile_limit = max(
        COMPILED_VERSIONS, torch._dynamo.config.recompile_limit
    )
    graphs = config.compile == "cuda_graphs"
    for layer in units_of(model) or [model]:
        dynamic = False if config.model == "resnet" else None
        layer.compile(dynamic=dynamic, mode="reduce-overhead" if graphs else None)
    if graphs:
        model.register_forward_pre_hook(_reuse_graph_memory)


@torch.compiler.disable
def _reuse_graph_memory(model: nn.Module, _: Any) -> None:
    if all(p.grad is None for p in model.parameters()):
        torch.compiler.cudagraph_mark_step_begin()

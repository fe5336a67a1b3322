"""Compile a model layer by layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from nanoray.config import Config
from nanoray.models.gpt import LMHead
from nanoray.models.kernels import cross_entropy
from nanoray.parallel.fsdp import units_of

COMPILED_VERSIONS = 64


def compile_layers(model: nn.Module, config: Config) -> None:
    """Compile each layer in a model's lists of layers, or else the whole model, at its first call.

    Per layer, so that DDP's hooks between layers still overlap communication. Layers of a class
    share their code, and torch keeps only 8 versions of it by default: a ResNet's blocks are of 5
    kinds, each in training, in evaluation, and in a last, smaller batch. Their sizes are few, so
    each gets a version with fixed sizes, in any order of calls.

    A GPT's loss is compiled, too: it is no layer, but as it is it moves more bytes than a block.
    """
    limit = max(COMPILED_VERSIONS, torch.compiler.config.recompile_limit)
    torch.compiler.config.recompile_limit = limit
    uses_graphs = config.compile == "cuda_graphs"
    mode = "reduce-overhead" if uses_graphs else None
    dynamic = False if config.model == "resnet" else None
    for layer in units_of(model) or [model]:
        layer.compile(dynamic=dynamic, mode=mode)

    # Without CUDA graphs of its own: its logits are the largest tensor of a step, and a graph would
    # keep their memory for itself. With fixed sizes: where a second model of the process has another
    # vocabulary, torch 2.13 would take its size for a variable, and generate code without it.
    head = getattr(model, "lm_head", None)
    if isinstance(head, LMHead):
        head.compiled_loss = torch.compile(cross_entropy, dynamic=False)
    if uses_graphs:
        model.register_forward_pre_hook(_reuse_graph_memory)


@torch.compiler.disable
def _reuse_graph_memory(model: nn.Module, _: Any) -> None:
    """Let CUDA graphs write over the outputs and gradients of earlier replays.

    A layer's next replay writes to the same memory. Nothing there is needed when the weights have
    no gradients, as at the first micro batch of a step.
    """
    if all(p.grad is None for p in model.parameters()):
        torch.compiler.cudagraph_mark_step_begin()

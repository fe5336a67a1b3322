"""Give a GPT the weights of a file, before step 1."""

from __future__ import annotations

import platform
from dataclasses import replace

import torch
from safetensors import safe_open
from torch import nn

from nanoray.config.weights import WeightsFile, find
from nanoray.errors import ConfigError, NanorayError
from nanoray.models.gpt import GPT, ModelShape
from nanoray.parallel.mesh import Mesh

_POSITIONS = "pos_emb.weight"


def begin_with(model: nn.Module, path: str, mesh: Mesh) -> None:
    """Give rank 0's model the weights of `path`, which the ranks receive from it later. (all ranks)

    Raises ConfigError on all ranks when rank 0 cannot read them: the others would wait for it.
    """
    assert isinstance(model, GPT), "the table of conflicts refuses others"
    problem = ""
    if mesh.rank == 0:
        try:
            load_weights(model, find(path))
        except NanorayError as error:
            problem = f"rank 0 on {platform.node()}: {error}"
    problem = mesh.broadcast(problem)
    if problem:
        raise ConfigError(problem)


@torch.no_grad()
def load_weights(model: GPT, weights: WeightsFile) -> None:
    """Copy weights into a whole model of their shape, one tensor at a time.

    The model may have fewer positions. Raises ConfigError for weights of another model.
    """
    # The number of heads and the form of GELU change no tensor's shape, but what is computed
    shape = ModelShape(**weights.shape)
    if replace(shape, block_size=model.shape.block_size) != model.shape:
        raise ConfigError(
            f"init_from = {weights.path} is of a model of the shape {shape.to_dict()}, and here it is "
            f"{model.shape.to_dict()}; use the same"
        )
    with safe_open(weights.path, "pt") as file:
        for name, p in model.named_parameters():
            tensor = file.get_tensor(name)
            if name == _POSITIONS:
                tensor = tensor[: len(p)]
            p.copy_(tensor)

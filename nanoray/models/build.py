"""The model that a configuration names."""

from __future__ import annotations

from nanoray.config import Config
from nanoray.config.conflicts import auto_on_gpus
from nanoray.models.gpt import GPT, ModelShape
from nanoray.models.kernels import Kernels
from nanoray.models.moe import RouterTraining
from nanoray.models.resnet import ResNet, ResNetShape


class OwnShape:
    """Stands for the shape of a model that the user's script makes: its weights' names and shapes
    tell it.
    """

    def to_dict(self) -> dict[str, int | bool]:
        return {}


def shape_of(config: Config, classes: int) -> ModelShape | ResNetShape | OwnShape:
    """Return the model's shape for a dataset with so many tokens in its vocabulary, or classes of
    images.
    """
    if config.model == "own":
        return OwnShape()
    return (
        ResNetShape.of(config, classes)
        if config.model == "resnet"
        else ModelShape.of(config, classes)
    )


def build_model(config: Config, classes: int) -> GPT | ResNet:
    """Return the model with weights drawn from torch's default generator."""
    shape = shape_of(config, classes)
    if isinstance(shape, ResNetShape):
        return ResNet(shape, config.label_smoothing)
    assert isinstance(shape, ModelShape), "the user's script makes the model"
    return gpt_of(shape, config)


def gpt_of(shape: ModelShape, config: Config) -> GPT:
    """Return a GPT of this shape, trained as `config` says."""
    routers = RouterTraining(config.expert_capacity, config.balance_loss, config.z_loss)
    return GPT(shape, config.dropout, config.activation_checkpointing, routers, kernels_of(config))


def kernels_of(config: Config) -> Kernels:
    """Return how a GPT is computed. The recipe has replaced `auto`; where nobody has, it is that of
    GPUs.
    """
    auto = auto_on_gpus(config) if config.device != "cpu" else "flash"
    return Kernels(auto if config.attention == "auto" else config.attention, config.loss_chunk)

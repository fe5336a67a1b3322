"""Build the model that a configuration names."""

from __future__ import annotations

from nanoray.config import Config
from nanoray.config.conflicts import auto_on_gpus
from nanoray.models.gpt import GPT, ModelShape
from nanoray.models.kernels import Kernels
from nanoray.models.moe import RouterTraining
from nanoray.models.resnet import ResNet, ResNetShape


class ScriptShape:
    """The shape of a model that the user's script makes.

    It has no sizes: a checkpoint fits if the names and shapes of the weights are equal.
    """

    def to_dict(self) -> dict[str, int | bool]:
        return {}


def shape_of(config: Config, classes: int) -> ModelShape | ResNetShape | ScriptShape:
    """Return the model's shape. `classes`: tokens of the vocabulary, or classes of images."""
    if config.model == "own":
        return ScriptShape()
    if config.model == "resnet":
        return ResNetShape.of(config, classes)
    return ModelShape.of(config, classes)


def build_model(config: Config, classes: int) -> GPT | ResNet:
    """Return the model with weights drawn from torch's default generator."""
    shape = shape_of(config, classes)
    if isinstance(shape, ResNetShape):
        return ResNet(shape, config.label_smoothing)
    assert isinstance(shape, ModelShape), "the user's script makes the model"
    return gpt_of(shape, config)


def gpt_of(shape: ModelShape, config: Config) -> GPT:
    """Return a GPT of this shape, trained as `config` says."""
    routers = RouterTraining(config.balance_loss, config.z_loss)
    return GPT(shape, config.dropout, config.activation_checkpointing, routers, kernels_of(config))


def kernels_of(config: Config) -> Kernels:
    """Return the kernels of a GPT.

    When training, the recipe has replaced `auto` before. Elsewhere `auto` means the kernel for
    GPUs, or flash with device cpu.
    """
    attention: str = config.attention
    if attention == "auto":
        attention = "flash" if config.device == "cpu" else auto_on_gpus(config)
    return Kernels(attention, config.loss_chunk)

"""What a step has of a script besides the model: how passes leave no trace, hooks of steps, and what
a model may do that nanoray's own never do: skip layers, and return a loss with a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from nanoray.config import Config
from nanoray.errors import ConfigError
from nanoray.mesh.axis import Axis
from nanoray.mesh.mesh import Mesh
from nanoray.models.precision import LossScaler
from nanoray.parallel.compress import Compressor
from nanoray.parallel.flow import Flow, Loss
from nanoray.parallel.hooks import StepHook
from nanoray.parallel.mode import DataParallel

# (model, mode, mesh, the ranks whose gradients are averaged, compression if any) -> hooks
MakeHooks = Callable[[nn.Module, DataParallel, Mesh, Axis, Compressor | None], list[StepHook]]
# The arguments of a Flow, the ranks whose gradients are averaged, compression if any
MakeFlow = Callable[[nn.Module, int, Loss, LossScaler, torch.device, Axis, Compressor | None], Flow]


class Undisturbing(Protocol):
    """Makes a context that leaves a model, and what the script's code changes, as they were."""

    def __call__(
        self, model: nn.Module, *, keep_collected: bool = False
    ) -> AbstractContextManager[object]:
        """keep_collected: but for what the code puts into lists, dicts, sets and arrays."""


# The arguments of TorchDDP
MakeMode = Callable[[nn.Module, Axis, Config, Compressor | None], DataParallel]


class LayerCalls(Protocol):
    """Lets all ranks gather the layers of a model in one order, also those that a rank skips."""

    calls: list[int]
    """the model's own calls of layers in the newest forward"""

    checksum: int
    """of all calls since it was reset, which must be equal on all ranks"""

    def learn(self, calls_of_ranks: Sequence[Sequence[int]]) -> None:
        """Take the order of all ranks' calls in one forward."""


@dataclass(frozen=True)
class Script:
    """What a Plan needs from a script."""

    undisturbed: Undisturbing
    """for passes that no step needs"""

    hooks: MakeHooks
    """makes the hooks of a model that a mode has prepared (all ranks)"""

    ddp: MakeMode
    """makes torch's DDP for a model of which ranks may skip parameters"""

    layer_calls: Callable[[nn.Module, Sequence[nn.Module]], LayerCalls]
    """watches the calls of a model's layers that fsdp gathers"""

    weighted_flow: MakeFlow
    """takes the place of a Straight flow where a loss is a sum with a weight"""


def unfrozen(name: str) -> ConfigError:
    """Return the error for a parameter that was frozen when the run began, and no longer is."""
    return ConfigError(
        f"{name} had requires_grad = False when the run began, and has True now: no rank would "
        "share its gradient or save its state. Let it require a gradient when RuntimeEngine is "
        "made, and freeze it then until its step"
    )

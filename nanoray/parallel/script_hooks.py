"""What a step has of a script besides the model: hooks of steps, and what a model may do that
nanoray's own never do: skip layers, and return a loss with a weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from nanoray.config import Config
from nanoray.models.precision import LossScaler
from nanoray.parallel.axis import Axis
from nanoray.parallel.flow import Flow, Loss
from nanoray.parallel.hooks import StepHook
from nanoray.parallel.hybrid import Groups
from nanoray.parallel.mesh import Mesh
from nanoray.parallel.mode import DataParallel

# (model, mode, mesh, the ranks whose gradients are averaged) -> hooks
MakeHooks = Callable[[nn.Module, DataParallel, Mesh, Axis], list[StepHook]]
# The arguments of a Flow, the ranks whose gradients are averaged
MakeFlow = Callable[[nn.Module, int, Loss, LossScaler, torch.device, Axis], Flow]


@dataclass(frozen=True)
class ScriptHooks:
    """What a Plan needs from a script."""

    hooks: MakeHooks
    """makes the hooks of a model that a mode has prepared (all ranks)"""

    ddp: Callable[[nn.Module, Axis, Config], DataParallel]
    """makes torch's DDP for a model of which ranks may skip parameters"""

    fsdp: Callable[[nn.Module, Axis, Config, int, Groups | None], DataParallel]
    """makes fully_shard for a model of which ranks may skip parameters and layers"""

    weighted_flow: MakeFlow
    """takes the place of a Straight flow where a loss is a sum with a weight"""

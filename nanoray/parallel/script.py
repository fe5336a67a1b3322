"""What a step has of a script besides the model: its loss, and hooks that the Plan calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from nanoray.errors import ConfigError
from nanoray.mesh.axis import Axis
from nanoray.mesh.mesh import Mesh
from nanoray.parallel.compress import Compressor
from nanoray.parallel.hooks import StepHook
from nanoray.parallel.mode import DataParallel

# (model, mode, mesh, the ranks whose gradients are averaged, compression if any) -> hooks
MakeHooks = Callable[[nn.Module, DataParallel, Mesh, Axis, Compressor | None], list[StepHook]]


@dataclass(frozen=True)
class Script:
    """Code of a script whose side effects the Plan undoes, and the hooks of its steps."""

    code: Sequence[Any]
    """what a forward calls besides the model, such as a loss"""

    hooks: MakeHooks
    """makes the hooks of a model that a mode has prepared (all ranks)"""


def unfrozen(name: str) -> ConfigError:
    """Return the error for a parameter that was frozen when the run began, and no longer is."""
    return ConfigError(
        f"{name} had requires_grad = False when the run began, and has True now: no rank would "
        "share its gradient or save its state. Let it require a gradient when RuntimeEngine is "
        "made, and freeze it then until its step"
    )

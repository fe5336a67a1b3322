"""What must hold of a script's optimizer, checked before anything starts."""

from __future__ import annotations

import torch
from torch import nn

from nanoray.errors import ConfigError
from nanoray.state import PROBE, kept_alone


def require_plain_state(optimizer: torch.optim.Optimizer) -> None:
    """Raise ConfigError for an optimizer whose state a checkpoint cannot hold."""
    for key, value in (kept_alone(optimizer) or {}).items():
        if value.dim() and value.shape != PROBE:
            raise ConfigError(
                f"{type(optimizer).__name__} keeps {key} of shape {list(value.shape)} for a "
                "parameter of shape "
                f"{list(PROBE)}; checkpoints hold numbers and tensors shaped like the parameter: "
                "use another optimizer"
            )


def group_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return the number of the optimizer's group of each parameter, by name.

    Raises ConfigError when the optimizer has a parameter of another model, or misses one.
    """
    # By identity: parameters compare element by element.
    names = {id(p): name for name, p in model.named_parameters()}
    groups = {}
    for number, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if id(p) not in names:
                raise ConfigError(
                    f"the optimizer has a parameter of shape {tuple(p.shape)} that is not the "
                    "model's; make it from model.parameters(), after the last change of the model"
                )
            groups[names[id(p)]] = number
    missing = [
        name for name, p in model.named_parameters() if p.requires_grad and name not in groups
    ]
    if missing:
        raise ConfigError(
            f"the optimizer does not update {missing[0]}; give it all parameters, or set "
            "requires_grad to False"
        )
    return groups

"""What must hold of a script's optimizer before anything starts: it is one, it has all parameters, and a
mode that cuts parameters may cut it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from nanoray.checkpoint.state.optimizers import has_own_state_dict, members_of
from nanoray.errors import ConfigError
from nanoray.machine.compat import STEP_POST_HOOKS, STEP_PRE_HOOKS
from nanoray.script.several_optimizers import SeveralOptimizers
from nanoray.train.optim.modes import has_modes

# Those of torch that update each element from its own gradient and state alone
ELEMENTWISE = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.AdamW,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)


def optimizer_of(given: Any) -> Optimizer:
    """Return a script's optimizer; of several, one that steps them in their order.

    Raises ConfigError for what is no optimizer.
    """
    several = isinstance(given, (list, tuple))
    members = list(given) if several else [given]
    for member in members:
        if not isinstance(member, Optimizer):
            raise ConfigError(
                f"the optimizer is a {type(member).__name__}; give a torch.optim.Optimizer, or a "
                "list of them"
            )
    return SeveralOptimizers(members) if several else members[0]


def require_elementwise(optimizer: Optimizer, dp_mode: str, stated: bool) -> None:
    """Raise ConfigError for an optimizer that may treat a piece of a parameter unlike the whole.

    zero1, zero2 and fsdp give it flat pieces. `stated`: the script says that it does not.
    """
    for member in members_of(optimizer):
        problem = ""
        if type(member) not in ELEMENTWISE and not stated:
            problem = (
                "is none of torch's that update each element by itself; if it does, give "
                "RuntimeEngine(..., elementwise=True)"
            )
        elif has_own_state_dict(member):
            problem = "has a state_dict() of its own, or a hook on it, which cannot be cut"
        elif has_modes(member):
            problem = "changes the weights in its eval() and train()"
        if problem:
            raise ConfigError(
                f"dp_mode = {dp_mode} gives the optimizer flat pieces of the parameters, but "
                f"{_name(member)} {problem}; or use dp_mode ddp or ddp_by_hand"
            )


def require_no_hooks(optimizer: Optimizer, dp_mode: str) -> None:
    """Raise ConfigError for hooks of a step: copies that have none of them step the pieces."""
    for member in members_of(optimizer):
        hooked = any(getattr(member, hooks, None) for hooks in (STEP_PRE_HOOKS, STEP_POST_HOOKS))
        own_step = vars(member).get("step")  # a scheduler of torch has put one there, too
        if hooked or (own_step and not hasattr(own_step, "_wrapped_by_lr_sched")):
            raise ConfigError(
                f"dp_mode = {dp_mode} steps copies of {_name(member)} over pieces of the parameters, "
                "without the hooks of its step (register_step_pre_hook, register_step_post_hook) or a "
                "step of its own; use a callback, or dp_mode ddp or ddp_by_hand"
            )


def _name(optimizer: Optimizer) -> str:
    return type(optimizer).__name__


def require_all_parameters(model: nn.Module, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """Return the parameters of an optimizer by the names that they have in the model.

    Raises ConfigError when one is of another model, is missing, or belongs to two of several.
    """
    # By identity: parameters compare element by element.
    names = {id(p): name for name, p in model.named_parameters()}
    owners: dict[str, int] = {}  # the number of the optimizer: one may be listed twice
    updated = {}
    members = members_of(optimizer)
    for number, member in enumerate(members):
        for group in member.param_groups:
            for p in group["params"]:
                if id(p) not in names:
                    raise ConfigError(
                        f"the optimizer has a parameter of shape {tuple(p.shape)} that is not the "
                        "model's; make it from model.parameters(), after the last change of the "
                        "model"
                    )
                name = names[id(p)]
                owner = owners.setdefault(name, number)
                if owner != number:
                    raise ConfigError(
                        f"{name} belongs to both {_name(members[owner])} and {_name(member)}; give "
                        "each parameter to one optimizer"
                    )
                updated[name] = p
    missing = [
        name for name, p in model.named_parameters() if p.requires_grad and name not in updated
    ]
    if missing:
        raise ConfigError(
            f"the optimizer does not update {missing[0]}; give it all parameters, or set "
            "requires_grad to False"
        )
    return updated

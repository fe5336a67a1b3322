"""What a module keeps: tensors by name, and the values that its state_dict holds beside them.

    state_dict() ─┬─► tensors   parameters and persistent buffers
                  └─► values    extra states, as JSON; the tensors in them join the others

`Undisturbed` undoes what a forward changes in a module: a warm-up, an evaluation, a replay, or a
step that broke.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nanoray.errors import CheckpointError
from nanoray.machine.compat import transient_buffers
from nanoray.machine.tensor_memory import assign
from nanoray.models.values import Unsupported, put_together, take_apart

EXTRA = "_extra_state"  # torch's name for the extra state of a module


class Named(NamedTuple):
    """A buffer, and the module that has it."""

    module: nn.Module
    key: str
    tensor: Tensor


def _full_name(prefix: str, key: str) -> str:
    """Return the name that state_dict gives to an entry of the module called `prefix`."""
    return f"{prefix}.{key}" if prefix else key


def buffers_of(model: nn.Module, persistent: bool | None = None) -> dict[str, Named]:
    """Return the model's buffers by name, shared ones once.

    `persistent`: only those that state_dict contains, or only the others.
    """
    found: dict[str, Named] = {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for key, tensor in module._buffers.items():
            if tensor is None or id(tensor) in seen:
                continue
            is_persistent = key not in transient_buffers(module)
            if persistent is not None and persistent is not is_persistent:
                continue
            seen.add(id(tensor))
            found[_full_name(prefix, key)] = Named(module, key, tensor)
    return found


def buffer_names(model: nn.Module) -> set[str]:
    """Return all names of the persistent buffers; a shared module has several."""
    names = set()
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, tensor in module._buffers.items():
            if tensor is not None and key not in transient_buffers(module):
                names.add(_full_name(prefix, key))
    return names


def aliases_of(model: nn.Module) -> dict[str, str]:
    """Return each name of the model's state with the first name of the same tensor.

    Tied weights have several names, and are saved and sent once.
    """
    first: dict[int, str] = {}
    aliases = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            aliases[name] = first.setdefault(id(tensor), name)
    return aliases


def device_of(model: nn.Module) -> torch.device:
    """Return where the weights of a model lie."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def has_extra_state(module: nn.Module) -> bool:
    """Return whether a module defines get_extra_state."""
    return type(module).get_extra_state is not nn.Module.get_extra_state


def extra_states(model: nn.Module) -> dict[str, Any]:
    """Return the modules' extra states under the names that state_dict gives them."""
    states = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        if has_extra_state(module):
            states[_full_name(prefix, EXTRA)] = module.get_extra_state()
    return states


def set_extra_states(model: nn.Module, states: Mapping[str, Any]) -> None:
    """Give each module the extra state that `states` has for it."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        name = _full_name(prefix, EXTRA)
        if has_extra_state(module) and name in states:
            module.set_extra_state(states[name])


# Values that are no tensors, as JSON.


def split(entries: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of a state_dict, and its other values as JSON data.

    Tensors within values are returned with the others, under the value's name and their path in it.
    Raises CheckpointError for a value that cannot be kept exactly.
    """
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for name, value in entries.items():
        if isinstance(value, Tensor):
            tensors[name] = value
            continue
        try:
            values[name] = take_apart(value, name, tensors)
        except Unsupported as error:
            raise CheckpointError(
                f"{error}, which a checkpoint cannot keep exactly; return numbers, text, tensors, "
                "and lists, tuples and dicts of them"
            ) from None
    return tensors, values


def join(
    values: Mapping[str, Any], tensors: Mapping[str, Tensor], device: torch.device
) -> dict[str, Any]:
    """Return the values that `split` has encoded; tensors that were on a GPU go to `device`."""
    return {name: put_together(value, tensors, device) for name, value in values.items()}


class Undisturbed:
    """A model's buffers, extra states and modes, to be restored.

    It copies the buffers. As a context it restores them at the end.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules = [*model.modules()]
        self._modes = [module.training for module in self._modules]
        self._buffers: list[tuple[nn.Module, dict[str, Tensor | None], set[str]]] = []
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        for module in self._modules:
            buffers = dict(module._buffers.items())
            # A scripted module keeps its buffers in C++: they can change, but not be others.
            if not isinstance(module, torch.jit.ScriptModule):
                self._buffers.append((module, buffers, set(transient_buffers(module))))
            for tensor in buffers.values():
                if tensor is not None and id(tensor) not in self._copies:
                    self._copies[id(tensor)] = (tensor, tensor.detach().clone())

        # A module may return its own dict, so its values and tensors are copied.
        tensors, self._values = split(extra_states(model))
        self._tensors = {name: tensor.detach().clone() for name, tensor in tensors.items()}

    def __enter__(self) -> Undisturbed:
        return self

    def __exit__(self, *exc: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Bring the model back to where it was."""
        for module, buffers, transient in self._buffers:
            same = buffers.keys() == module._buffers.keys()
            if same and all(module._buffers[key] is buffers[key] for key in buffers):
                continue
            # In place: a module may keep a reference to these dicts.
            module._buffers.clear()
            module._buffers.update(buffers)
            transient_buffers(module).clear()
            transient_buffers(module).update(transient)
        for tensor, copy in self._copies.values():
            assign(tensor, copy)

        if self._values or self._tensors:
            states = join(self._values, self._tensors, device_of(self._model))
            # An extra state may be a tensor itself.
            for name, tensor in self._tensors.items():
                if name.rpartition(".")[2] == EXTRA and name not in states:
                    states[name] = tensor.clone()
            set_extra_states(self._model, states)
        for module, training in zip(self._modules, self._modes, strict=True):
            module.training = training

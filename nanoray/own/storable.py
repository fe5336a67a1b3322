"""What of a script's model and optimizer a checkpoint cannot keep, found before the first step."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.parameter import Buffer, is_lazy

from nanoray.checkpoint.tensorfile import DTYPE_NAMES
from nanoray.errors import CheckpointError
from nanoray.state.modules import EXTRA, buffer_names, buffers_of, has_extra_state, split

_PLAIN = (Tensor, nn.Parameter, Buffer)


def unstorable(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, sharded: bool = False
) -> list[str]:
    """Return a line for each thing that a checkpoint cannot keep: its name, its type, the remedy.

    For the whole model, before ranks cut it. The trial before step 1 calls this function, and once
    more after the trial's step, when the optimizer has state and the modules may have changed.
    `sharded`: of a mode in which ranks save parts of the model. Nothing is changed.
    """
    lines = []
    for name, tensor in _tensors_of(model):
        problem = _problem_of(tensor)
        if problem:
            lines.append(f"{name} {problem}")
    if lines:
        return lines  # what follows calls state_dict, which may fail on such tensors

    lines += _extra_state_lines(model)
    if not lines and sharded:
        lines += _translated_lines(model)
    if optimizer is not None:
        lines += _optimizer_lines(model, optimizer)
    return lines


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    for name, buffer in buffers_of(model, persistent=True).items():
        yield name, buffer.tensor
    for name, buffer in buffers_of(model, persistent=False).items():
        if buffer.tensor.is_meta:  # it cannot be moved to a device either
            yield name, buffer.tensor


def _problem_of(tensor: Tensor) -> str | None:
    """Return what of a tensor cannot be stored, and the remedy; None if nothing."""
    if is_lazy(tensor):
        return (
            "has no shape before the first forward; call the model on a batch before you make the "
            "optimizer"
        )
    if tensor.is_meta:
        return "is on the device meta and has no values; give it some, as with to_empty and an init"
    if hasattr(tensor, "to_local"):
        return "is a DTensor; give the model as it was before it was cut: dp_mode cuts it"
    if tensor.is_nested:
        return "is a nested tensor; pad it, or keep its parts as parameters of their own"
    if tensor.is_quantized:
        return (
            f"is a quantised tensor ({_short(tensor.dtype)}); keep its integers, int_repr(), and "
            "its scale as two buffers"
        )
    if tensor.layout != torch.strided:
        kind = str(tensor.layout).removeprefix("torch.")
        return f"has the layout {kind}; use a dense tensor (to_dense)"
    if type(tensor) not in _PLAIN:
        kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
        return f"is a {kind}, a subclass of Tensor; keep its parts as plain tensors"
    if tensor.dtype not in DTYPE_NAMES:
        known = ", ".join(_short(dtype) for dtype in DTYPE_NAMES)
        return f"has the dtype {_short(tensor.dtype)}; cast it to one of {known}"
    return None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _extra_state_lines(model: nn.Module) -> list[str]:
    """Return a line for each extra state, or other entry of state_dict, that cannot be kept."""
    lines = []
    for prefix, module in model.named_modules():
        if not has_extra_state(module):
            continue
        restores = type(module).set_extra_state is not nn.Module.set_extra_state
        if not restores:
            lines.append(
                f"module {prefix or type(module).__name__} has get_extra_state and no "
                "set_extra_state, so a resume could not restore it; define both"
            )
    if lines:
        return lines

    for name, value in model.state_dict().items():
        try:
            tensors, _ = split({name: value})
        except CheckpointError as error:
            owner = name.removesuffix(EXTRA).rstrip(".") or type(model).__name__
            lines.append(f"module {owner}: {error}")
            continue
        for inner, tensor in tensors.items():
            problem = _problem_of(tensor)
            if problem:
                lines.append(f"{inner} {problem}")
    return lines


def _translated_lines(model: nn.Module) -> list[str]:
    """Return a line if state_dict is not made of the modules' own tensors and extra states.

    A module may rename, leave out, compute or add entries. A rank that has a part of the model
    cannot do that.
    """
    own = {id(tensor): tensor for _, tensor in _tensors_of(model)}
    names: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for name in buffer_names(model):
        names[name] = buffers[name]

    entries = model.state_dict(keep_vars=True)
    entries = {name: value for name, value in entries.items() if not name.endswith(EXTRA)}
    remedy = "a module or a hook translates its state_dict; use dp_mode ddp or ddp_by_hand"
    missing = names.keys() - entries.keys()
    added = entries.keys() - names.keys()
    if missing:
        return [f"{min(missing)} is not in the model's state_dict: {remedy}"]
    if added:
        return [f"{min(added)} in the model's state_dict is none of its tensors: {remedy}"]
    for name, value in entries.items():
        same = id(value) in own or _share_memory(value, names[name])
        if not same:
            return [f"{name} in the model's state_dict is not the module's own tensor: {remedy}"]
    return []


def _share_memory(value: object, tensor: Tensor) -> bool:
    if not isinstance(value, Tensor) or value.shape != tensor.shape:
        return False
    return value.data_ptr() == tensor.data_ptr()


def _optimizer_lines(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return a line for each tensor of the optimizer's state that cannot be stored."""
    names = {id(p): name for name, p in model.named_parameters()}
    lines = []
    for p, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and _problem_of(value):
                where = f"{type(optimizer).__name__}'s {key} of {names.get(id(p), 'a tensor')}"
                lines.append(f"{where} {_problem_of(value)}")
    return lines

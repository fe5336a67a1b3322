"""What of a script's model would train wrongly, or be missing in a checkpoint, seen without a batch.

What a batch must show is found by the trial (trial.py), on each rank's device.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import Buffer, is_lazy

from nanoray.base.compat import BatchNormBase, storage_key
from nanoray.checkpoint.tensorfile import DTYPE_NAMES
from nanoray.config import Config
from nanoray.errors import CheckpointError, ConfigError
from nanoray.models.batch_norm import BatchNorm
from nanoray.own.part import describe, type_name
from nanoray.state.modules import EXTRA, buffer_names, buffers_of, has_extra_state, split

WRAPPERS = (nn.DataParallel, DistributedDataParallel, FSDPModule)


def require_module(model: Any) -> None:
    """Raise ConfigError unless `model` is a module that no other library has made parallel."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"the model is {describe(model)}; give an instance of a torch.nn.Module")
    for name, module in model.named_modules():
        if isinstance(module, WRAPPERS):
            where = f"its part {name}" if name else "the model"
            raise ConfigError(
                f"{where} is wrapped in {type(module).__name__}, but nanoray shares the batch "
                "itself; give the plain module, and choose dp_mode in the configuration"
            )


def require_sharable(model: nn.Module, config: Config, ranks: int) -> None:
    """Raise ConfigError for a model that `ranks` ranks cannot share as the configuration says."""
    _require_norms(model, config)
    if ranks == 1:
        return  # nothing is cut
    parameters = dict(model.named_parameters())
    _require_hooks(model, config.dp_mode)
    if config.dp_mode == "fsdp":
        _require_one_type({name: p for name, p in parameters.items() if p.requires_grad})
    if config.sharded:
        _require_own_memory(parameters, config.dp_mode)


def _require_norms(model: nn.Module, config: Config) -> None:
    """Raise ConfigError for batch norms that cannot share statistics as the configuration asks."""
    norms = {name: m for name, m in model.named_modules() if isinstance(m, BatchNormBase)}
    if config.sync_batchnorm and not norms:
        raise ConfigError(
            f"sync_batchnorm = True would be ignored: {type(model).__name__} has no batch norm of "
            "torch.nn; drop it"
        )
    for name, norm in norms.items():
        if config.sync_batchnorm and not isinstance(norm, BatchNorm):
            raise ConfigError(
                f"sync_batchnorm = True would be ignored by {name or 'the model'}, a "
                f"{type(norm).__name__} with a forward of its own; drop it, or exchange the "
                "statistics in that forward"
            )
        is_synchronised = isinstance(norm, BatchNorm) and norm.always_synchronised
        if config.compile == "cuda_graphs" and is_synchronised:
            raise ConfigError(
                f"compile = cuda_graphs with a SyncBatchNorm, {name or 'the model'}: its ranks "
                "exchange statistics within a layer, and a graph repeats what it has recorded; use "
                "compile true"
            )


def _require_hooks(model: nn.Module, mode: str) -> None:
    """Raise ConfigError for a scripted module where a mode needs hooks, which it does not take.

    fsdp hooks every layer, ddp_by_hand and zero the model, and torch's DDP none of them.
    """
    hooked = {"": model}
    if mode == "fsdp":
        hooked = dict(model.named_modules())
    for name, module in hooked.items():
        if mode != "ddp" and isinstance(module, torch.jit.ScriptModule):
            what = name or "the model"
            raise ConfigError(
                f"dp_mode = {mode} needs hooks, which a module of torch.jit.script does not take, "
                f"and {what} is one; give the module as it was before it was scripted, or use "
                "dp_mode ddp"
            )


def _require_one_type(trained: dict[str, nn.Parameter]) -> None:
    """Raise ConfigError for weights of two types, which fsdp would gather in one tensor."""
    first_name, first = next(iter(trained.items()))
    for name, p in trained.items():
        if p.dtype != first.dtype:
            raise ConfigError(
                f"dp_mode = fsdp gathers weights of one type together, but {name} is "
                f"{type_name(p.dtype)} and {first_name} {type_name(first.dtype)}; use dp_mode "
                "zero2, or give both one type"
            )


def _require_own_memory(parameters: dict[str, nn.Parameter], mode: str) -> None:
    """Raise ConfigError for two parameters over the same memory, which modes with shards move."""
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for name, p in parameters.items():
        if not p.numel():
            continue
        begin = int(p.storage_offset()) * p.element_size()
        # The last element that its strides reach.
        last = 0
        for size, stride in zip(p.shape, p.stride(), strict=True):
            last += (int(size) - 1) * int(stride)
        end = begin + (last + 1) * p.element_size()
        spans.setdefault(storage_key(p.untyped_storage()), []).append((begin, end, name))
    for of_storage in spans.values():
        of_storage.sort()
        for (_, end, name), (begin, _, other) in itertools.pairwise(of_storage):
            if begin < end:
                raise ConfigError(
                    f"{name} and {other} are two parameters over the same memory, which dp_mode "
                    f"{mode} would part; make them one parameter under two names, or use dp_mode "
                    "ddp"
                )


def lazy_parts(model: nn.Module) -> list[str]:
    """Return the names of the parameters and buffers that get a shape in the first forward.

    Those of modules that get their class then come last: a lazy norm may have no such tensor.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    names = [name for name, tensor in tensors if is_lazy(tensor)]
    for name, module in model.named_modules():
        if isinstance(module, LazyModuleMixin) and module.cls_to_become is not None:
            names.append(name)
    return names


# What of a script's model and optimizer a checkpoint cannot keep, found before the first step.


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

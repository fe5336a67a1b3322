"""What can be seen of a script's model, loss and data without a batch, before the ranks meet.

What a batch must show is found by the trial (trial.py), on each rank's device.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from nanoray.compat import BatchNormBase, storage_key
from nanoray.config import Config
from nanoray.errors import ConfigError, DataError
from nanoray.models.batch_norm import BatchNorm

WRAPPERS = (nn.DataParallel, DistributedDataParallel, FSDPModule)


def require_module(model: Any) -> None:
    """Raise ConfigError unless `model` is a module that no other library has made parallel."""
    if isinstance(model, type) and issubclass(model, nn.Module):
        name = model.__name__
        raise ConfigError(f"the model is the class {name}; give an instance of it: {name}(...)")
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"the model is {describe(model)}, and no torch.nn.Module; derive it from nn.Module, so "
            "that its parameters have names"
        )
    for name, module in model.named_modules():
        if isinstance(module, WRAPPERS):
            where = f"its part {name}" if name else "the model"
            raise ConfigError(
                f"{where} is wrapped in {type(module).__name__}, but nanoray shares the batch "
                "itself; give the plain module, and choose dp_mode in the configuration"
            )


def require_loss_fn(loss_fn: Any) -> None:
    """Raise ConfigError unless `loss_fn` is None or a function, which a class is not."""
    if loss_fn is None:
        return
    if isinstance(loss_fn, type) and issubclass(loss_fn, nn.Module):
        name = loss_fn.__name__
        raise ConfigError(f"loss_fn is the class {name}; give an instance of it: {name}()")
    if not callable(loss_fn):
        raise ConfigError(
            f"loss_fn is {describe(loss_fn)}, and cannot be called; give a function of the "
            "model's output and the targets, such as torch.nn.functional.mse_loss"
        )


def require_trainable(model: nn.Module, config: Config, ranks: int) -> None:
    """Raise ConfigError for parameters that no step could train, or dp_mode not cut on `ranks`."""
    parameters = dict(model.named_parameters())
    if not parameters:
        raise ConfigError(
            f"{type(model).__name__} has no parameters; keep its weights as nn.Parameter, and its "
            "layers in attributes, nn.ModuleList or nn.ModuleDict"
        )
    for name, p in [*parameters.items(), *model.named_buffers()]:
        if p.is_meta:
            raise ConfigError(
                f"{name} is on the meta device and has no values; fill the model before: "
                "model.to_empty(device='cpu'), then initialise it or load its weights"
            )
        if p.is_inference():
            raise ConfigError(
                f"{name} was made under torch.inference_mode, and autograd cannot use it; make the "
                "model outside of it"
            )

    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    if not trained:
        raise ConfigError(
            f"none of the {len(parameters)} parameters of {type(model).__name__} requires a "
            "gradient, so there is nothing to train; call requires_grad_(True) on some"
        )
    _require_norms(model, config)
    if ranks == 1:
        return  # nothing is cut
    _require_hooks(model, config.dp_mode)
    if config.dp_mode == "fsdp":
        _require_one_type(trained)
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


def require_dataset(data: Any, split: str, other: Any = None) -> None:
    """Raise DataError for data that have a length and an index, but no pairs as items.

    `other`: the second argument of `fit`, which may hold the targets by mistake.
    """
    pairs = "give pairs of inputs and targets: torch.utils.data.TensorDataset(inputs, targets)"
    if isinstance(data, (str, bytes, Path)):
        raise DataError(
            f"the {split} data are {describe(data)}, and not what a file of that name holds; read "
            "it, and give a dataset, or nanoray.ShardStream of files that are read in sequence"
        )
    if _is_array(data):
        hint = ""
        if _is_array(other) and len(other) == len(data):
            hint = ", and the second argument of fit is the validation data, not the targets"
        raise DataError(f"the {split} data are {describe(data)}{hint}; {pairs}")
    if isinstance(data, (tuple, list)) and data and all(_is_array(part) for part in data):
        # Two long arrays, and not a list of samples.
        raise DataError(f"the {split} data are a {type(data).__name__} of arrays; {pairs}")
    if isinstance(data, Mapping):
        raise DataError(f"the {split} data are {describe(data)}; {pairs}")
    if hasattr(data, "iloc"):
        raise DataError(
            f"the {split} data are a {type(data).__name__}, whose [] takes names of columns; "
            "give tensors of its columns as pairs: torch.utils.data.TensorDataset(inputs, targets)"
        )


def _is_array(value: Any) -> bool:
    return isinstance(value, (Tensor, np.ndarray)) and value.ndim > 0


def type_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without `torch.`."""
    return str(dtype).removeprefix("torch.")


def describe(value: Any) -> str:
    """Return what a value is, in a few words: its type, and the shape or the keys."""
    if isinstance(value, Tensor):
        return f"a {type_name(value.dtype)} tensor of shape {tuple(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"a {value.dtype} array of shape {value.shape}"
    if isinstance(value, Mapping):
        keys = [str(key) for key in value]
        shown = ", ".join(keys[:6])
        if len(keys) > 6:
            shown += ", ..."
        return f"a {type(value).__name__} of {shown or 'nothing'}"
    if isinstance(value, (tuple, list)):
        parts = [describe(part) for part in value[:3]]
        if len(value) > 3:
            parts.append("...")
        return f"a {type(value).__name__} of {', '.join(parts) or 'nothing'}"
    if isinstance(value, (str, bytes, Path)):
        return f"the text {str(value)[:40]!r}"
    if isinstance(value, (bool, int, float)):
        return f"the number {value!r}"
    if value is None:
        return "None"
    name = getattr(value, "__name__", "")
    if callable(value) and name:
        return f"the function {name}"
    return f"a {type(value).__name__}"

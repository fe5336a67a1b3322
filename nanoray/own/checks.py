"""What of a script's model would train wrongly, seen without a batch, before the ranks meet.

What a batch must show is found by the trial (trial.py), on each rank's device.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from nanoray.base.compat import BatchNormBase, storage_key
from nanoray.config import Config
from nanoray.errors import ConfigError
from nanoray.models.batch_norm import BatchNorm
from nanoray.own.part import describe, type_name

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

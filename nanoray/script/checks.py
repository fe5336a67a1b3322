"""What of a script's model would train wrongly, or be missing in a checkpoint, seen without a batch.

These mistakes raise nothing by themselves. What a few steps must show is found by `nanoray check SCRIPT.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import Buffer, is_lazy

from nanoray.checkpoint.tensorfile import DTYPE_NAMES
from nanoray.config import Config
from nanoray.errors import CheckpointError, ConfigError
from nanoray.machine.compat import BatchNormBase, storage_key
from nanoray.models.batch_norm import BatchNorm
from nanoray.models.modules import EXTRA, buffer_names, buffers_of, split
from nanoray.script.user_code import describe, type_name

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
    if ranks > 1 and config.sharded:
        _require_own_memory(dict(model.named_parameters()), config.dp_mode)


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


# What of a script's model a checkpoint cannot keep.


_PLAIN = (Tensor, nn.Parameter, Buffer)


def require_storable(model: nn.Module, sharded: bool) -> None:
    """Raise ConfigError for what a checkpoint could not hold, or not restore exactly.

    For the whole model, before ranks cut it. sharded: of a mode in which ranks save parts of it.
    """
    for name, tensor in _tensors_of(model):
        _require_plain(name, tensor)
    try:
        split(model.state_dict())
    except CheckpointError as error:
        raise ConfigError(f"{type(model).__name__}: {error}") from None
    if sharded:
        _require_own_names(model)


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    for name, buffer in buffers_of(model, persistent=True).items():
        yield name, buffer.tensor


def _require_plain(name: str, tensor: Tensor) -> None:
    """Raise ConfigError for a tensor that no checkpoint could hold."""
    if is_lazy(tensor):
        raise ConfigError(
            f"{name} has no shape before the first forward; call the model on a batch before you "
            "make the optimizer"
        )
    is_known = type(tensor) in _PLAIN and tensor.dtype in DTYPE_NAMES
    if not is_known or tensor.is_meta or tensor.layout != torch.strided:
        raise ConfigError(
            f"{name} is a {type(tensor).__name__} of {type_name(tensor.dtype)} on "
            f"{tensor.device.type}, {tensor.layout}, which a checkpoint cannot hold; "
            "give plain dense tensors with values, or keep its parts as such"
        )


def _require_own_names(model: nn.Module) -> None:
    """Raise ConfigError if the state_dict is not made of the modules' own tensors and extra states.

    A module may rename, leave out, compute or add entries. A rank that has a part of the model
    cannot do that.
    """
    own: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    own |= {name: buffers[name] for name in buffer_names(model)}
    entries = model.state_dict(keep_vars=True)
    entries = {name: value for name, value in entries.items() if not name.endswith(EXTRA)}
    for name in sorted(own.keys() | entries.keys()):
        value = entries.get(name)
        mine = own.get(name)
        if value is None or mine is None or value.data_ptr() != mine.data_ptr():
            raise ConfigError(
                f"{name} of the model's state_dict is not a tensor of that name in the model: a "
                "module or a hook translates its state_dict; use dp_mode ddp or ddp_by_hand"
            )

"""What nanoray needs of torch that is private, or newer than the oldest torch that it runs on.

This is the one file with such names (tests/unit/test_versions.py), so a new torch is tried here
first. pyproject.toml declares the range of versions, and `make test-versions` runs the tests at both
ends of it. nanoray/launch/ray_compat.py is the same for Ray. Without torch nothing here works, so
what the driver imports at its top does not import this file.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import (
    tree_leaves,
    tree_map,
    tree_map_only,
)

__all__ = [
    "CPU_ATTENTION",
    "CPU_ATTENTION_BACKWARD",
    "EFFICIENT_ATTENTION",
    "EFFICIENT_ATTENTION_BACKWARD",
    "FLASH_ATTENTION",
    "FLASH_ATTENTION_BACKWARD",
    "GPU_ATTENTIONS",
    "NO_BUFFER_SYNC",
    "OPTIMIZER_HOOKS",
    "STATE_HOOKS",
    "STEP_POST_HOOKS",
    "STEP_PRE_HOOKS",
    "BatchNormBase",
    "FakeTensorMode",
    "TorchDispatchMode",
    "abort_process_groups",
    "all_gather_single",
    "collectives_of",
    "compiled_for_one_size",
    "current_node",
    "foreach_add",
    "foreach_add_",
    "foreach_mul_",
    "gradient_hooks",
    "mark_as_stepped",
    "new_groups_meet_in",
    "operator_of",
    "process_groups",
    "restart_group_names",
    "scaled_mm",
    "storage_key",
    "sum_unused_parameters",
    "transient_buffers",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
]

# ---- newer than torch 2.11 ----

# torch 2.13 calls all_gather_into_tensor so, and warns of the old name.
_NEW = getattr(dist, "all_gather_single", None)
all_gather_single: Any = _NEW or getattr(dist, "all_gather_into_tensor")  # noqa: B009

# DDP's argument that keeps it from broadcasting buffers in each forward. torch 2.13 calls it so, and
# warns of the old name.
NO_BUFFER_SYNC: dict[str, Any] = {"broadcast_buffers": False}
if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters:
    NO_BUFFER_SYNC = {"forward_sync_buffers": False}


def sum_unused_parameters(model: nn.Module) -> None:
    """Let a model that fully_shard has cut sum all its trained parameters, also unused ones.

    A parameter without a gradient on this rank has zeros there, as torch 2.13 does it; older ones
    leave it out of this rank's sum, which would then be added to another sum of the other ranks.
    """
    setting = getattr(model, "set_reduce_scatter_unused_params", None)
    if setting is not None:
        setting(True)
        return

    from torch.distributed.fsdp import FSDPModule  # half a second, which only fsdp should take

    for module in model.modules():
        if isinstance(module, FSDPModule):
            group: Any = module._get_fsdp_state()._fsdp_param_group
            if group is not None:
                group.post_backward = partial(_fill_and_reduce, group, group.post_backward)


def _fill_and_reduce(group: Any, reduce: Callable[..., None], *unused: Any) -> None:
    """Give the unused parameters of a unit a gradient of zeros, then let torch reduce them all."""
    if group.reduce_grads:
        for each in group.fsdp_params:
            # One that no forward has gathered yet has no place for a gradient.
            if not hasattr(each, "_unsharded_param") or each.unsharded_accumulated_grad is not None:
                continue
            parameter = each.unsharded_param
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
    reduce(*unused)


# ---- private in every torch so far (2.11 to 2.14) ----

# The kernels of attention, forward and backward, by what they run on.
_aten = torch.ops.aten
CPU_ATTENTION = _aten._scaled_dot_product_flash_attention_for_cpu
CPU_ATTENTION_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward
FLASH_ATTENTION = _aten._scaled_dot_product_flash_attention  # of 16 bits
FLASH_ATTENTION_BACKWARD = _aten._scaled_dot_product_flash_attention_backward
EFFICIENT_ATTENTION = _aten._scaled_dot_product_efficient_attention  # of float32, too
EFFICIENT_ATTENTION_BACKWARD = _aten._scaled_dot_product_efficient_attention_backward
GPU_ATTENTIONS = (
    FLASH_ATTENTION,
    EFFICIENT_ATTENTION,
    _aten._scaled_dot_product_cudnn_attention,
)

# One kernel for a list of tensors, as torch's own optimizers use it.
foreach_add = torch._foreach_add
foreach_add_ = torch._foreach_add_
foreach_mul_ = torch._foreach_mul_

# Products of 8-bit floats. torch.nn.functional.scaled_mm is public, but its fastest path is this
# operator, with the scales named in another way.
scaled_mm = torch._scaled_mm


@contextmanager
def compiled_for_one_size() -> Iterator[None]:
    """Compile what is called meanwhile for the sizes that it is called with, each time.

    At the second size in a process torch compiles a function for any size.
    """
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        yield


def process_groups() -> list[Any]:
    """Return the process groups of this process, also those that are not yet complete."""
    from torch.distributed.distributed_c10d import _world

    return list(_world.pg_map)


def abort_process_groups() -> None:
    """Abort all process groups of this process."""
    from torch.distributed.distributed_c10d import _abort_process_group

    _abort_process_group()


@contextmanager
def new_groups_meet_in(store: dist.Store) -> Iterator[None]:
    """Let groups that form inside meet in `store`, and not in the default group's."""
    from torch.distributed.distributed_c10d import _get_default_group, _world

    default = _get_default_group()
    name, usual = _world.pg_map[default]
    _world.pg_map[default] = (name, store)
    try:
        yield
    finally:
        _world.pg_map[default] = (name, usual)


def restart_group_names() -> None:
    """Let torch count the names of its process groups from the beginning.

    The counter must be equal on all ranks that form groups with each other. It also counts groups
    that were never completed.
    """
    from torch.distributed.distributed_c10d import _world

    _world.group_count = 0


def collectives_of(group: Any) -> int:
    """Return how many collectives this process has started in a group.

    0 for a group that is being closed.
    """
    with suppress(RuntimeError):
        return int(group._get_sequence_number_for_group())
    return 0


def transient_buffers(module: nn.Module) -> set[str]:
    """Return the live set of names of a module's buffers that its state_dict leaves out.

    A scripted module has none.
    """
    return getattr(module, "_non_persistent_buffers_set", set())


def gradient_hooks(p: Tensor) -> list[dict[Any, Any]]:
    """Return the live dicts of the functions that are called with the gradient of a parameter."""
    return [hooks for hooks in (p._backward_hooks, p._post_accumulate_grad_hooks) if hooks]


# The hooks of one optimizer: around its step, and around what it saves and loads
STEP_PRE_HOOKS = "_optimizer_step_pre_hooks"
STEP_POST_HOOKS = "_optimizer_step_post_hooks"
STATE_HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
OPTIMIZER_HOOKS = (STEP_PRE_HOOKS, STEP_POST_HOOKS, *STATE_HOOKS)


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return a number of a storage, also of a fake one.

    It is that of no other storage while this one lives.
    """
    return storage._cdata


def operator_of(overload: Any) -> Any:
    """Return the operator, as of torch.ops.aten, of which this is one overload."""
    return overload._overloadpacket


def current_node() -> Any:
    """Return autograd's node that runs now in this thread, or None outside of a backward."""
    return torch._C._current_autograd_node()


def mark_as_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Keep a scheduler from its warning that the optimizer must be stepped before it."""
    optimizer._opt_called = True  # type: ignore[attr-defined]

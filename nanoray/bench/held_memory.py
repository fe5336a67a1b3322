"""The bytes that weights, gradients and optimizer state really take, to be compared with cli/forecast/memory.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, UntypedStorage, nn
from torch.optim import Optimizer

from nanoray.machine.tensor_memory import local_of
from nanoray.parallel.pieces import Shard


def held_bytes(
    model: nn.Module, gradients: Sequence[Tensor], optimizer: Optimizer
) -> dict[str, int]:
    """Return the bytes of the storages behind weights, gradients and optimizer state, by part.

    `gradients`: those that no parameter holds. Call it between backward and zero_grad.
    """
    params = list(model.parameters())
    of_params = [p.grad for p in params if p.grad is not None]
    return {
        "parameters": _bytes(params),
        "gradients": _bytes([*gradients, *of_params]),
        "optimizer": _bytes(_state_of(optimizer)),
    }


def held_by_mirror(model: nn.Module, shards: Sequence[Shard], optimizer: Optimizer) -> int:
    """Return the bytes of a mirror: gradients, optimizer state, and weights that are not the
    model's own.
    """
    own = {_storage(p).data_ptr() for p in model.parameters()}
    tensors = _state_of(optimizer)
    for shard in shards:
        if shard.param.grad is not None:
            tensors.append(shard.param.grad)
        if _storage(shard.param).data_ptr() not in own:
            tensors.append(shard.param)
    return _bytes(tensors)


def _state_of(optimizer: Optimizer) -> list[Tensor]:
    return [tensor for kept in optimizer.state.values() for tensor in kept.values()]


def _storage(tensor: Tensor) -> UntypedStorage:
    return local_of(tensor).untyped_storage()


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of all storages of the tensors; views of one count once."""
    sizes = {}
    for tensor in tensors:
        storage = _storage(tensor)
        sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())

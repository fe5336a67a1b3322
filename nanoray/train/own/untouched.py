"""Run a model, and leave it as it was: the trial before step 1 may change nothing of a run.

weights       compared with a copy afterwards: a forward may write them, also through `.data`
buffers       every one, also those that are not saved, replaced, added or set to None
attributes    what a forward binds anew on a module: counters, a hidden state, the mode
extra state   what get_extra_state returns
gradients     those of before, usually None
generators    torch's on CPU and GPU, numpy's, Python's
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nanoray.module_state import bytes_of
from nanoray.state import rng_state, set_rng_state

# Of nn.Module itself: parameters and buffers are restored by value
_INTERNAL = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


@contextmanager
def untouched(model: nn.Module, device: torch.device) -> Iterator[list[str]]:
    """Restore the model and the random generators at the end.

    Yields a list that is filled then: the names of the weights that were written inside. Costs a
    copy of the weights in host memory.
    """
    written: list[str] = []
    generators = rng_state(device)
    numpy_state = np.random.get_state()
    python_state = random.getstate()
    weights = {name: p.detach().to("cpu", copy=True) for name, p in model.named_parameters()}
    gradients = {name: p.grad for name, p in model.named_parameters()}
    modules = [_Kept(module) for module in _plain_modules(model)]
    for p in model.parameters():
        p.grad = None
    try:
        yield written
    finally:
        for name, p in model.named_parameters():
            p.grad = gradients.get(name)
            if name in weights and not _equal_bits(p.detach().cpu(), weights[name]):
                written.append(name)
                p.data.copy_(weights[name])
        for kept in modules:
            kept.restore()
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        set_rng_state(generators, device)


class _Kept:
    """One module's buffers, attributes and extra state."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._buffers = dict(module._buffers)
        self._not_saved = set(module._non_persistent_buffers_set)
        self._values = {}
        for name, buffer in module._buffers.items():
            if buffer is not None:
                self._values[name] = buffer.detach().clone()
        self._attributes = {k: v for k, v in vars(module).items() if k not in _INTERNAL}
        self._tensors = {}
        for name, value in self._attributes.items():
            if isinstance(value, Tensor):
                self._tensors[name] = value.detach().clone()
        self._extra: Any = None
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            self._extra = copy.deepcopy(module.get_extra_state())

    def restore(self) -> None:
        """Give the module back what it had."""
        module = self._module
        for name in set(vars(module)) - set(self._attributes) - set(_INTERNAL):
            del vars(module)[name]
        vars(module).update(self._attributes)
        for name, value in self._tensors.items():
            _write(self._attributes[name], value)

        # The same tensor objects, because other modules may share them.
        module._buffers.clear()
        module._buffers.update(self._buffers)
        module._non_persistent_buffers_set = self._not_saved
        for name, value in self._values.items():
            buffer = self._buffers[name]
            assert buffer is not None
            _write(buffer, value)
        if self._extra is not None:
            module.set_extra_state(self._extra)


def _plain_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose attributes are Python's. A scripted module has its own."""
    return [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]


def _write(tensor: Tensor, value: Tensor) -> None:
    """Write a value of before, where it has changed."""
    data = tensor.data
    if data.shape == value.shape:
        if not _equal_bits(data, value):
            data.copy_(value)
    else:
        tensor.data = value


def _equal_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same bits; NaN equals itself.

    Tensors without plain memory (sparse, quantised, of another library) pass for equal.
    """
    if a.shape != b.shape:
        return False
    if a.layout != torch.strided or a.is_quantized or type(a.data) is not Tensor:
        return True
    return torch.equal(bytes_of(a), bytes_of(b))

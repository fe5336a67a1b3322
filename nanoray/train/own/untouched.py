"""Run a model, and leave it as it was: the trial before step 1 may change nothing of a run.

    weights       compared with a copy afterwards: a forward may write them, also through `.data`
    buffers       every one, also those that are not saved, replaced, added or set to None
    attributes    what a forward binds anew on a module: counters, a hidden state, the mode
    extra state   what get_extra_state returns
    gradients     those of before, usually None
    generators    torch's on CPU and GPU, numpy's, Python's, and those that modules have

What a forward changes inside of a list, a dict or another object of its own stays changed.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nanoray.state import rng_state, set_rng_state

GENERATORS = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)
# Of nn.Module itself: parameters and buffers are restored by value
_INTERNAL = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


@dataclass
class Traces:
    """What a forward has left, found when it is undone."""

    written: list[str] = field(default_factory=list)  # names of weights
    drawn: list[str] = field(default_factory=list)  # names of generators that modules have


@contextmanager
def untouched(model: nn.Module, device: torch.device) -> Iterator[Traces]:
    """Restore the model and the random generators at the end.

    Yields traces that are filled then. Costs a copy of the weights in host memory.
    """
    traces = Traces()
    generators = rng_state(device)
    numpy_state = np.random.get_state()
    python_state = random.getstate()
    weights = {name: p.detach().to("cpu", copy=True) for name, p in model.named_parameters()}
    gradients = {name: p.grad for name, p in model.named_parameters()}
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    modules = [_Kept(name, module) for name, module in _plain_modules(model)]
    for p in model.parameters():
        p.grad = None
    try:
        yield traces
    finally:
        for name, p in model.named_parameters():
            p.grad = gradients.get(name)
            if name in weights and not equal_bits(p.detach().cpu(), weights[name]):
                traces.written.append(name)
                _write(p, weights[name].to(p.device))
        for kept in modules:
            traces.drawn += kept.restore()
        for buffer, value in buffers:
            _write(buffer, value)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        set_rng_state(generators, device)


class _Kept:
    """Which buffers one module has, its attributes and its extra state."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name = name
        self._module = module
        self._buffers = dict(module._buffers)
        self._not_saved = set(module._non_persistent_buffers_set)
        self._attributes = {k: v for k, v in vars(module).items() if k not in _INTERNAL}
        self._tensors = {}
        for name, value in self._attributes.items():
            if isinstance(value, Tensor):
                self._tensors[name] = value.detach().clone()
        self._generators = {}
        for name, value in self._attributes.items():
            if isinstance(value, GENERATORS):
                self._generators[name] = _state_of(value)
        self._extra: Any = None
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            self._extra = copy.deepcopy(module.get_extra_state())

    def restore(self) -> list[str]:
        """Give the module back what it had; return the names of the generators that were used."""
        module = self._module
        used = []
        for name, state in self._generators.items():
            generator = self._attributes[name]
            if not _same_state(_state_of(generator), state):
                used.append(f"{self._name}.{name}" if self._name else name)
                _set_state(generator, state)

        for name in set(vars(module)) - set(self._attributes) - set(_INTERNAL):
            del vars(module)[name]
        vars(module).update(self._attributes)
        for name, value in self._tensors.items():
            _write(self._attributes[name], value)

        # The same tensor objects, because other modules may share them.
        module._buffers.clear()
        module._buffers.update(self._buffers)
        module._non_persistent_buffers_set = self._not_saved
        if self._extra is not None:
            module.set_extra_state(self._extra)
        return used


def _plain_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules whose attributes are Python's. A scripted module has its own."""
    named = model.named_modules()
    return [(name, m) for name, m in named if not isinstance(m, torch.jit.ScriptModule)]


def _state_of(generator: Any) -> Any:
    """Return a copy of the state of a random generator."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return copy.deepcopy(generator.bit_generator.state)


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator | np.random.RandomState):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.bit_generator.state = state


def _same_state(state: Any, other: Any) -> bool:
    if isinstance(state, Tensor):
        return torch.equal(state, other)
    # As text, because numpy's states are dicts with arrays. Long arrays would be shown in part.
    with np.printoptions(threshold=1 << 20):
        return repr(state) == repr(other)


def _write(tensor: Tensor, value: Tensor) -> None:
    """Write a value of before, where it has changed."""
    data = tensor.data
    if data.shape == value.shape:
        if not equal_bits(data, value):
            data.copy_(value)
    else:
        tensor.data = value


def equal_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same bits; NaN equals itself.

    Tensors without plain memory (sparse, quantised, of another library) pass for equal.
    """
    if a.shape != b.shape:
        return False
    if a.layout != torch.strided or a.is_quantized or type(a.data) is not Tensor:
        return True
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)

"""Run a model, and leave it as it was: the trial before step 1 may change nothing of a run.

weights       compared with a copy afterwards: a forward may write them, also through `.data`
gradients     those of before, usually None; and which weights require one
attributes    what a forward binds anew on a module, of any type
generators    also those that modules have
buffers, extra states, modes, side effects: state.modules.Undisturbed, as around every other pass
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nanoray.data.seeding import generators_kept
from nanoray.mesh.memory import assign, equal_bits
from nanoray.state.modules import Undisturbed

GENERATORS = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)
# Of nn.Module itself; Undisturbed restores the buffers
_INTERNAL = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


@dataclass
class Traces:
    """What a forward has left, found when it is undone."""

    written: list[str] = field(default_factory=list)  # names of weights
    drawn: list[str] = field(default_factory=list)  # names of generators that modules have


@contextmanager
def untouched(model: nn.Module, device: torch.device, code: Iterable[Any] = ()) -> Iterator[Traces]:
    """Restore the model, the random generators and the side effects of `code` at the end.

    Yields traces that are filled then. Costs a copy of the weights in host memory.
    """
    traces = Traces()
    weights = {name: p.detach().to("cpu", copy=True) for name, p in model.named_parameters()}
    gradients = {name: p.grad for name, p in model.named_parameters()}
    trained = {name: p.requires_grad for name, p in model.named_parameters()}
    modules = [_Attributes(name, module) for name, module in _plain_modules(model)]
    for p in model.parameters():
        p.grad = None
    with generators_kept(device), Undisturbed(model, code):
        try:
            yield traces
        finally:
            for name, p in model.named_parameters():
                p.grad = gradients.get(name)
                p.requires_grad_(trained.get(name, p.requires_grad))
                if name in weights and not equal_bits(p.detach().cpu(), weights[name]):
                    traces.written.append(name)
                    assign(p.data, weights[name])
            for attributes in modules:
                traces.drawn += attributes.restore()


class _Attributes:
    """The attributes of one module, and the states of the generators among them."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name = name
        self._module = module
        self._before = {k: v for k, v in vars(module).items() if k not in _INTERNAL}
        self._generators = {}
        for key, value in self._before.items():
            if isinstance(value, GENERATORS):
                self._generators[key] = _state_of(value)

    def restore(self) -> list[str]:
        """Give the module back what it had; return the names of the generators that were used."""
        used = []
        for key, state in self._generators.items():
            generator = self._before[key]
            if not _same_state(_state_of(generator), state):
                used.append(f"{self._name}.{key}" if self._name else key)
                _set_state(generator, state)

        attributes = vars(self._module)
        for key in attributes.keys() - self._before.keys() - set(_INTERNAL):
            del attributes[key]
        attributes.update(self._before)
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

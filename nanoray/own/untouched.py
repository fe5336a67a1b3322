"""Run a model, and leave it as it was: the trial before step 1 may change nothing of a run.

weights       compared with a copy afterwards: a forward may write them, also through `.data`
gradients     those of before, usually None; and which weights require one
generators    also those that modules have
buffers, extra states, modes: Undisturbed (state/modules.py), as around every other pass
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

from nanoray.data.seeding import generators_kept
from nanoray.mesh.memory import assign, equal_bits
from nanoray.state.modules import Undisturbed

GENERATORS = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)


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
    weights = {name: p.detach().to("cpu", copy=True) for name, p in model.named_parameters()}
    gradients = {name: p.grad for name, p in model.named_parameters()}
    trained = {name: p.requires_grad for name, p in model.named_parameters()}
    generators = {name: (each, _state_of(each)) for name, each in _generators_of(model)}
    for p in model.parameters():
        p.grad = None
    with generators_kept(device), Undisturbed(model):
        try:
            yield traces
        finally:
            for name, p in model.named_parameters():
                p.grad = gradients.get(name)
                p.requires_grad_(trained.get(name, p.requires_grad))
                if name in weights and not equal_bits(p.detach().cpu(), weights[name]):
                    traces.written.append(name)
                    assign(p.data, weights[name])
            for name, (generator, state) in generators.items():
                if not _same_state(_state_of(generator), state):
                    traces.drawn.append(name)
                    _set_state(generator, state)


def _generators_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the random generators that modules have for themselves, by their names."""
    for prefix, module in model.named_modules():
        # A scripted module keeps its attributes in C++.
        if isinstance(module, torch.jit.ScriptModule):
            continue
        for key, value in vars(module).items():
            if isinstance(value, GENERATORS):
                yield f"{prefix}.{key}" if prefix else key, value


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

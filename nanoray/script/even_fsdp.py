"""torch's fully_shard for a script's model: each forward must call every layer, in one order.

torch gathers a layer where it is called, and sums only the parameters that have a gradient on this rank.
A rank that skips a layer, or a parameter, would gather another layer than its peers, or add its
gradients to those of others. So it ends before its first gather out of order, and before an update.
dp_mode ddp and zero have whole layers on every rank, and allow it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from nanoray.config import Config
from nanoray.errors import ConfigError
from nanoray.machine.compat import current_node, sum_unused_parameters
from nanoray.parallel.axis import Axis
from nanoray.parallel.fsdp import FSDP, units_of
from nanoray.parallel.hybrid import Groups

REMEDY = "use dp_mode zero2, in which each rank has whole layers"


class EvenFSDP(FSDP):
    """FSDP that refuses a model of which this rank skips a layer or a parameter."""

    def __init__(
        self,
        model: nn.Module,
        axis: Axis,
        config: Config,
        mirror: int = 0,
        groups: Groups | None = None,
    ) -> None:
        """Cut `model`, in place, as FSDP does. (all ranks of the axis, of which there are several)"""
        super().__init__(model, axis, config, mirror, groups)
        # Ranks that compute different gradients exchange sums of the same size, and find it below.
        sum_unused_parameters(model)
        self._computed: set[str] = set()  # parameters with a gradient of this rank, in this step
        self._trained = {name for name, p in model.named_parameters() if p.requires_grad}
        # A compiled layer has no hooks.
        if not config.compile:
            CallOrder(model, units_of(model))
        self._watch_gradients(model)

    def _watch_gradients(self, model: nn.Module) -> None:
        """Note which parameters get a gradient, by hooks on the whole ones that a forward uses.

        Those exist when torch's hook has gathered a layer for the first time.
        """
        names = {module: name for name, module in model.named_modules()}
        hooked: set[nn.Module] = set()
        computed = self._computed

        def watch(unit: nn.Module, *_: Any) -> None:
            if unit in hooked:
                return
            hooked.add(unit)
            for name, p in unit.named_parameters(names[unit]):
                if p.requires_grad and not isinstance(p, DTensor):
                    p.register_post_accumulate_grad_hook(partial(_note, computed, name))

        for unit in model.modules():
            if isinstance(unit, FSDPModule):
                unit.register_forward_pre_hook(watch)

    @contextmanager
    def backward(
        self, last: bool, chunk: int = 0, late: Collection[Tensor] | None = None
    ) -> Iterator[None]:
        with super().backward(last, chunk, late):
            yield
        missing = self._trained - self._computed
        if last and missing:
            raise ConfigError(
                f"dp_mode = fsdp: {min(missing)} got no gradient in this step, and the ranks could "
                f"not sum theirs; {REMEDY}"
            )

    def zero_grad(self) -> None:
        self._computed.clear()
        super().zero_grad()


def _note(computed: set[str], name: str, p: Tensor) -> None:
    if p.grad is not None:
        computed.add(name)


class CallOrder:
    """Refuses a forward that calls the layers of a model in another order than its first one.

    Forwards with gradients have one order, and those of evaluations another.
    """

    def __init__(self, model: nn.Module, units: Collection[nn.Module]) -> None:
        """Attach to a model whose `units` are gathered one by one."""
        self._names = {module: name for name, module in model.named_modules() if module in units}
        self._orders: dict[
            bool, list[str]
        ] = {}  # of the first forward, by whether it has gradients
        self._calls: list[str] = []  # of the present forward
        self._trains = False  # whether it has a backward

        # Before the hooks that gather weights, and before those that free them.
        model.register_forward_pre_hook(self._begin, prepend=True)
        for unit in units:
            unit.register_forward_pre_hook(self._call, prepend=True)
        model.register_forward_hook(self._end, prepend=True)

    def _begin(self, *_: Any) -> None:
        self._calls.clear()
        self._trains = torch.is_grad_enabled()

    def _call(self, unit: nn.Module, *_: Any) -> None:
        if current_node() is not None:
            return  # activation checkpointing computes it again, in a backward
        name = self._names[unit]
        self._calls.append(name)
        order = self._orders.get(self._trains, self._calls)
        if order[len(self._calls) - 1 : len(self._calls)] != [name]:
            raise _other_order(name)

    def _end(self, *_: Any) -> None:
        first = self._orders.setdefault(self._trains, [*self._calls])
        for name in self._names.values():
            if self._trains and name not in first:
                raise ConfigError(f"dp_mode = fsdp: the forward did not call {name}; {REMEDY}")
        if len(self._calls) < len(first):
            raise _other_order(first[len(self._calls)])


def _other_order(name: str) -> ConfigError:
    return ConfigError(
        f"dp_mode = fsdp gathers layers in the order in which the first batch calls them, and this "
        f"one has called or skipped {name} out of that order; {REMEDY}"
    )

"""fsdp gathers the layers of a model one by one, and all ranks must gather the same one.

A model may skip a layer: an expert that no sample of this rank chose, a branch, a layer that is left
out at random. The gathers of the ranks would then be those of different layers: they would mix the
weights of two layers, or wait for ever. So a rank that skips a layer calls it all the same, as the
identity, between the calls before and after it:

    order            embed  expert 0  expert 1  expert 2  head
    rank 0 calls     embed  expert 0     ·      expert 2  head       · as the identity: weights are
    rank 1 calls     embed     ·      expert 1     ·      head         gathered, and not used

The order is that of the warm-up's calls; a layer that no rank has called there comes after the one
defined before it. A forward that calls layers in a different order is refused. What the order cannot
show, such as a layer under no_grad on one rank only, changes a checksum of the calls, which the ranks
compare after each step, before the update.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nanoray.base.compat import current_node, tree_flatten, tree_unflatten
from nanoray.errors import ConfigError


class LayerOrder:
    """Lets a rank gather the layers of a model in the order of the other ranks."""

    def __init__(self, model: nn.Module, units: Sequence[nn.Module]) -> None:
        """Attach to a model whose `units` are sharded."""
        # In the order of their definition, in which layers within a layer follow it.
        wanted = set(units)
        self._units = [module for module in model.modules() if module in wanted]
        self._number = {unit: number for number, unit in enumerate(self._units)}
        self._inside: list[set[int]] = []  # by unit: the units within it
        for unit in self._units:
            within = {self._number[m] for m in unit.modules() if m in self._number}
            self._inside.append(within - {self._number[unit]})

        self._has_learned = False
        self._order = [*range(len(self._units))]
        self._next = 0  # the position in the order of the next call
        self._last = -1  # the unit that was called last
        self._joining = False  # a unit is called as the identity
        self._trains = False  # the present forward has a backward
        self.calls: list[int] = []  # the model's own calls of the newest forward
        self.checksum = 0  # of all calls since it was reset

        # Before the hooks that gather weights, and before those that free them.
        model.register_forward_pre_hook(self._begin, prepend=True)
        for unit in units:
            unit.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
            unit.register_forward_hook(self._after, prepend=True)
        model.register_forward_hook(self._end, prepend=True)

    def learn(self, calls_of_ranks: Sequence[Sequence[int]]) -> None:
        """Take the order of all ranks' calls in one forward.

        Raises ConfigError where they do not fit into one order.
        """
        self._has_learned = True
        longest = max(calls_of_ranks, key=len)
        if not all(_is_part(calls, longest) for calls in calls_of_ranks):
            if not all(_is_part(calls, self._order) for calls in calls_of_ranks):
                raise _other_order()
            return
        order = [*longest]
        for number in range(len(self._units)):
            if number not in order:
                place = order.index(number - 1) + 1 if number else 0
                order.insert(place, number)
        self._order = order

    # Hooks, in the order of a forward.

    def _begin(self, *_: Any) -> None:
        self._next = 0
        self._last = -1
        self.calls = []
        self._trains = torch.is_grad_enabled()  # else it is an evaluation

    def _before(self, unit: nn.Module, args: Any, kwargs: Any) -> Any:
        number = self._number[unit]
        if self._joining or _in_backward():
            return None
        self.calls.append(number)

        # The same layer once more, as in a loop over it, has no place of its own in the order.
        begin = self._next
        if number == self._last and number not in self._order[begin : begin + 1]:
            self._note(number, (args, kwargs))
            return None
        self._last = number
        # Not among the rest: a second pass through the order begins. The other ranks may have none.
        if number not in self._order[begin:]:
            if self._has_learned and self._trains:
                raise _other_order()
            args, kwargs = self._skip(len(self._order), (args, kwargs))
            self._next = 0
        place = self._order.index(number, self._next)
        had_gradient = _has_gradient((args, kwargs))
        args, kwargs = self._skip(place, (args, kwargs))
        # A layer that reads the data themselves: on this rank alone backward would pass its inputs.
        if self._trains and not had_gradient and _has_gradient((args, kwargs)):
            raise _skipped_before_data()
        self._next = place + 1
        self._note(number, (args, kwargs))
        return args, kwargs

    def _after(self, unit: nn.Module, args: Any, output: Any) -> Any:
        if self._joining or _in_backward():
            return None
        # What is left of the layers within this one.
        place = self._next
        inside = self._inside[self._number[unit]]
        while place < len(self._order) and self._order[place] in inside:
            place += 1
        return self._skip(place, output)

    def _end(self, model: nn.Module, args: Any, output: Any) -> Any:
        return self._skip(len(self._order), output)

    # Calls as the identity.

    def _skip(self, place: int, values: Any) -> Any:
        """Call the units before a place in the order as the identity on one tensor of `values`."""
        if self._next >= place:
            return values
        leaves, spec = tree_flatten(values)
        position = _position(leaves)
        self._joining = True
        try:
            while self._next < place:
                leaves[position] = self._join(leaves[position])
        finally:
            self._joining = False
        return tree_unflatten(leaves, spec)

    def _join(self, x: Any) -> Any:
        """Call the next unit, and those within it, as the identity on x."""
        number = self._order[self._next]
        unit = self._units[number]
        self._next += 1
        inside = self._inside[number]
        self._note(number, x)

        def identity(x: Any) -> Any:
            while self._next < len(self._order) and self._order[self._next] in inside:
                x = self._join(x)
            if not torch.is_grad_enabled():
                return x
            # Without a number that backward passes, this rank is not in line with the others.
            if not isinstance(x, Tensor) or not x.is_floating_point():
                self.checksum += 1
                return x
            # Backward gathers the layer's weights again, as on the other ranks.
            own = []
            for p in unit.parameters():
                if p.requires_grad and not isinstance(p, DTensor):
                    own.append(p)
            return _Identity.apply(x, *own)

        unit.forward = identity
        try:
            return unit(x)
        finally:
            del unit.forward

    def _note(self, number: int, inputs: Any) -> None:
        """Add a call to the checksum, with what decides when backward handles the layer."""
        if not self._trains:
            return
        call = f"{number} {torch.is_grad_enabled()} {_has_gradient(inputs)}"
        self.checksum = zlib.crc32(call.encode(), self.checksum)


def _other_order() -> ConfigError:
    return ConfigError(
        "dp_mode = fsdp gathers layers in the order in which the first batch calls them, and a "
        "later batch, or another rank, calls them in a different order; use dp_mode zero2"
    )


def _skipped_before_data() -> ConfigError:
    return ConfigError(
        "dp_mode = fsdp: this rank skips a layer before one that reads the data themselves, so that "
        "its backward would gather weights in a different order; use dp_mode zero2"
    )


def _has_gradient(values: Any) -> bool:
    """Whether a tensor in nested values requires a gradient."""
    leaves, _ = tree_flatten(values)
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)


def _in_backward() -> bool:
    """Whether a layer is computed again by activation checkpointing."""
    return current_node() is not None


class _Identity(torch.autograd.Function):
    """Returns its first input, and no gradient of the others."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *params: Tensor) -> Tensor:
        ctx.params = len(params)
        return x.clone()  # not a view: torch's hook on the output would be lost on one

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (*grads, *(None,) * ctx.params)


def _position(leaves: Sequence[Any]) -> int:
    """Return the position of a tensor that carries gradients; else of one that could; else 0."""
    for wanted in (True, False):
        for position, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
                continue
            if leaf.requires_grad or not wanted:
                return position
    return 0


def _is_part(calls: Sequence[int], whole: Sequence[int]) -> bool:
    """Whether `calls` is `whole` with some left out."""
    rest = iter(whole)
    return all(number in rest for number in calls)

"""Several optimizers of a script as one: each updates its own parameters, in their order."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor


class SeveralOptimizers(torch.optim.Optimizer):
    """A list of optimizers that are stepped one after the other, with one clip over all gradients.

    It has no values of its own: groups and state are those of its members.
    """

    def __init__(self, members: Sequence[torch.optim.Optimizer]) -> None:
        # Without torch's constructor, which would copy the groups.
        self.members = list(members)
        self.defaults: dict[str, Any] = {}
        self.state = States(self.members)  # type: ignore[assignment]
        self.found_inf: Tensor | None = None  # 1: leave out the update
        self.grad_scale: Tensor | None = None  # the factor that the gradients still have

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all members, in their order."""
        groups = []
        for member in self.members:
            groups += member.param_groups
        return groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step each member. `closure` is torch's signature; there must be none."""
        assert closure is None
        for member in self.members:
            member.found_inf = self.found_inf  # type: ignore[attr-defined]
            member.grad_scale = self.grad_scale  # type: ignore[attr-defined]
            member.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of all members."""
        for member in self.members:
            member.zero_grad(set_to_none)


class States(MutableMapping[Any, Any]):
    """The state of several optimizers by parameter, each in the dict of the optimizer that has it."""

    def __init__(self, members: Sequence[torch.optim.Optimizer]) -> None:
        self._members = members
        self._owners: dict[Tensor, torch.optim.Optimizer] = {}
        for member in members:
            for group in member.param_groups:
                for p in group["params"]:
                    self._owners[p] = member

    def __getitem__(self, p: Tensor) -> Any:
        return self._owners[p].state[p]

    def __setitem__(self, p: Tensor, state: Any) -> None:
        self._owners[p].state[p] = state

    def __delitem__(self, p: Tensor) -> None:
        del self._owners[p].state[p]

    def __contains__(self, p: object) -> bool:
        return p in self._owners and p in self._owners[p].state  # type: ignore[index]

    def get(self, p: Any, default: Any = None) -> Any:
        """Return the state of a parameter, without making one."""
        owner = self._owners.get(p)
        return default if owner is None else owner.state.get(p, default)

    def __iter__(self) -> Iterator[Any]:
        for member in self._members:
            yield from member.state

    def __len__(self) -> int:
        return sum(len(member.state) for member in self._members)

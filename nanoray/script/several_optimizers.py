"""Several optimizers of a script as one: each updates its own parameters, in their order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class SeveralOptimizers(torch.optim.Optimizer):
    """A list of optimizers that are stepped one after the other, with one clip over all gradients.

    Its groups are those of its members, and each of them keeps its own state.
    """

    def __init__(self, members: Sequence[torch.optim.Optimizer]) -> None:
        # Without torch's constructor, which would copy the groups.
        self.members = list(members)
        self.defaults: dict[str, Any] = {}
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

"""What the hooks of callbacks must leave as it is: the model, its gradients, the optimizer.

Callbacks run on rank 0 alone, so what one of them changes there makes the ranks differ. Hooks that
only evaluate the model may set its mode, which is put back. Everything else that they change stays,
and gets a warning. It is found by the counters of torch's tensors, without reading a value: a write
through `.data` has none, and shows where ranks compare their hashes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nanoray.base.compat import writes_to


class HookSnapshot(NamedTuple):
    """What the model and the optimizer were like at one moment."""

    modes: list[tuple[nn.Module, bool]]
    tensors: dict[str, tuple[int, int]]  # the identity and the counter of each
    settings: dict[str, Any]  # of the optimizer's groups, and which weights are trained


class HookGuard:
    """The model and the optimizer of a script, around the hooks of its callbacks."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer

    def snapshot(self) -> HookSnapshot:
        """Return what there is at this moment."""
        modes = [(module, module.training) for module in self._model.modules()]
        tensors: dict[str, tuple[int, int]] = {}
        settings: dict[str, Any] = {}
        for name, p in self._model.named_parameters():
            tensors[name] = _mark(p)
            if p.grad is not None:
                tensors[f"the gradient of {name}"] = _mark(p.grad)
            settings[f"requires_grad of {name}"] = p.requires_grad
        for name, buffer in self._model.named_buffers():
            tensors[name] = _mark(buffer)
        for number, group in enumerate(self._optimizer.param_groups):
            for key, value in group.items():
                if key != "params":
                    name = f"{key} of the optimizer's group {number}"
                    settings[name] = _mark(value) if isinstance(value, Tensor) else repr(value)
        return HookSnapshot(modes, tensors, settings)

    def changes_since(self, before: HookSnapshot) -> str | None:
        """Put the modes back; return what else a hook has changed, or None for nothing."""
        for module, mode in before.modes:
            if module.training != mode:
                module.training = mode
        after = self.snapshot()
        names = _differences(before.tensors, after.tensors)
        names += _differences(before.settings, after.settings)
        if len(names) > 1:
            return f"{names[0]} and {len(names) - 1} more"
        return names[0] if names else None


def _mark(tensor: Tensor) -> tuple[int, int]:
    return id(tensor), writes_to(tensor)


def _differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the names whose values differ, or that one of the two has not."""
    names = {**before, **after}
    return [name for name in names if before.get(name) != after.get(name)]

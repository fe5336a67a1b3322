"""Watch one forward of a model module by module: shapes, FLOPs, memory.

On fake tensors nothing is computed and no memory is taken; on real ones the same figures are
measured.

    kept       each tensor that autograd saves counts for the module that runs, once per storage, and not if it
               is a weight or a buffer
    FLOPs      matrix products, convolutions and attention (torch.utils.flop_counter), two per multiplication and
               addition; causal attention counts as if it were not
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from nanoray.machine.compat import (
    CPU_ATTENTION,
    FakeTensorMode,
    TorchDispatchMode,
    operator_of,
    storage_key,
    tree_leaves,
    tree_map_only,
)
from nanoray.models.precision import autocast

Loss = Callable[[nn.Module, Any, Any], Tensor]  # (model, inputs, targets) -> mean loss
Shape = tuple[int, ...]


@dataclass
class Seen:
    """The records of one module. FLOPs and bytes exclude those of the modules inside of it."""

    calls: int = 0
    # Shape and dtype of each tensor that its first call has returned
    outputs: list[tuple[Shape, str]] = field(default_factory=list)
    kept: int = 0  # bytes that wait for backward
    flops: int = 0


class WatchedForward:
    """A forward of `model`; `seen` has the records of each module by its name."""

    def __init__(self, model: nn.Module, state: dict[str, Tensor] | None = None) -> None:
        """Prepare the records. `state`: tensors by name that replace parameters and buffers."""
        self._model = model
        named = [*model.named_parameters(), *model.named_buffers()]
        state = dict(named) if state is None else state
        self.seen = {name: Seen() for name, _ in model.named_modules()}
        self._weights = {storage_key(tensor.untyped_storage()) for tensor in state.values()}
        # By storage; the tensors stay alive, so that no number is used twice
        self._kept: dict[int, Tensor] = {}
        self._inside: list[str] = []  # modules that run, the innermost last

    @property
    def kept(self) -> int:
        """Bytes that all modules keep for backward."""
        return sum(seen.kept for seen in self.seen.values())

    def run(self, call: Callable[[], Tensor]) -> Tensor:
        """Watch `call`, which returns a loss."""
        hooks = []
        for name, module in self._model.named_modules():
            hooks.append(module.register_forward_pre_hook(partial(self._enter, name)))
            hooks.append(module.register_forward_hook(partial(self._leave, name)))
        try:
            saved = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor)
            with saved, _Flops(self._count):
                loss = call()
        finally:
            for hook in hooks:
                hook.remove()
        self._kept.clear()
        return loss

    def _enter(self, name: str, module: nn.Module, args: Any) -> None:
        self.seen[name].calls += 1
        self._inside.append(name)

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        seen = self.seen[name]
        if seen.calls == 1:
            seen.outputs = [_describe(t) for t in tree_leaves(output) if isinstance(t, Tensor)]
        self._inside.pop()

    @property
    def _now(self) -> str:
        return self._inside[-1] if self._inside else ""

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        if key not in self._kept and key not in self._weights:
            self._kept[key] = tensor
            self.seen[self._now].kept += storage.nbytes()
        return tensor

    def _count(self, flops: int) -> None:
        self.seen[self._now].flops += flops


def probe_on_fakes(model: nn.Module, loss: Loss, x: Any, y: Any, precision: str) -> WatchedForward:
    """Return what was watched of a micro batch as on a CPU. The model may be on the meta device.

    Nothing is computed: fake tensors have shapes and types only. Raises what the model raises on
    them.
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        named = [*model.named_parameters(), *model.named_buffers()]
        state: dict[str, Tensor] = {}
        for name, tensor in named:
            if tensor.is_meta:
                fake = torch.empty_like(tensor, device="cpu")
                state[name] = fake.requires_grad_(tensor.requires_grad)
            else:
                state[name] = mode.from_tensor(tensor)
        inputs = tree_map_only(Tensor, mode.from_tensor, (x, y))
        watched = WatchedForward(model, state)

        def run() -> None:
            with autocast("cpu", precision):
                watched.run(lambda: loss(model, *inputs))

        of_model = {f"model.{name}": tensor for name, tensor in state.items()}
        torch.func.functional_call(_Around(model), of_model, (run,))
    return watched


class _Around(nn.Module):
    """A module around a model. functional_call runs a function in it with replaced parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, run: Callable[[], None]) -> None:
        run()


def _describe(tensor: Tensor) -> tuple[Shape, str]:
    """Return shape and dtype."""
    return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")


class _Flops(TorchDispatchMode):
    """Passes to `count` the FLOPs of each operation for which torch has a formula."""

    def __init__(self, count: Callable[[int], None]) -> None:
        super().__init__()
        self._count = count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        operator = operator_of(func)
        if operator is CPU_ATTENTION:
            self._count(sdpa_flop_count(*(t.shape for t in args[:3])))
        elif operator in flop_registry:
            self._count(flop_registry[operator](*args, **(kwargs or {}), out_val=out))
        return out

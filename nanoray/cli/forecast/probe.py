"""Watch one forward and backward of a model module by module: shapes, connections, FLOPs, memory.

On fake tensors nothing is computed and no memory is taken; on real ones the same figures are
measured.

    forward    each module's call: what it reads and returns; each tensor that autograd saves counts for the module that
               runs, once per storage, and not if it is a weight or a buffer
    reads      a call's inputs, followed back through autograd's graph to the results of other modules
    FLOPs      matrix products, convolutions and attention (torch.utils.flop_counter), two per multiplication and
               addition; causal attention counts as if it were not. In backward an operation belongs to the module whose
               forward made its node
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from nanoray.machine.compat import (
    CPU_ATTENTION,
    CPU_ATTENTION_BACKWARD,
    FakeTensorMode,
    TorchDispatchMode,
    autograd_sequence,
    current_node,
    node_sequence,
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
    inputs: list[tuple[Shape, str]] = field(default_factory=list)  # shape and dtype of each tensor
    outputs: list[tuple[Shape, str]] = field(default_factory=list)
    # Modules; "inputs" of the model; names of parameters
    reads: list[str] = field(default_factory=list)
    kept: int = 0  # bytes that wait for backward
    forward_flops: int = 0
    backward_flops: int = 0


class WatchedPass:
    """A forward and a backward of `model`; `seen` has the records of each module by its name."""

    def __init__(self, model: nn.Module, state: dict[str, Tensor] | None = None) -> None:
        """Prepare the records. `state`: tensors by name that replace parameters and buffers."""
        self._model = model
        named = [*model.named_parameters(), *model.named_buffers()]
        state = dict(named) if state is None else state
        self.seen = {name: Seen() for name, _ in model.named_modules()}
        self.loss_reads: list[str] = []
        self._names = {id(tensor): name for name, tensor in state.items()}
        self._weights = {storage_key(tensor.untyped_storage()) for tensor in state.values()}
        # By storage; the tensors stay alive, so that no number is used twice
        self._kept: dict[int, Tensor] = {}
        self._inside: list[str] = []  # modules that run, the innermost last
        # Autograd's nodes, and ids of tensors without one: who returned them
        self._made: dict[Any, list[str]] = {}
        self._given: list[Tensor] = []  # inputs and targets
        self._alive: list[Tensor] = []
        # Autograd's sequence number at each change of the innermost module
        self._turns: list[tuple[int, str]] = []

    @property
    def kept(self) -> int:
        """Bytes that all modules keep for backward."""
        return sum(seen.kept for seen in self.seen.values())

    def forward(self, call: Callable[[], Tensor], given: Iterable[Any] = ()) -> Tensor:
        """Watch `call`, which returns a loss. `given`: the inputs and targets of the model."""
        self._given = [leaf for leaf in tree_leaves([*given]) if isinstance(leaf, Tensor)]
        hooks = []
        self._turn()
        for name, module in self._model.named_modules():
            hooks.append(
                module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True)
            )
            hooks.append(module.register_forward_hook(partial(self._leave, name)))
        try:
            saved = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor)
            with saved, _Flops(self._count_forward):
                loss = call()
        finally:
            for hook in hooks:
                hook.remove()
        self.loss_reads = self._sources("loss", loss)
        return loss

    def backward(self, loss: Tensor) -> None:
        """Watch the backward of a loss that `forward` returned."""
        with _Flops(self._count_backward):
            loss.backward()
        self._made.clear()
        self._alive.clear()
        self._kept.clear()

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        seen = self.seen[name]
        seen.calls += 1
        if seen.calls == 1:
            seen.inputs = [_describe(t) for t in tensors]
        for tensor in tensors:
            for source in self._sources(name, tensor):
                if source not in seen.reads:
                    seen.reads.append(source)
        self._inside.append(name)
        self._turn()

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        tensors = [t for t in tree_leaves(output) if isinstance(t, Tensor)]
        if self.seen[name].calls == 1:
            self.seen[name].outputs = [_describe(t) for t in tensors]
        for tensor in tensors:
            self._made.setdefault(tensor.grad_fn or id(tensor), []).append(name)
            # An id is unique only while its tensor lives.
            if tensor.grad_fn is None:
                self._alive.append(tensor)
        self._inside.pop()
        self._turn()

    def _turn(self) -> None:
        self._turns.append((autograd_sequence(), self._now))

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

    def _sources(self, name: str, tensor: Tensor) -> list[str]:
        """Return the sources of a tensor that `name` reads: outermost modules, weights or inputs."""
        if any(tensor is given for given in self._given):
            return ["inputs"]

        # Walk autograd's graph back until each path meets a module's result or a weight.
        todo: list[Any] = [tensor.grad_fn or id(tensor)]
        done: set[Any] = set()
        sources: list[str] = []
        while todo:
            node = todo.pop()
            if node is None or node in done:
                continue
            done.add(node)
            makers = [maker for maker in self._made.get(node, ()) if not _contains(maker, name)]
            if makers:
                sources.append(min(reversed(makers), key=lambda maker: maker.count(".")))
            elif not isinstance(node, int):
                if hasattr(node, "variable"):
                    sources.append(self._names.get(id(node.variable), "?"))
                todo += [following for following, _ in node.next_functions]
        return list(dict.fromkeys(reversed(sources)))

    def _count_forward(self, flops: int) -> None:
        self.seen[self._now].forward_flops += flops

    def _count_backward(self, flops: int) -> None:
        # The module that was innermost when forward made the node that runs now.
        node = current_node()
        name = ""
        if node is not None:
            place = bisect(self._turns, node_sequence(node), key=lambda turn: turn[0]) - 1
            name = self._turns[max(0, place)][1]
        self.seen[name].backward_flops += flops


def _contains(outer: str, inner: str) -> bool:
    """Return whether module `outer` is `inner` or contains it; the model itself contains all."""
    return not outer or f"{inner}.".startswith(f"{outer}.")


def probe_on_fakes(
    model: nn.Module, loss: Loss, x: Any, y: Any, precision: str, backward: bool = False
) -> WatchedPass:
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
        watched = WatchedPass(model, state)

        def run() -> None:
            with autocast("cpu", precision):
                fake_loss = watched.forward(lambda: loss(model, *inputs), inputs)
            # Inside of the call, because activation checkpointing repeats a forward with the fakes.
            if backward:
                watched.backward(fake_loss)

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
        elif operator is CPU_ATTENTION_BACKWARD:
            self._count(sdpa_backward_flop_count(*(t.shape for t in args[:4])))
        elif operator in flop_registry:
            self._count(flop_registry[operator](*args, **(kwargs or {}), out_val=out))
        return out

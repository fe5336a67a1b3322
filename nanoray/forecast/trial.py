"""One forward and backward of a model, watched module by module: shapes, connections, FLOPs, what
is kept for backward.

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
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from nanoray.models.precision import autocast

Loss = Callable[[nn.Module, Any, Any], Tensor]  # (model, inputs, targets) -> mean loss
Shape = tuple[int, ...]
_aten = torch.ops.aten


@dataclass
class Seen:
    """What a trial has seen of one module. FLOPs and bytes are its own, without those of the
    modules inside of it.
    """

    calls: int = 0
    inputs: list[tuple[Shape, str]] = field(default_factory=list)  # shape and dtype of each tensor
    outputs: list[tuple[Shape, str]] = field(default_factory=list)
    # Modules; "inputs" of the model; names of parameters
    reads: list[str] = field(default_factory=list)
    kept: int = 0  # bytes that wait for backward
    forward_flops: int = 0
    backward_flops: int = 0


class Trial:
    """A forward and a backward of `model`; `seen` tells of each module by its name."""

    def __init__(self, model: nn.Module, state: dict[str, Tensor] | None = None) -> None:
        """Get ready to watch. `state`: tensors by name that stand in for the model's parameters and
        buffers.
        """
        self._model = model
        named = [*model.named_parameters(), *model.named_buffers()]
        state = dict(named) if state is None else state
        self.seen = {name: Seen() for name, _ in model.named_modules()}
        self.loss_reads: list[str] = []
        self.unused: list[str] = []  # modules whose results the loss does not depend on
        self._names = {id(tensor): name for name, tensor in state.items()}
        self._weights = {tensor.untyped_storage()._cdata for tensor in state.values()}
        # By storage; the tensors stay alive, so that no number is used twice
        self._kept: dict[int, Tensor] = {}
        self._inside: list[str] = []  # modules that run, the innermost last
        # Autograd's nodes, and ids of tensors without one: who returned them
        self._made: dict[Any, list[str]] = {}
        self._given: list[Tensor] = []
        self._alive: list[Tensor] = []
        # Autograd's sequence number at each change of the innermost module
        self._turns: list[tuple[int, str]] = []

    @property
    def kept(self) -> int:
        """Bytes of all that waits for backward."""
        return sum(seen.kept for seen in self.seen.values())

    def forward(self, call: Callable[[], Tensor], given: Iterable[Any] = ()) -> Tensor:
        """Watch `call`, which returns a loss; `given` are the inputs and targets that it passes to
        the model.
        """
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
        self._find_unused(loss)
        return loss

    def backward(self, loss: Tensor) -> None:
        """Watch the backward of a loss that `forward` returned."""
        with _Flops(self._count_backward):
            loss.backward()
        self._made.clear()
        self._alive.clear()
        self._kept.clear()

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        seen, tensors = (
            self.seen[name],
            [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)],
        )
        seen.calls += 1
        if seen.calls == 1:
            seen.inputs = [_told(t) for t in tensors]
        for tensor in tensors:
            seen.reads += [
                source for source in self._sources(name, tensor) if source not in seen.reads
            ]
        self._inside.append(name)
        self._turn()

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        tensors = [t for t in tree_leaves(output) if isinstance(t, Tensor)]
        if self.seen[name].calls == 1:
            self.seen[name].outputs = [_told(t) for t in tensors]
        for tensor in tensors:
            self._made.setdefault(tensor.grad_fn or id(tensor), []).append(name)
        self._alive += [tensor for tensor in tensors if tensor.grad_fn is None]
        self._inside.pop()
        self._turn()

    def _turn(self) -> None:
        self._turns.append((torch._C._autograd._get_sequence_nr(), self._now))

    @property
    def _now(self) -> str:
        return self._inside[-1] if self._inside else ""

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._kept and storage._cdata not in self._weights:
            self._kept[storage._cdata] = tensor
            self.seen[self._now].kept += storage.nbytes()
        return tensor

    def _sources(self, name: str, tensor: Tensor) -> list[str]:
        """Return what a tensor, which `name` reads, was made of: the outermost modules, weights, or
        inputs.
        """
        todo: list[Any] = [tensor.grad_fn or id(tensor)]
        found, done = list[str](), set[Any]()
        if any(tensor is given for given in self._given):
            return ["inputs"]
        while todo:
            node = todo.pop()
            if node is None or node in done:
                continue
            done.add(node)
            makers = [
                m for m in self._made.get(node, ()) if m and not f"{name}.".startswith(f"{m}.")
            ]
            if makers:
                found.append(min(reversed(makers), key=lambda maker: maker.count(".")))
            elif not isinstance(node, int):
                if hasattr(node, "variable"):
                    found.append(self._names.get(id(node.variable), "?"))
                todo += [following for following, _ in node.next_functions]
        return list(dict.fromkeys(reversed(found)))

    def _find_unused(self, loss: Tensor) -> None:
        """Note the modules with results in autograd's graph of which none leads to the loss."""
        todo, used = [loss.grad_fn], set[Any]()
        while todo:
            node = todo.pop()
            if node is not None and node not in used:
                used.add(node)
                todo += [following for following, _ in node.next_functions]
        made, led = set[str](), set[str]()
        for node, names in self._made.items():
            if not isinstance(node, int):
                made |= {*names}
                led |= {*names} if node in used else set()
        self.unused = [name for name in self.seen if name in made - led]

    def _count_forward(self, flops: int) -> None:
        self.seen[self._now].forward_flops += flops

    def _count_backward(self, flops: int) -> None:
        node, name = torch._C._current_autograd_node(), ""
        if node is not None:
            at = bisect(self._turns, node._sequence_nr(), key=lambda turn: turn[0]) - 1
            name = self._turns[max(0, at)][1]
        self.seen[name].backward_flops += flops


def trial_on_fakes(
    model: nn.Module, loss: Loss, x: Any, y: Any, precision: str, backward: bool = False
) -> Trial:
    """Return the trial of a micro batch, as it would be on a CPU. The model may be on the meta
    device.

    Nothing is computed: fake tensors have shapes and types only. Raises what the model raises on
    them.
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        named = [*model.named_parameters(), *model.named_buffers()]
        state: dict[str, Tensor] = {
            name: torch.empty_like(t, device="cpu").requires_grad_(t.requires_grad)
            if t.is_meta
            else mode.from_tensor(t)
            for name, t in named
        }
        inputs = tree_map_only(Tensor, mode.from_tensor, (x, y))
        trial = Trial(model, state)

        def run() -> None:
            with autocast("cpu", precision):
                made = trial.forward(lambda: loss(model, *inputs), inputs)
            if backward:  # here, as activation checkpointing computes again with the same stand-ins
                trial.backward(made)

        of_model = {f"model.{name}": tensor for name, tensor in state.items()}
        torch.func.functional_call(_Around(model), of_model, (run,))
    return trial


class _Around(nn.Module):
    """A module around a model, whose call runs something while other tensors are in the place of
    its parameters.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, run: Callable[[], None]) -> None:
        run()


def _told(tensor: Tensor) -> tuple[Shape, str]:
    return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")


class _Flops(TorchDispatchMode):
    """Tells `count` the FLOPs of each operation that torch knows them of."""

    def __init__(self, count: Callable[[int], None]) -> None:
        super().__init__()
        self._count = count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        if packet is _aten._scaled_dot_product_flash_attention_for_cpu:
            self._count(sdpa_flop_count(*(t.shape for t in args[:3])))
        elif packet is _aten._scaled_dot_product_flash_attention_for_cpu_backward:
            self._count(sdpa_backward_flop_count(*(t.shape for t in args[:4])))
        elif packet in flop_registry:
            self._count(flop_registry[packet](*args, **(kwargs or {}), out_val=out))
        return out

"""torch's DDP for a model that may skip parameters, on some ranks only.

torch's DDP sends a bucket when all of its gradients have come, so a parameter that this rank skips
would keep the bucket here, and the other ranks waiting for it:

    backward      w3   w2   ·   w0        ·: this rank has not used w1
    touch                   w1            an undefined gradient, after which the bucket leaves
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from nanoray.config import Config
from nanoray.errors import ConfigError
from nanoray.machine.compat import gradient_hooks
from nanoray.parallel.axis import Axis
from nanoray.parallel.ddp import TorchDDP
from nanoray.parallel.mode import Hook


class SkippingDDP(TorchDDP):
    """TorchDDP that waits for no gradient which a rank does not compute."""

    def __init__(self, model: nn.Module, axis: Axis, config: Config) -> None:
        """Wrap `model` for this axis, as TorchDDP does. (all its ranks, of which there are several)"""
        self._names = {p: name for name, p in model.named_parameters()}
        self._arrived: set[nn.Parameter] = set()  # parameters that the present backward has reached
        self._computed: set[str] = set()  # parameters with a gradient of this rank, in this step
        self._watch([p for p in model.parameters() if p.requires_grad])
        super().__init__(model, axis, config)

    def _wrap(self, hook: Hook | None) -> nn.Module:
        wrapped = super()._wrap(hook)
        settle_buckets(wrapped, self._params)
        return wrapped

    def backward(
        self, last: bool, chunk: int = 0, late: Collection[Tensor] | None = None
    ) -> AbstractContextManager[None]:
        return self._complete() if last else self.quiet()

    @contextmanager
    def _complete(self) -> Iterator[None]:
        """Run the last backward inside, then hand DDP the parameters that it has not reached.

        Without this they would keep their buckets here.
        """
        self._arrived.clear()
        try:
            yield
        except RuntimeError as error:
            if "mark a variable ready only once" not in str(error):
                raise
            raise ConfigError(
                "dp_mode = ddp: backward computes the gradient of a parameter in two parts, as "
                "torch.utils.checkpoint with use_reentrant=True does for a layer that is used "
                "twice; set use_reentrant=False"
            ) from error

        missing = [p for p in self._params if p not in self._arrived]
        for p in missing:  # an earlier micro batch, or a hook of the script, may have set one
            if p.grad is not None:
                self._computed.add(self._names[p])
        if missing:
            touch(missing)

    def _watch(self, params: Sequence[nn.Parameter]) -> None:
        """Note each gradient that a backward computes, before DDP sees it and fills in zeros."""
        arrived = self._arrived
        computed = self._computed
        names = self._names

        def note(p: Tensor) -> None:
            assert isinstance(p, nn.Parameter)
            arrived.add(p)
            if p.grad is not None:  # a function of the script may return none
                computed.add(names[p])

        hooks = [p.register_post_accumulate_grad_hook(note) for p in params]
        # The model outlives this object, which ends with its group of ranks.
        weakref.finalize(self, lambda: [hook.remove() for hook in hooks])

    @property
    def computed(self) -> set[str]:
        return self._computed

    def leave_out(self, absent: Collection[str]) -> None:
        for p in self._params:
            if self._names[p] in absent:
                p.grad = None

    def zero_grad(self) -> None:
        self._computed.clear()
        super().zero_grad()


class _NoForward(nn.Module):
    """Stands for a model whose forward must not run."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def settle_buckets(wrapped: nn.Module, params: Sequence[nn.Parameter]) -> None:
    """Let DDP regroup its buckets by the order of the parameters. (all ranks)

    DDP regroups once, in the order in which its first backward computes the gradients, and the
    groups decide the order of sums at three and more ranks. In a script's model that order may
    depend on the batch, a buffer or the weights. The first ones of a resumed run are others than
    those of a fresh run, so its sums would differ in their last bits.
    """
    # The wrapper expects a forward before it takes gradients; this one computes nothing.
    model = wrapped.module
    wrapped.module = _NoForward()
    try:
        wrapped(torch.zeros(()))
    finally:
        wrapped.module = model

    # From the last parameter to the first, as the backward of most models goes. DDP averages zeros.
    for p in reversed(params):
        touch([p])
    for p in params:
        p.grad = None


# Reach parameters by a backward that computes nothing.


class _Touch(torch.autograd.Function):
    """Ends a graph at some parameters, without a gradient of theirs."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, *params: Tensor) -> Tensor:
        ctx.inputs = 1 + len(params)
        return start.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (None,) * ctx.inputs


def touch(params: Sequence[nn.Parameter]) -> None:
    """Run a backward that ends at `params`, with undefined gradients.

    What waits for a gradient of each parameter, as torch's DDP does, is called; `.grad` stays. The
    hooks of a script are not called: there is no gradient for them.
    """
    # A parameter that the script has frozen since the run began has no place in a graph.
    frozen = [p for p in params if not p.requires_grad]
    for p in frozen:
        p.requires_grad_(True)
    start = torch.zeros((), requires_grad=True)
    with _without_script_hooks(params):
        _Touch.apply(start, *params).backward()
    for p in frozen:
        p.requires_grad_(False)


@contextmanager
def _without_script_hooks(params: Sequence[nn.Parameter]) -> Iterator[None]:
    """Take the hooks off these parameters, but for nanoray's own, and put them back at the end."""
    taken = []
    for p in params:
        for hooks in gradient_hooks(p):
            taken.append((hooks, dict(hooks)))
    for hooks, before in taken:
        for key, hook in before.items():
            if not str(getattr(hook, "__module__", "")).startswith("nanoray."):
                del hooks[key]
    try:
        yield
    finally:
        for hooks, before in taken:
            hooks.clear()
            hooks.update(before)

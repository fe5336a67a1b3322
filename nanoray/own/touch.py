"""Reach parameters by a backward that computes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from nanoray.base.compat import gradient_hooks


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

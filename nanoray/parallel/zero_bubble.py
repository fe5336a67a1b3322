"""A backward in two halves: what the stage before waits for at once, and gradients of weights when
there is time.

A linear layer y = x·Wᵀ computes two products in its backward, each as large as that of its forward:

    B   dx = dy·W      the gradient of its input: the layer before, and so the stage before, can go on with it
    W   dW = dyᵀ·x     the gradient of its weight: nobody needs it before the update

In a pipeline the second half fills the time in which a stage would wait (`schedules.py` says when).
The layer's product is a graph of its own, which autograd walks twice, each time only towards what
is asked for. So both halves compute what one backward would, to the bit; the gradients of norms,
embeddings and experts come with B. Source: Qi et al. 2023, Zero Bubble Pipeline Parallelism (its
schedule ZB-H1).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

Product = Callable[[Tensor], Tensor]
# The end of a product's graph, its gradient, its weights
Half = tuple[GradientEdge, Tensor, list[nn.Parameter]]


class WeightGradients:
    """Keeps the second half of each linear layer's backward until a turn "W" asks for it."""

    def __init__(self, model: nn.Module) -> None:
        """Divide the backward of all linear layers of `model`, by a forward, or product, of their
        own on the objects.

        A layer whose forward also communicates has a method `product` for the rest, so W
        communicates nothing.
        """
        self._now: list[Half] = []
        self._waiting: dict[int, list[Half]] = {}
        self.params: set[Tensor] = set()  # whose gradients come with W
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                name = "product" if hasattr(layer, "product") else "forward"
                params = [p for p in layer.parameters(recurse=False) if p.requires_grad]
                params = [
                    p
                    for p in params
                    if p is not layer.bias or getattr(layer, "bias_in_product", True)
                ]
                self.params.update(params)
                setattr(layer, name, partial(self._run, getattr(layer, name), params))

    def _run(self, product: Product, params: list[nn.Parameter], x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return product(x)
        y: Tensor = _Halves.apply(x, product, lambda edge, dy: self._now.append((edge, dy, params)))
        return y

    def keep(self, micro: int) -> None:
        """Note that the first half of a micro batch's backward is done."""
        self._waiting[micro], self._now = self._now, []

    def compute(self, micro: int) -> None:
        """Compute the second half: add to the gradients of the weights, which run their hooks."""
        for edge, dy, params in self._waiting.pop(micro):
            torch.autograd.backward(edge, dy, inputs=params)


class _Halves(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, product: Product, then: Callable[[GradientEdge, Tensor], None]
    ) -> Tensor:
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            y = product(ctx.x)
        ctx.edge, ctx.then = get_gradient_edge(y), then  # y itself would be kept in memory until W
        return y.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (dx,) = torch.autograd.grad(ctx.edge, ctx.x, grads[0], retain_graph=True)
        ctx.then(ctx.edge, grads[0])
        ctx.x = ctx.edge = None
        return dx, None, None

"""A backward in two halves: first what the stage before waits for, later the gradients of weights.

A linear layer y = x·Wᵀ computes two products in its backward, each as large as that of its forward:

    B   dx = dy·W      the gradient of its input: the layer before, and so the stage before, can go on with it
    W   dW = dyᵀ·x     the gradient of its weight: it is needed for the update only

In a pipeline the second half fills the time in which a stage would wait (`schedules.py` has the
order). The layer's product is a graph of its own. Autograd walks it twice, for one of the two
gradients each time, so both halves compute what one backward would, to the bit. The gradients of
norms, embeddings and experts come with B. Source: Qi et al. 2023, Zero Bubble Pipeline Parallelism (its
schedule ZB-H1).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

Product = Callable[[Tensor], Tensor]


class Half(NamedTuple):
    """The second half of one product's backward."""

    edge: GradientEdge  # the end of the product's graph
    dy: Tensor  # the gradient there
    params: list[nn.Parameter]


class WeightGradients:
    """Keeps the second half of each linear layer's backward until a turn "W" computes it."""

    def __init__(self, model: nn.Module) -> None:
        """Divide the backward of all linear layers of `model`.

        Each layer object gets another method: `product`, if its forward also communicates, so that
        W communicates nothing; else `forward`.
        """
        self._now: list[Half] = []  # of the backward that is running
        self._waiting: dict[int, list[Half]] = {}  # by micro batch
        self.params: set[Tensor] = set()  # whose gradients come with W
        for layer in model.modules():
            if not isinstance(layer, nn.Linear):
                continue

            # The weights that W computes: a bias that is added after the product comes with B.
            params = [p for p in layer.parameters(recurse=False) if p.requires_grad]
            if not getattr(layer, "bias_in_product", True):
                params = [p for p in params if p is not layer.bias]
            self.params.update(params)

            # On this object only: other models of the process keep the class's method.
            name = "product" if hasattr(layer, "product") else "forward"
            setattr(layer, name, partial(self._run, getattr(layer, name), params))

    def _run(self, product: Product, params: list[nn.Parameter], x: Tensor) -> Tensor:
        """Return product(x); its backward notes the half that is left."""
        if not torch.is_grad_enabled():
            return product(x)

        def note(edge: GradientEdge, dy: Tensor) -> None:
            self._now.append(Half(edge, dy, params))

        y: Tensor = _Halves.apply(x, product, note)
        return y

    def keep(self, micro: int) -> None:
        """Note that the first half of a micro batch's backward is done."""
        self._waiting[micro] = self._now
        self._now = []

    def compute(self, micro: int) -> None:
        """Compute the second half: add to the gradients of the weights, which run their hooks."""
        for half in self._waiting.pop(micro):
            torch.autograd.backward(half.edge, half.dy, inputs=half.params)


class _Halves(torch.autograd.Function):
    """A product whose backward computes the gradient of its input only."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, product: Product, note: Callable[[GradientEdge, Tensor], None]
    ) -> Tensor:
        # A graph of its own, from a leaf x to y.
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            y = product(ctx.x)
        ctx.edge = get_gradient_edge(y)  # y itself would be kept in memory until W
        ctx.note = note
        return y.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        # The graph is retained for the weights, which W walks to. The input is needed no more.
        (dx,) = torch.autograd.grad(ctx.edge, ctx.x, grads[0], retain_graph=True)
        ctx.note(ctx.edge, grads[0])
        ctx.x = None
        ctx.edge = None
        return dx, None, None

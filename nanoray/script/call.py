"""Call a script's model and loss on a batch, as the loop does."""

from __future__ import annotations

from typing import Any

from torch import nn

from nanoray.script.data.batch import NamedBatch


class WithLoss(nn.Module):
    """A script's model together with its loss, which is a module with tensors of its own.

    So the loss is moved to the device, trained, saved, sent and compared as any part of a model.
    """

    model: nn.Module
    loss_fn: nn.Module

    def __init__(self, model: nn.Module, loss_fn: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn

    def forward(self, *batch: Any, **named: Any) -> Any:
        """Return the loss of a batch: inputs and targets, or a dict with all of them."""
        if named:
            return self.loss_fn(self.model(**named), NamedBatch(named))
        x, y = batch
        return self.loss_fn(self.model(x), y)


def is_part_of_model(loss_fn: nn.Module) -> bool:
    """Return whether a loss has parameters, buffers or extra states. Those of torch are constant."""
    is_constant = type(loss_fn).__module__ == nn.MSELoss.__module__
    return not is_constant and bool(loss_fn.state_dict())


def arguments_of(x: Any, y: Any, has_loss_fn: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what the model is called with: positional arguments, and named ones.

    A batch that is a dict has all arguments by their names. Without a loss_fn the model takes the
    targets, too.
    """
    if isinstance(x, NamedBatch):
        return (), dict(x)
    return ((x,) if has_loss_fn else (x, y)), {}


def loss_in(output: Any, x: Any) -> Any:
    """Return the loss in the result of a model that computes it: for a dict often its `loss`."""
    if isinstance(x, NamedBatch):
        return getattr(output, "loss", output)
    return output


def loss_of(model: Any, loss_fn: Any, x: Any, y: Any) -> Any:
    """Return the loss of a batch, as the script's model or loss_fn computes it."""
    positional, named = arguments_of(x, y, loss_fn is not None)
    output = model(*positional, **named)
    return loss_in(output, x) if loss_fn is None else loss_fn(output, y)

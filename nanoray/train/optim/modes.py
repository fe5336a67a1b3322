"""Optimizers that train other weights than those that they evaluate, as schedule-free ones do.

Their train() and eval() change the weights from one kind to the other, up to rounding. Checkpoints
contain the weights that are evaluated, so that they can be used as they are. For other optimizers
nothing happens here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch.optim import Optimizer

from nanoray.checkpoint.state.optimizers import members_of


def has_modes(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has train() and eval(), which change the weights."""
    return any(callable(getattr(member, "eval", None)) for member in members_of(optimizer))


def set_mode(optimizers: Sequence[Optimizer], mode: str) -> None:
    """Call train() or eval() of the optimizers that have them."""
    for optimizer in optimizers:
        for member in members_of(optimizer):
            switch = getattr(member, mode, None)
            if callable(switch):
                switch()


@contextmanager
def evaluated_weights(optimizers: Sequence[Optimizer], back: bool = True) -> Iterator[None]:
    """Let the model have the weights to evaluate inside; with `back` those to train afterwards."""
    set_mode(optimizers, "eval")
    try:
        yield
    finally:
        if back:
            set_mode(optimizers, "train")

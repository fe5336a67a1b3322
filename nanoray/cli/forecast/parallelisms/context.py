"""Context parallelism: keys and values pass between the ranks that share sequences."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from nanoray.cli.forecast.parallelisms.record import (
    Compute,
    Parallelism,
    Sender,
    Talk,
    Tried,
    divisors,
)
from nanoray.config import Batch, Config
from nanoray.config.layout import Layout
from nanoray.models.build import kernels_of
from nanoray.models.costs import Cut, ring_memory
from nanoray.models.gpt import ModelShape

LEAST_TOKENS = 128  # of a sequence on a rank, that a search tries


def talks(sender: Sender) -> list[Talk]:
    """Return what the ranks that share sequences exchange for attention.

    A block is the keys and values of a micro batch's tokens on a rank.
    """
    job = sender.job
    layout = sender.layout
    if layout.cp == 1:
        return []
    blocks = sender.blocks
    numbers = 2 * sender.tokens * job.shape.n_embd / layout.tp  # of keys and values
    block = (2 if job.half else 4) * numbers
    gradients = 4 * numbers  # sums in float32

    # A block passes all other ranks. Its gradients also return to the rank that it is from.
    passes = blocks * (layout.cp - 1)
    again = passes if sender.repeats else 0
    ring = [
        Talk("cp", "send", "keys and values", passes, block, "ring_forward"),
        Talk("cp", "send", "keys and values, again", again, block, "ring_again"),
        Talk("cp", "send", "keys and values, backward", passes, block, "ring_backward"),
        Talk("cp", "send", "their gradients", passes, gradients, "ring_backward"),
        Talk("cp", "send", "their gradients, home", blocks, gradients, "backward"),
    ]
    return [talk for talk in ring if talk.times]


def _tries(tried: Tried, layout: Layout) -> Iterable[Layout]:
    """Yield sizes with which a rank has two equal parts of a sequence, worth their messages.

    With fewer than LEAST_TOKENS on a rank, messages would take most of the time.
    """
    tokens = tried.job.shape.block_size
    for size in divisors(layout.dp):
        is_worth = tokens % (2 * size) == 0 and tokens // size >= LEAST_TOKENS
        if size == 1 or is_worth:
            yield replace(layout, dp=layout.dp // size, cp=size)


def _hides(compute: Compute) -> dict[str, float]:
    """Return the seconds of attention to one block of keys and values.

    The next block travels beside it.
    """
    flops = 2 * compute.job.shape.n_embd * compute.tokens * compute.own_tokens
    return {
        "ring_forward": flops / compute.forward_flops,
        "ring_again": flops / compute.forward_flops,
        "ring_backward": 2 * flops / compute.backward_flops,
    }


def _keeps(config: Config, shape: ModelShape, batch: Batch, precision: str) -> dict[str, int]:
    """Return the ring of one block's attention, which is there for a moment."""
    ring = ring_memory(shape, batch.micro, precision, kernels_of(config), Cut.of(config))
    return {"ring": ring} if ring else {}


CONTEXT = Parallelism(
    key="cp",
    in_pass=True,
    talks=talks,
    tries=_tries,
    hides=_hides,
    keeps=_keeps,
)

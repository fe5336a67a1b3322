"""Expert parallelism: tokens travel to their experts and back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from nanoray.cli.forecast.parallelisms.record import (
    Parallelism,
    Sender,
    Talk,
    Tried,
    divisors,
)
from nanoray.config.layout import Layout


def talks(sender: Sender) -> list[Talk]:
    """Return how tokens travel to their experts and back, with their gradients."""
    job = sender.job
    shape = job.shape
    if sender.layout.ep == 1:
        return []
    size = 2 if job.half else 4
    # A token travels once to each of its experts.
    routed = size * sender.tokens * shape.n_embd * shape.experts_per_token
    forward = sender.blocks * 2  # there and back
    # Backward computes a block again where its activations were not kept.
    backward = 2 * forward if sender.repeats else forward
    return [
        Talk("ep", "all_to_all", "tokens to experts and back", forward, routed, "forward"),
        Talk("ep", "all_to_all", "their gradients", backward, routed, "backward"),
    ]


def _tries(tried: Tried, layout: Layout) -> Iterable[Layout]:
    # The ranks that share experts are data ranks, so dp stays.
    for size in divisors(layout.dp) if tried.job.shape.experts else [1]:
        yield replace(layout, ep=size)


EXPERTS = Parallelism(
    key="ep",
    in_pass=True,
    talks=talks,
    tries=_tries,
)

"""What a way to share the work says of itself: one record for each, listed in registry.py.

    key        of its size, in the configuration and in a Layout
    talks      what a rank sends in a step, as kinds of collectives
    tries      the sizes that a search tries
    hides      the compute beside which some of its messages travel
    keeps      activations beside those of models/costs.py

A record says only what differs from a way that sends nothing and keeps nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from nanoray.cli.forecast.job import Job
from nanoray.config import Batch, Config
from nanoray.config.layout import Layout
from nanoray.models.gpt import ModelShape
from nanoray.models.weights import layers_of


class Sender(NamedTuple):
    """A rank of one stage of a layout, in a step."""

    job: Job
    layout: Layout
    stage: int
    accum: int  # micro batches
    tokens: int  # of a micro batch, on this rank

    @property
    def blocks(self) -> int:
        """The blocks that the rank computes in a step, one for each layer and micro batch."""
        return self.accum * layers_of(self.job.shape.n_layer, self.layout.pp, self.stage)

    @property
    def is_first(self) -> bool:
        """Whether the rank embeds tokens."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether the rank computes the loss."""
        return self.stage == self.layout.pp - 1

    @property
    def repeats(self) -> bool:
        """Whether backward computes a block's forward again."""
        return self.job.config.activation_checkpointing != "none"


class Talk(NamedTuple):
    """Collectives of one kind, of a rank in a step."""

    axis: str  # of Layout.steps
    op: str  # all_reduce | reduce_scatter | all_gather | all_to_all | send
    what: str
    times: float
    nbytes: float  # the tensor of one of them
    # forward | backward: compute waits for it. ring_forward | ring_again | ring_backward: the same,
    # but the attention of the block that is there hides it; again is in backward. prefetched: a pass
    # hides it. beside: backward hides it. after: nothing hides it.
    when: str


class Compute(NamedTuple):
    """The compute of a micro batch on a rank, beside which messages may travel."""

    job: Job
    tokens: int  # of one sequence, on this rank
    own_tokens: float  # of the micro batch, as far as tp does not divide their compute
    forward_flops: float  # a second
    backward_flops: float


class Tried(NamedTuple):
    """What a search looks for layouts for."""

    job: Job
    ranks_per_node: int | None  # None: nodes are not known


Tries = Callable[[Tried, Layout], Iterable[Layout]]


def _one_size(tried: Tried, layout: Layout) -> Iterable[Layout]:
    return (layout,)


def every_size(key: str) -> Tries:
    """Return `tries` of an axis that takes its ranks from the data replicas: each divisor."""

    def tries(tried: Tried, layout: Layout) -> Iterable[Layout]:
        for size in divisors(layout.dp):
            yield replace(layout, **{"dp": layout.dp // size, key: size})

    return tries


@dataclass(frozen=True)
class Parallelism:
    """One way to share the work: see the top of this file."""

    key: str
    # What compute waits for in the midst of a pass counts as this part of a step, else as dp
    in_pass: bool
    talks: Callable[[Sender], list[Talk]]
    # From a layout without this way to those with each of its sizes
    tries: Tries = _one_size
    # Seconds by the `when` of talks
    hides: Callable[[Compute], Mapping[str, float]] = lambda compute: {}
    # Bytes by part. The batch is that of one rank.
    keeps: Callable[[Config, ModelShape, Batch, str], Mapping[str, int]] = (
        lambda config, shape, batch, precision: {}
    )


def divisors(n: int) -> list[int]:
    """Return the divisors of n, rising."""
    # Divisors come in pairs, so a search up to the square root finds them all.
    low = [k for k in range(1, int(n**0.5) + 1) if n % k == 0]
    high = [n // k for k in low]
    return sorted({*low, *high})

"""What a rank sends: a kind of collective with its number and size, and what decides them."""

from __future__ import annotations

from typing import NamedTuple

from nanoray.forecast.job import Job
from nanoray.forecast.weights import layers_of
from nanoray.mesh.layout import Layout


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

    # tp | cp | dp | dp_cp (dp with cp) | shard, replica (dp in groups) | edp (gradients of experts) |
    # ep | pp
    axis: str
    op: str  # all_reduce | reduce_scatter | all_gather | all_to_all | send
    what: str
    times: float
    nbytes: float  # the tensor of one of them
    # forward | backward: compute waits for it. ring_forward | ring_again | ring_backward: the same,
    # but the attention of the block that is there hides it; again is in backward. prefetched: a pass
    # hides it. beside: backward hides it. after: it follows the update. once: nothing hides it.
    # travels: it has the next steps for it.
    when: str
    every: int = 1  # steps from one time to the next

    def sent(self, ranks: int) -> float:
        """Return the bytes that a rank of the axis sends in a step, the mean over all steps."""
        # Each rank keeps its own part of the tensor and sends the others.
        share = (ranks - 1) / ranks
        if self.op == "all_reduce":
            share *= 2  # a reduce-scatter and an all-gather
        elif self.op == "send":
            share = 1.0
        return self.times * self.nbytes * share / self.every

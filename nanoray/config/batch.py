"""Keys of the batch: sequences per rank and per step, and how long they are at first."""

from __future__ import annotations

from typing import Annotated

from pydantic import WithJsonSchema

from nanoray.config.fields import Group, Natural, Positive, field, hidden


class BatchKeys(Group):
    """The batch of one optimizer step. batch_sizes.py divides it by the number of data ranks."""

    # Length of sequences
    seq_warmup_steps: Natural = field(0, "batch")
    """gpt: steps in which each sequence is cut into pieces of 8 tokens, then 16, and so on up to
    block_size, with as many tokens a step (0 = off); block_size is 16, 32, 64, ..."""

    seq_warmup_from: Positive = hidden(8, "batch")
    """fixed: tokens of a sequence at first"""

    # Number of sequences. A size that is not given follows from the others
    micro_batch_size: Annotated[
        Natural, WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, {"const": "auto"}]})
    ] = field(0, "batch")
    """sequences per rank per forward pass (0 = follows from the global batch; auto = the fastest
    that fits: `python -m nanoray.launch` asks `nanoray tune`). Out of memory? A run halves it by
    itself (on_oom)"""

    micro_batch_search: bool = hidden(False, "batch")
    """micro_batch_size auto: `nanoray tune` measures the size, before the run begins"""

    grad_accum_steps: Natural = field(0, "batch")
    """micro steps per optimizer step (0 = follows from the global batch, else 1)"""

    global_batch_size: Natural = field(0, "batch")
    """sequences per optimizer step over all ranks (0 = micro_batch_size x grad_accum_steps x
    ranks)"""

    def check(self) -> None:
        """Raise ValueError when no key gives the size of the batch."""
        if self.micro_batch_search and not self.global_batch_size:
            raise ValueError(
                "micro_batch_size = auto divides a global batch, and there is none; give "
                "global_batch_size (all ranks)"
            )
        if not (self.micro_batch_size or self.global_batch_size):
            raise ValueError(
                "no batch size: give micro_batch_size (per rank) or global_batch_size (all ranks)"
            )

"""The seeds of a run's random numbers: a micro batch has its own, whatever was computed before it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanoray.data.seeding import seed_host_generators
from nanoray.data.tokens import MicroBatches
from nanoray.models.dropout import derive_seed, seed_generators


@dataclass(frozen=True)
class DropoutSeeds:
    """Seeds the dropout of a micro batch, if anything draws.

    The seed is that of (seed, step, micro batch, data rank), and a model may derive one for each
    layer from it. So the masks do not depend on the order in which micro batches and layers are
    computed, and every process can draw those of any rank.
    """

    seed: int  # of the run
    batches: MicroBatches  # of this rank
    device: torch.device
    draws: bool  # whether the model draws random numbers
    draws_on_host: (
        bool  # a script's modules may draw from numpy or Python, to skip layers for example
    )

    def __call__(self, step: int, micro: int, rank: int | None = None) -> None:
        """Seed that of the step after `step`; `rank` is another data rank."""
        if not self.draws:
            return
        data_rank = self.batches.rank if rank is None else rank
        seed = derive_seed(self.seed, step, micro, data_rank)
        seed_generators(seed, self.device)
        if self.draws_on_host:
            seed_host_generators(seed)

"""What is trained, whatever the layout: the input of every formula of this room."""

from __future__ import annotations

from dataclasses import dataclass

from nanoray.config import Config
from nanoray.mesh.layout import Layout
from nanoray.models.gpt import ModelShape


@dataclass(frozen=True)
class Job:
    """A GPT, its configuration, and the batch of a step. The layout is an argument of each formula."""

    shape: ModelShape
    config: Config
    sequences: int  # of a step, over all replicas
    precision: str  # fp32 | tf32 | bf16 | fp16
    bucket_mb: float
    mirrored: bool = False  # each rank also holds a copy of another rank's share

    @property
    def half(self) -> bool:
        """Whether matrix products take 2 bytes per number."""
        return self.precision not in ("fp32", "tf32")

    def cuts_sequence(self, layout: Layout) -> bool:
        """Return whether the tensor ranks also divide the positions of the residual stream."""
        return self.config.sequence_parallel and layout.tp > 1

    def mode(self, layout: Layout) -> str:
        """Return the data-parallel mode in this layout.

        torch's DDP supports neither pipelines nor expert parallelism; ddp_by_hand replaces it.
        """
        # One data rank has nothing to shard or to reduce.
        if layout.size_of("dp_cp") == 1:
            return "ddp"
        mode: str = self.config.dp_mode
        if mode == "ddp" and layout.pp * layout.ep > 1:
            return "ddp_by_hand"
        return mode

    def config_at(self, layout: Layout) -> Config:
        """Return the configuration with the axes of this layout, unchecked."""
        sizes = layout.sizes()
        del sizes["dp"]  # which follows from the number of ranks
        return self.config.model_copy(update={"dp_mode": self.mode(layout), **sizes})

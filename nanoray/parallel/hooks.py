"""What optional features add to a step. The Plan holds a list of hooks, which a plain run leaves empty.

begin ─► forward, backward of all micro batches ─► add_up ─► norm, clip, update ─► commit ─► sent ─► drop

feature                                   class
tied embedding of a pipeline              pp.TiedEmbedding
gradients of a rank's own positions       residual_stream.PartialGradients
running statistics of batch norms         running_statistics.RunningStatistics
gradients in 16 bits                      compress.Compressor
of a script's own model                   ScriptHooks.hooks
"""

from __future__ import annotations

from torch import Tensor


class StepHook:
    """Work that one feature does at these moments of a step. The defaults do nothing."""

    def begin(self) -> None:
        """Forget forward passes that belong to no step; called before the first forward."""

    def add_up(self) -> None:
        """Complete the step's sums after the last backward; no weight changes. (all ranks)"""

    def commit(self, left_out: Tensor | None = None) -> None:
        """Keep the step's results: the weights have changed, unless `left_out` is 1 on the device."""

    def sent(self) -> None:
        """Do what needs the updated weights: they are on their way to the ranks that lack them."""

    def undo(self) -> None:
        """Undo what the forwards of a step that is not committed have changed."""

    def drop(self) -> None:
        """Forget the step's results; called whenever the gradients are forgotten."""

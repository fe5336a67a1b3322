"""What can refuse a step before its update: the audit, and the reading of a script's data.

    micro batches ─► watch ─► forward, backward ─► refuses? ─► norm, update
                                                      └─► no update on any rank

The loop asks each check on all ranks. A plain run has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from nanoray.parallel.flow import MicroBatch


class StepCheck(Protocol):
    """Watches the forward and backward of a step."""

    def watch(
        self,
        micro_batches: Iterator[MicroBatch],
        step: int,
        samples: int,
        phase: Callable[[str], None],
    ) -> Iterator[MicroBatch]:
        """Return the micro batches of the step after `step`, which begins at `samples`. (all ranks)"""

    def refuses(self) -> bool:
        """Return whether the step must not update, now that backward has ended. (all ranks)"""

    def forget(self) -> None:
        """Release what was attached to the model for a step that broke."""

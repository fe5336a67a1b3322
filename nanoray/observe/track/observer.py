"""What an observer of a run is: the base of all that receive its notes and records on rank 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Observer:
    """Receives what a run reports, and changes nothing.

    Here each method does nothing: an observer overrides those that matter to it. They must be quick,
    because the step waits for them.
    """

    def problem(self) -> str | None:
        """Return why it cannot do its work, and the remedy; None if it can. Called before step 1."""
        return None

    def on_length(self, steps: int) -> None:
        """Receive after which step the run ends: max_steps, or the steps that `fit` was given."""

    def on_note(self, text: str) -> None:
        """Receive one line of text for the user."""

    def on_record(self, record: dict[str, Any]) -> None:
        """Receive the metrics of one logged step; `step` is the number of completed optimizer
        steps.
        """

    def added(self) -> dict[str, Any]:
        """Return the values since the last call that observers after this one shall receive, too."""
        return {}

    def on_late(self, record: dict[str, Any]) -> None:
        """Receive step and time of the newest record, and values that were added after it."""

    def on_saved(self, step: int) -> None:
        """Do something now that the checkpoint of a step is on disk."""

    def rewind(self, step: int) -> None:
        """Drop the records after `step`; those steps will be repeated."""

    def on_end(self, outcome: Mapping[str, Any]) -> None:
        """Receive the outcome of the run, after the last checkpoint is on disk."""

    def on_failure(self, error: BaseException) -> None:
        """Receive the error that ends the run in the place of an outcome."""

    def close(self) -> None:
        """Flush what is still in memory."""

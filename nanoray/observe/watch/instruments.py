"""Instruments: objects that observe the loop and change nothing that a step computes.

    fit ─► instruments.begin_step        tracing, routing
        ─► instruments.phase             progress, ledger, statistics, profile, planned faults
        ─► instruments.gradients_ready   routing
        ─► instruments.measured          throughput, and those above that have metrics
        ─► instruments.end_step          tracing

The loop calls its `Instruments` at named moments and names none of them. The recipe lists those of
a run. An instrument implements only the moments that it needs, and only those are called, so an
instrument that is off costs nothing.

Callbacks of a script, the console and the files of metrics are no instruments: they receive records
(observers.py). The audit is none either, because it can repeat a step (guard/audit.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol


class Instrument(Protocol):
    """The moments of the loop, in order. An instrument implements some of them, by these names.

    Steps are counted from 1. Moments marked "(all ranks)" may communicate, so an instrument that
    does must be listed on every rank.
    """

    def begin_run(self) -> None:
        """The loop of this group of ranks begins; the model is warm. (all ranks)"""

    def begin_step(self, step: int) -> None:
        """A step begins, and nothing of it is computed yet. (all ranks)"""

    def phase(self, step: int, name: str) -> None:
        """A phase of a step begins, or progresses: see faults/progress.py for the names."""

    def gradients_ready(self, step: int, logged: bool) -> None:
        """Backward is done: gradients are means over ranks, with the loss scale. (all ranks)

        The weights are those before the update. `logged` is True when the step will be recorded.
        """

    def pause(self, seconds: float) -> None:
        """The loop has spent `seconds` on work that is not training, such as an evaluation."""

    def left_out(self) -> None:
        """The step ends without an update, and does not count. `end_step` follows. (all ranks)"""

    def end_step(self) -> None:
        """The step ends: it is recorded, evaluated and saved where that is due. (all ranks)"""

    def measured(self) -> dict[str, Any]:
        """Return the metrics for the record of the step that was just updated. (all ranks)"""

    def summary(self) -> dict[str, Any]:
        """Return the values for the outcome of the run, after its last step. (all ranks)"""


class Moment:
    """The instruments that implement one moment, to be called in the order of their list."""

    def __init__(self, instruments: Iterable[object], name: str) -> None:
        self.calls = [getattr(each, name) for each in instruments if hasattr(each, name)]

    def __call__(self, *arguments: Any) -> None:
        for call in self.calls:
            call(*arguments)

    def collect(self) -> dict[str, Any]:
        """Return what all of them return, in one dict."""
        values: dict[str, Any] = {}
        for call in self.calls:
            values |= call()
        return values


class Instruments:
    """The instruments of one engine, sorted by the moments that they implement."""

    def __init__(self, instruments: Sequence[object]) -> None:
        """List the instruments; each moment calls them in this order."""
        self.begin_run: Callable[[], None] = Moment(instruments, "begin_run")
        self.begin_step: Callable[[int], None] = Moment(instruments, "begin_step")
        self.phase: Callable[[int, str], None] = Moment(instruments, "phase")
        self.gradients_ready: Callable[[int, bool], None] = Moment(instruments, "gradients_ready")
        self.pause: Callable[[float], None] = Moment(instruments, "pause")
        self.left_out: Callable[[], None] = Moment(instruments, "left_out")
        self.end_step: Callable[[], None] = Moment(instruments, "end_step")
        self.measured = Moment(instruments, "measured").collect
        self.summary = Moment(instruments, "summary").collect

"""Instruments: objects that observe the loop and change nothing that a step computes.

    fit ─► watch.begin_step        tracing, routing
        ─► watch.phase             progress, ledger, statistics, memory, profile, planned faults
        ─► watch.gradients_ready   routing, precision counts
        ─► watch.measured          throughput, and those above that have metrics
        ─► watch.end_step          tracing

The loop calls one `Watch` at named moments and names no instrument. The recipe lists the
instruments of a run. An instrument implements only the moments that it needs, and a `Watch` calls
only those, so an instrument that is off costs nothing.

Callbacks of a script, the console and the files of metrics are no instruments: they receive records
(observers.py). The audit is none either, because it can repeat a step (guard/audit.py).
"""

from __future__ import annotations

from collections.abc import Iterable
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


class Watch:
    """The instruments of one engine, sorted by the moments that they implement."""

    def __init__(self, instruments: Iterable[object]) -> None:
        """List the instruments; each moment calls them in this order."""
        listed = list(instruments)
        self._begin_run = _implementers(listed, "begin_run")
        self._begin_step = _implementers(listed, "begin_step")
        self._phase = _implementers(listed, "phase")
        self._gradients_ready = _implementers(listed, "gradients_ready")
        self._pause = _implementers(listed, "pause")
        self._left_out = _implementers(listed, "left_out")
        self._end_step = _implementers(listed, "end_step")
        self._measured = _implementers(listed, "measured")
        self._summary = _implementers(listed, "summary")

    def begin_run(self) -> None:
        for begin_run in self._begin_run:
            begin_run()

    def begin_step(self, step: int) -> None:
        for begin_step in self._begin_step:
            begin_step(step)

    def phase(self, step: int, name: str) -> None:
        for phase in self._phase:
            phase(step, name)

    def gradients_ready(self, step: int, logged: bool) -> None:
        for gradients_ready in self._gradients_ready:
            gradients_ready(step, logged)

    def pause(self, seconds: float) -> None:
        for pause in self._pause:
            pause(seconds)

    def left_out(self) -> None:
        for left_out in self._left_out:
            left_out()

    def end_step(self) -> None:
        for end_step in self._end_step:
            end_step()

    def measured(self) -> dict[str, Any]:
        """Return the metrics of all instruments for one record."""
        metrics: dict[str, Any] = {}
        for measured in self._measured:
            metrics |= measured()
        return metrics

    def summary(self) -> dict[str, Any]:
        """Return the values of all instruments for the outcome of the run."""
        values: dict[str, Any] = {}
        for summary in self._summary:
            values |= summary()
        return values


def _implementers(instruments: list[object], moment: str) -> list[Any]:
    """Return the bound methods of that name, of the instruments that have one."""
    return [getattr(each, moment) for each in instruments if hasattr(each, moment)]

"""Hooks of a script: it overrides Callback, and the engine reports to an Observer of it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from nanoray.train.own.run import Run

log = logging.getLogger("nanoray.rank")


class Callback:
    """Hooks that a script overrides to receive the reports of a run, on rank 0.

    They change nothing by themselves, but may call `run.save()` and `run.stop()`. An exception in
    one of them is logged, and the run goes on. The step waits for them, so they must be quick.
    """

    def on_run_start(self, run: Run) -> None:
        """Before the first step. Called again in the process that becomes rank 0 after a fault."""

    def on_step_end(self, step: int, record: Mapping[str, Any]) -> None:
        """After a logged step (`log_every`), with its record: docs/metrics.md has the names."""

    def on_eval_end(self, step: int, record: Mapping[str, Any]) -> None:
        """After an evaluation; `record` has val/loss."""

    def on_checkpoint(self, step: int) -> None:
        """After the checkpoint of a step is on disk."""

    def on_fault(self, text: str) -> None:
        """After a warning, a rollback, or a recovery from a lost rank."""

    def on_run_end(self, outcome: Mapping[str, Any]) -> None:
        """After the last checkpoint is on disk.

        `outcome` has exit_reason, step, train_loss, val_loss, train_s (seconds) and more.
        """

    def on_exception(self, error: BaseException) -> None:
        """When an error ends the run; `fit` raises it afterwards. Then there is no on_run_end."""


class ReportingCallback(Callback):
    """A callback that keeps a connection, such as one to a tracker."""

    def problem(self, run: Run) -> str:
        """Return why it cannot report the run, and the remedy; "" if it can."""
        return ""

    def close(self) -> None:
        """Flush, after on_run_end or on_exception, or because another process is rank 0 now."""


class Observer:
    """A script's callback as the engine calls it (observers.Callback)."""

    def __init__(self, callback: Callback, run: Run) -> None:
        self._callback = callback
        self._run = run
        self._begun = False
        self._failed: set[str] = set()  # names of the hooks that have raised, to warn once

    def on_note(self, text: str) -> None:
        self._begin()
        if text.startswith(("warning", "rejoin")):
            self._call("on_fault", text)

    def on_record(self, record: dict[str, Any]) -> None:
        self._begin()
        self._call("on_step_end", record["step"], record)
        if "val/loss" in record:
            self._call("on_eval_end", record["step"], record)

    def on_saved(self, step: int) -> None:
        self._call("on_checkpoint", step)

    def on_end(self, outcome: Mapping[str, Any]) -> None:
        self._call("on_run_end", outcome)

    def on_failure(self, error: BaseException) -> None:
        self._call("on_exception", error)

    def problem(self) -> str:
        if isinstance(self._callback, ReportingCallback):
            return self._callback.problem(self._run)
        return ""

    def close(self) -> None:
        if isinstance(self._callback, ReportingCallback):
            self._call("close")

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            self._call("on_run_start", self._run)

    def _call(self, name: str, *args: Any) -> None:
        # A hook that fails must not end the run. It is reported once, and called again.
        try:
            getattr(self._callback, name)(*args)
        except Exception as error:
            if name not in self._failed:
                self._failed.add(name)
                where = f"{type(self._callback).__name__}.{name}"
                log.exception("%s failed", where)
                for watcher in self._run.watchers:
                    watcher.on_note(
                        f"warning  {where} raised {type(error).__name__}: {error}; the run goes on"
                    )

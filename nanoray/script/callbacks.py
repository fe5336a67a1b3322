"""Hooks of a script: it overrides Callback, and the engine reports to an Observer of it."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from nanoray.machine.script_errors import one_line
from nanoray.observe.track.observer import Observer
from nanoray.script.run import Run

log = logging.getLogger("nanoray.rank")


class Callback:
    """Hooks that a script overrides to receive the reports of a run, on rank 0.

    They change nothing by themselves, but may call `run.log()`, `run.save()` and `run.stop()`: what
    they receive is a copy. An exception in one of them is logged, and the run goes on; SystemExit
    stops it as `run.stop()` does. All ranks wait for them, so they must be quick.
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


def observers_of(callbacks: Sequence[Callback], run: Run, model: nn.Module) -> list[Observer]:
    """Return an observer of each callback, in the order in which the engine calls them.

    One without hooks is the first: it picks up what the script has logged outside of callbacks.
    """
    return [CallbackObserver(each, run, model) for each in (Callback(), *callbacks)]


class CallbackObserver(Observer):
    """A script's callback as the engine calls it."""

    def __init__(self, callback: Callback, run: Run, model: nn.Module) -> None:
        self._callback = callback
        self._run = run
        self._model = model
        self._begun = False
        self._failed: set[str] = set()  # hooks that have raised, to warn once

    def on_note(self, text: str) -> None:
        self._begin()
        if text.startswith(("warning", "rejoin")):
            self._call("on_fault", text)

    def on_record(self, record: dict[str, Any]) -> None:
        self._begin()
        self._call("on_step_end", record["step"], record)
        if "val/loss" in record:
            self._call("on_eval_end", record["step"], record)

    def added(self) -> dict[str, Any]:
        """Return what the script has logged since the last call."""
        return self._run.take_logged()

    def on_saved(self, step: int) -> None:
        self._call("on_checkpoint", step)

    def on_end(self, outcome: Mapping[str, Any]) -> None:
        self._call("on_run_end", dict(outcome))

    def on_failure(self, error: BaseException) -> None:
        self._call("on_exception", error)

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            self._call("on_run_start", self._run)

    def _call(self, name: str, *args: Any) -> None:
        """Call a hook. Whatever it does, the run goes on, or stops with a checkpoint."""
        if not self._has(name):
            return
        where = f"{type(self._callback).__name__}.{name}"
        # A hook that evaluates the model may leave it in eval mode.
        modes = {module: module.training for module in self._model.modules()}
        try:
            # What the hook writes into a record or an outcome must not reach anything else.
            copies = [copy.deepcopy(arg) if isinstance(arg, dict) else arg for arg in args]
            getattr(self._callback, name)(*copies)
        except Exception as error:
            self._report_error(where, f"{where} raised {one_line(error)}; the run goes on", error)
        except SystemExit as error:
            self._run.stop()  # with a checkpoint
            self._report_error(where, f"{where} raised SystemExit; the run stops", error)
        for module, mode in modes.items():
            module.training = mode

    def _has(self, name: str) -> bool:
        """Return whether the script has overridden a hook, in its class or for this object."""
        if name in getattr(self._callback, "__dict__", ()):
            return True
        return getattr(type(self._callback), name, None) is not getattr(Callback, name, None)

    def _report_error(self, where: str, line: str, error: BaseException) -> None:
        """Warn once of a hook that has raised. It is called again."""
        if where not in self._failed:
            self._failed.add(where)
            log.error("%s failed", where, exc_info=error)
            self._note(f"warning  {line}")

    def _note(self, line: str) -> None:
        for observer in self._run.observers:
            observer.on_note(line)

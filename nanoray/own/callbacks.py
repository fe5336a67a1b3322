"""Hooks of a script: it overrides Callback, and the engine reports to an Observer of it."""

from __future__ import annotations

import copy
import logging
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nanoray.base.compat import writes_to
from nanoray.base.script_errors import one_line
from nanoray.mesh.rendezvous import Order
from nanoray.own.run import Run
from nanoray.train.track.observer import Observer

log = logging.getLogger("nanoray.rank")
SLOW_S = 10.0  # a hook that takes longer gets a warning, while it runs


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


class ReportingCallback(Callback):
    """A callback with an observer of its own, such as one that reports to a tracker."""

    def observer(self, run: Run) -> Observer:
        """Return the observer of a run."""
        raise NotImplementedError


def observers_of(callbacks: Sequence[Callback], run: Run, guard: HookGuard) -> list[Observer]:
    """Return an observer of each callback, in the order in which the engine calls them.

    One without hooks is the first: it picks up what the script has logged outside of callbacks.
    Those that report the record come last, so that they have what all others have logged.
    """
    calling = [CallbackObserver(each, run, guard) for each in (Callback(), *callbacks)]
    reporting = [each.observer(run) for each in callbacks if isinstance(each, ReportingCallback)]
    return [*calling, *reporting]


class CallbackObserver(Observer):
    """A script's callback as the engine calls it."""

    def __init__(self, callback: Callback, run: Run, guard: HookGuard) -> None:
        self._callback = callback
        self._run = run
        self._guard = guard
        self._begun = False
        self._warned: set[str] = set()  # what each hook was warned of, to warn once

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
        values = self._run.logged.take()
        for line in self._run.logged.warnings():
            self._note(line)
        return values

    def on_saved(self, step: int) -> None:
        self._call("on_checkpoint", step)

    def on_end(self, outcome: Mapping[str, Any]) -> None:
        self._call("on_run_end", dict(outcome))

    def on_failure(self, error: BaseException) -> None:
        self._call("on_exception", error)

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            self._name_strange_hooks()
            self._call("on_run_start", self._run)

    def _name_strange_hooks(self) -> None:
        """Note hooks of other trainers, or with a slip in the name: nothing would call them."""
        hooks = [name for name in vars(Callback) if name.startswith("on_")]
        for name in dir(type(self._callback)):
            if name.startswith("on_") and name not in hooks:
                self._note(
                    f"note    {type(self._callback).__name__}.{name} is no hook of "
                    f"nanoray.Callback, and nothing calls it; the hooks are {', '.join(hooks)}"
                )

    def _call(self, name: str, *args: Any) -> None:
        """Call a hook. Whatever it does, the run goes on, or stops with a checkpoint."""
        if not self._has(name):
            return
        where = f"{type(self._callback).__name__}.{name}"
        pid = os.getpid()
        before = self._guard.snapshot()
        error: BaseException | None = None
        limit_s = self._run.config.timeout_s
        slow = threading.Timer(min(SLOW_S, limit_s / 2), self._warn_of_slow, (where, limit_s))
        slow.daemon = True
        slow.start()
        try:
            # What the hook writes into a record or an outcome must not reach anything else.
            copies = [copy.deepcopy(arg) if isinstance(arg, dict) else arg for arg in args]
            getattr(self._callback, name)(*copies)
        except BaseException as raised:
            error = raised
        slow.cancel()

        # A child that the hook has forked has come back with it: it must not train.
        if os.getpid() != pid:
            _end_child(error)
        # The user has pressed Ctrl-C twice, in a notebook: this is no error of the hook's.
        if isinstance(error, KeyboardInterrupt) and self._run.wanted() is Order.STOP:
            raise error

        if error is not None:
            self._report_error(where, error)
        changed = self._guard.changes_since(before)
        if changed:
            self._warn_once(
                f"{where} has changed",
                f"{where} has changed {changed}. A callback runs on rank 0 alone and must change "
                "nothing: other ranks, and a resume, do not repeat it",
            )

    def _has(self, name: str) -> bool:
        """Return whether the script has overridden a hook, in its class or for this object."""
        if name in getattr(self._callback, "__dict__", ()):
            return True
        return getattr(type(self._callback), name, None) is not getattr(Callback, name, None)

    def _warn_of_slow(self, where: str, limit_s: float) -> None:
        """Warn of a hook that runs on. (in a thread, while the training thread is in the hook)"""
        line = f"{where} has not returned yet, and training waits for it"
        if self._run.world_size > 1:
            line += f"; after timeout_s = {limit_s:g} s the other ranks take this one for hung"
        self._warn_once(f"{where} is slow", line)

    def _report_error(self, where: str, error: BaseException) -> None:
        """Warn of a hook that has raised. It is called again."""
        end = "the run goes on"
        if isinstance(error, (SystemExit, KeyboardInterrupt)):
            # The hook wants the run to end: it ends as by `run.stop()`, with a checkpoint.
            self._run.stop()
            end = "the run stops, with a checkpoint"
        what = f"{where} raised {type(error).__name__}"
        if what not in self._warned:
            log.error("%s failed", where, exc_info=error)
        self._warn_once(what, f"{where} raised {one_line(error)}; {end}")

    def _warn_once(self, what: str, line: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            self._note(f"warning  {line}")

    def _note(self, line: str) -> None:
        for observer in self._run.observers:
            observer.on_note(line)


def _end_child(error: BaseException | None) -> None:
    """End this process, which a hook has forked, as Python would end it."""
    code = 0
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    elif error is not None:
        code = 1
        log.error("a child of a hook failed", exc_info=error)
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # of any class: a program may have put its own there
            stream.flush()
    os._exit(code)


# What the hooks of callbacks must leave as it is: the model, its gradients, the optimizer.
#
# Callbacks run on rank 0 alone, so what one of them changes there makes the ranks differ. Hooks that
# only evaluate the model may set its mode, which is put back. Everything else that they change stays,
# and gets a warning. It is found by the counters of torch's tensors, without reading a value: a write
# through `.data` has none, and shows where ranks compare their hashes.


class HookSnapshot(NamedTuple):
    """What the model and the optimizer were like at one moment."""

    modes: list[tuple[nn.Module, bool]]
    tensors: dict[str, tuple[int, int]]  # the identity and the counter of each
    settings: dict[str, Any]  # of the optimizer's groups, and which weights are trained


class HookGuard:
    """The model and the optimizer of a script, around the hooks of its callbacks."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer

    def snapshot(self) -> HookSnapshot:
        """Return what there is at this moment."""
        modes = [(module, module.training) for module in self._model.modules()]
        tensors: dict[str, tuple[int, int]] = {}
        settings: dict[str, Any] = {}
        for name, p in self._model.named_parameters():
            tensors[name] = _mark(p)
            if p.grad is not None:
                tensors[f"the gradient of {name}"] = _mark(p.grad)
            settings[f"requires_grad of {name}"] = p.requires_grad
        for name, buffer in self._model.named_buffers():
            tensors[name] = _mark(buffer)
        for number, group in enumerate(self._optimizer.param_groups):
            for key, value in group.items():
                if key != "params":
                    name = f"{key} of the optimizer's group {number}"
                    settings[name] = _mark(value) if isinstance(value, Tensor) else repr(value)
        return HookSnapshot(modes, tensors, settings)

    def changes_since(self, before: HookSnapshot) -> str | None:
        """Put the modes back; return what else a hook has changed, or None for nothing."""
        for module, mode in before.modes:
            if module.training != mode:
                module.training = mode
        after = self.snapshot()
        names = _differences(before.tensors, after.tensors)
        names += _differences(before.settings, after.settings)
        if len(names) > 1:
            return f"{names[0]} and {len(names) - 1} more"
        return names[0] if names else None


def _mark(tensor: Tensor) -> tuple[int, int]:
    return id(tensor), writes_to(tensor)


def _differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the names whose values differ, or that one of the two has not."""
    names = {**before, **after}
    return [name for name in names if before.get(name) != after.get(name)]

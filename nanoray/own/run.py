"""One rank's part of a run, as a script's function receives it."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanoray.base.metrics import METRICS, RECORD_KEYS
from nanoray.checkpoint.run import RunSpec
from nanoray.config import Config
from nanoray.mesh.rendezvous import Order, Rendezvous

# Values that a script adds to the records of its run: Run.log keeps them until the next record.
#
# Only plain values are kept, as they were when they were logged: a record is JSON, and is written
# while the script goes on. What cannot be kept is left out, with one warning for each name.


Value = float | int | str
LONGEST_NAME = 200  # characters
LONGEST_TEXT = 4_000  # characters; a tag of MLflow takes 8,000
MOST_NAMES = 500  # of one record
MOST_WARNINGS = 20  # names that get one
MOST_BYTES = 32_768  # of one record; readers take 65,536 bytes for the longest line


class Logged:
    """The values that wait for the next record. (any thread)"""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, Value] = {}
        self._refused: set[str] = set()  # names for which there was a warning
        self._warnings: list[str] = []

    def add(self, values: Any) -> None:
        """Keep values by their names; the later one of a name counts. Raises nothing."""
        if not isinstance(values, Mapping):
            self._refuse("run.log", f"had {_kind(values)} in place of a dict of names and values")
            return
        for name, value in list(values.items()):
            try:
                key = _name(name)
                plain = _plain(value)
            except ValueError as error:
                self._refuse(_quoted(name), str(error))
                continue
            with self._lock:
                is_known = key in self._values
                if is_known or len(self._values) < MOST_NAMES:
                    self._values[key] = plain
                    continue
            self._refuse("run.log", f"had more than {MOST_NAMES} names for one record")

    def take(self) -> dict[str, Value]:
        """Return the values since the last call."""
        with self._lock:
            values = self._values
            self._values = {}
        taken: dict[str, Value] = {}
        size = 0
        for name, value in values.items():
            size += len(json.dumps({name: value}))
            if size > MOST_BYTES:
                self._refuse("run.log", f"had more than {MOST_BYTES} bytes for one record")
                break
            taken[name] = value
        return taken

    def warnings(self) -> list[str]:
        """Return the warnings since the last call."""
        with self._lock:
            warnings = self._warnings
            self._warnings = []
        return warnings

    def _refuse(self, what: str, why: str) -> None:
        key = f"{what} {why}" if what == "run.log" else what
        with self._lock:
            if key in self._refused or len(self._refused) >= MOST_WARNINGS:
                return
            self._refused.add(key)
            self._warnings.append(f"warning  {what} {why}; it is left out of the record")


def _name(name: Any) -> str:
    """Return the name of a value. Raises ValueError for one that a record cannot have."""
    if not isinstance(name, str) or not name.strip():
        raise ValueError("is no name for run.log; give a text")
    if len(name) > LONGEST_NAME:
        raise ValueError(f"has {len(name)} characters, and run.log takes {LONGEST_NAME}")
    if name in METRICS or name in RECORD_KEYS:
        raise ValueError("is a name of nanoray's own; choose another one for run.log")
    return _writable(name)


def _plain(value: Any) -> Value:
    """Return a number or a text as Python's own. Raises ValueError for anything else."""
    if isinstance(value, str):
        if len(value) > LONGEST_TEXT:
            raise ValueError(f"is a text of {len(value)} characters; run.log takes {LONGEST_TEXT}")
        return _writable(value)

    # A tensor, an array or a scalar of numpy.
    if not isinstance(value, int | float) and hasattr(value, "item"):
        try:
            value = value.item()
        except Exception as error:  # of another package: more than one element, or no value at all
            raise ValueError(f"is {_kind(value)} without one value; log a number") from error
    if isinstance(value, bool) or not isinstance(value, int | float):
        try:
            value = _as_number(value)
        except (TypeError, ValueError, ArithmeticError) as error:
            raise ValueError(f"is {_kind(value)}; run.log takes numbers and texts") from error
    try:
        as_float = float(value)
    except OverflowError:
        as_float = math.inf
    if not math.isfinite(as_float):
        raise ValueError(f"is {as_float}, which JSON cannot contain")
    # Classes of the script that are numbers, such as an IntEnum, would be written in their own way.
    if isinstance(value, int):
        return int(value)
    return as_float


def _as_number(value: Any) -> float | int:
    """Return a bool as 0 or 1, and a Fraction or Decimal as a float."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, bytes | bytearray):
        raise TypeError("float() would parse it")
    return float(value)


def _writable(text: str) -> str:
    """Return a text without lone surrogates, which no file can contain."""
    return str(text).encode("utf-8", "replace").decode("utf-8")


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}"


def _quoted(name: Any) -> str:
    """Return a name for a message, in one line."""
    if not isinstance(name, str):
        return _kind(name)
    return repr(name if len(name) <= 40 else f"{name[:40]}...")


# The run.


class DryRunEnded(BaseException):
    """Raised by `fit` at the end of a dry run; no `except Exception` of a script catches it."""


@dataclass
class Run:
    """One rank's part of a run.

    nanoray.launch passes it to the script's function, on every rank; a callback receives it on rank
    0; in a plain script it is the engine's attribute `run`. Rank and number of ranks may change
    after a fault, so read them when they are needed.
    """

    spec: RunSpec
    """what all ranks share: configuration, data set, folder, and `started` (Unix seconds)"""

    rendezvous: Rendezvous
    """this rank's place, device and address; of the launchers"""

    given: frozenset[str]
    """keys of the configuration that the script has set; of the launchers"""

    observers: Sequence[Any] = ()
    """observers of notes and records; of the launchers"""

    wanted: Callable[[], Order] = lambda: Order.GO_ON
    """the order of the launcher that started this rank; of the launchers"""

    store: Any = field(default=None, repr=False)
    """the TCPStore, if this process serves it; of the launchers"""

    rejoin: Any = field(default=None, repr=False)
    """waits for the next group after a fault; of the launchers"""

    outcome: dict[str, Any] | None = None
    """what `fit` has returned; None before its end"""

    # What the script has asked for
    _finish: bool = field(default=False, repr=False)
    _save: bool = field(default=False, repr=False)
    _voted_to_save: bool = field(default=False, repr=False)
    logged: Logged = field(default_factory=Logged, repr=False)
    """values that wait for the next record; of the engine"""

    on_fit: Callable[[Any], None] | None = None
    """of a dry run: receives the task that `fit` would train, and ends the script"""

    @property
    def config(self) -> Config:
        """The complete configuration, with all defaults."""
        return self.spec.config

    @property
    def folder(self) -> Path:
        """The run's folder: checkpoints, metrics.jsonl, logs. The same on all ranks."""
        return self.spec.folder

    @property
    def rank(self) -> int:
        """The number of this rank among all, from 0."""
        return self.rendezvous.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.rendezvous.world_size

    @property
    def local_rank(self) -> int:
        """The number of this rank among those of its node, from 0."""
        return self.rendezvous.local_rank

    @property
    def device(self) -> str:
        """The device of this rank, as torch.device takes it: `cpu`, or `cuda:0`."""
        return self.rendezvous.device

    def log(self, values: Mapping[str, Any]) -> None:
        """Add values to the record of a step: metrics.jsonl, TensorBoard and trackers. (any thread)

        Values are numbers, tensors of one element, or strings; names are free, but for those of
        docs/metrics.md. From `on_step_end` and `on_eval_end` they belong to that step, from
        anywhere else to the next record, and after the last one to that one. Of two values of a
        name the later one counts. Only those of rank 0 are recorded. What cannot be recorded is
        left out with a warning: this raises nothing.
        """
        self.logged.add(values)

    def stop(self) -> None:
        """End the run with a checkpoint, on all ranks after the same step. (any rank, any thread)

        From a callback, that is the step after the one that the callback was called for.
        """
        self._finish = True

    def save(self) -> None:
        """Save a checkpoint, on all ranks after the same step. (any rank, any thread)"""
        self._save = True

    def order(self) -> Order:
        """Return what this rank votes for in the next step."""
        order = self.wanted()
        self._voted_to_save = self._save
        self._save = False
        if self._finish:
            order = max(order, Order.FINISH)
        if self._voted_to_save:
            order = max(order, Order.SAVE)
        return order

    def group_lost(self) -> None:
        """Ask again for a checkpoint that the lost group may not have saved."""
        self._save = self._save or self._voted_to_save

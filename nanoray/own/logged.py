"""Values that a script adds to the records of its run: Run.log keeps them until the next record.

Only plain values are kept, as they were when they were logged: a record is JSON, and is written
while the script goes on. What cannot be kept is left out, with one warning for each name.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping
from typing import Any

from nanoray.base.metrics import METRICS, RECORD_KEYS

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

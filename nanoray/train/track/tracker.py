"""What a tracker of experiments is: the part that is different for W&B and MLflow.

    records of rank 0 ─► Tracking (tracking.py): a bounded queue ─► its thread ─► Tracker

A tracker's methods may take long, hang or raise. So they run in the thread of a `Tracking`, one
after the other, except `problem`.
"""

from __future__ import annotations

import importlib.util
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from nanoray.checkpoint.run import RunSpec


@dataclass(frozen=True)
class TrackedRun:
    """A run as a tracker shows it."""

    name: str  # that of the run's folder
    folder: Path
    config: dict[str, Any]
    known_id: str  # the tracker's id of this run, from an earlier process of it; "" for none


@dataclass(frozen=True)
class Results:
    """How a run ended."""

    values: dict[str, Any]  # the outcome's numbers and words
    sample: str  # of text; "" for none
    status: str  # finished, stopped, failed, or "" where another process goes on with the run


class Tracker(ABC):
    """One run in one tracker. The constructors of its classes need no package and no network."""

    kind: ClassVar[str]  # its name in `--track`, and its extra in `pip install 'nanoray[...]'`
    packages: ClassVar[tuple[str, ...]]  # that must be importable

    @property
    def key(self) -> str:
        """The name that differs between two trackers of one run, such as `wandb/PROJECT`."""
        return self.kind

    def missing(self) -> str | None:
        """Return the line that refuses a run without the packages; None if they are there."""
        absent = [name for name in self.packages if importlib.util.find_spec(name) is None]
        if not absent:
            return None
        return (
            f"track = {self.kind} needs the package {', '.join(absent)}, which this Python does "
            f"not have; run: pip install 'nanoray[{self.kind}]'"
        )

    @abstractmethod
    def problem(self, run: TrackedRun) -> str | None:
        """Return why this process cannot report the run, and the remedy; None if it can.

        It is called before step 1, and imports the package: an import beside the first steps would
        slow them. It must not wait for a network.
        """

    @abstractmethod
    def start(self, run: TrackedRun, keep_id: Callable[[str], None]) -> str:
        """Begin the tracker's run, or continue the one with `known_id`; return where it is.

        `keep_id` must be called with its id as soon as that is known.
        """

    @abstractmethod
    def describe(self, units: Mapping[str, str]) -> None:
        """Note the units of metrics, by their names, before the first value of each."""

    @abstractmethod
    def log(self, step: int, time_s: float, values: Mapping[str, float | str]) -> None:
        """Report the metrics of a logged step; `time_s` is in Unix seconds.

        `values` contains those that a script has logged as well, which may be texts.
        """

    @abstractmethod
    def finish(self, step: int, results: Results) -> None:
        """Report how the run ended, and flush."""


def tracked_run(spec: RunSpec, known_id: str = "") -> TrackedRun:
    """Return what a tracker may see of a run.

    The values of environment variables stay out of it: they may be keys and passwords.
    """
    config = spec.config.model_dump()
    config["env"] = sorted(spec.config.env)
    return TrackedRun(spec.folder.name, spec.folder, config, known_id)


def without_passwords(text: str) -> str:
    """Return a text without the user and password of the addresses in it.

    Messages of other packages quote the address that they were given.
    """
    return re.sub(r"(\w://)[^/\s@]*@", r"\1", text)


def flattened(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested mapping with one level, its keys joined by dots."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= flattened(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat

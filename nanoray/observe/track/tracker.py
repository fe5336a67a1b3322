"""What a tracker of experiments is: the part that is different for W&B and MLflow.

records of rank 0 ─► Tracking (tracking.py): one call at a time ─► Tracker
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from nanoray.config import Config


@dataclass(frozen=True)
class Results:
    """How a run ended."""

    values: dict[str, Any]  # the outcome's numbers and words
    sample: str  # of text; "" for none
    status: str  # finished, stopped, failed, or "" where another process goes on with the run


class Tracker(Protocol):
    """One run in one tracker. Its methods may raise anything; `Tracking` calls them in a thread."""

    @property
    def kind(self) -> str:
        """Its name in `--track`, of its package, and of its extra: `pip install 'nanoray[...]'`."""

    def problem(self) -> str | None:
        """Return why this process cannot report a run, and the remedy; None if it can.

        It is called before step 1, and waits for no network.
        """

    def start(self, folder: Path, config: dict[str, Any], known_id: str) -> tuple[str, str]:
        """Begin the tracker's run, or continue the one with `known_id`; return its id and where it is.

        folder: that of the run; config: what the tracker may see of its configuration.
        """

    def log(self, step: int, time_s: float, values: Mapping[str, float | str]) -> None:
        """Report the metrics of a logged step; `time_s` is in Unix seconds.

        `values` contains those that a script has logged as well, which may be texts.
        """

    def finish(self, step: int, results: Results) -> None:
        """Report how the run ended, and flush."""


def missing_package(kind: str) -> str | None:
    """Return the line that refuses a run without a tracker's package; None if it is there."""
    if importlib.util.find_spec(kind) is not None:
        return None
    return (
        f"track = {kind} needs the package {kind}, which this Python does not have; run: pip "
        f"install 'nanoray[{kind}]'"
    )


def shown_config(config: Config) -> dict[str, Any]:
    """Return the configuration that a tracker may see, in one level, its keys joined by dots.

    The values of environment variables stay out of it: they may be keys and passwords.
    """
    values = config.model_dump()
    values["env"] = sorted(config.env)
    return flattened(values)


def flattened(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested mapping with one level, its keys joined by dots."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= flattened(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def without_passwords(text: str) -> str:
    """Return a text without the user and password of the addresses in it.

    Messages of other packages quote the address that they were given.
    """
    return re.sub(r"(\w://)[^/\s@]*@", r"\1", text)

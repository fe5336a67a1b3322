"""What a search has found, for a script that goes on with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoray.base.atomic import read_json


@dataclass(frozen=True)
class Tuned:
    """What a search has found."""

    settings: dict[str, Any]
    """keys of the configuration to set, as users write them; {} where nothing is faster"""

    speedup: float
    """how many times as fast as the present setting, the median of turns that measured both; 1.0
    where nothing is faster"""

    folder: Path
    """the folder of the search: tuned.yaml, tune.json (all choices), report.html"""

    table: list[dict[str, Any]]
    """the rows of tune.json, the fastest first"""


def read_tuned(folder: Path) -> Tuned:
    """Return what a search has written into its folder."""
    table = read_json(folder / "tune.json")
    best = bool(table["tuned"])
    return Tuned(
        table["tuned"],
        table["verdict"]["median"] if best else 1.0,
        folder,
        table["rows"],
    )

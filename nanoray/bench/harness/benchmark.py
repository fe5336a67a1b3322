"""What every benchmark implements; nanoray/bench/registry.py lists them."""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from pathlib import Path

from nanoray.bench.harness.report import WRONG_ELEMENTS, Report


class Benchmark(ABC):
    """One benchmark: its flags, its measurement, and the ways to show what it measured.

    `measure` needs the machine. The other methods read nothing but the report, so that they also
    work on a JSON file that was written elsewhere.
    """

    # What the column of wrong elements counts
    wrong = WRONG_ELEMENTS

    @abstractmethod
    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Add this benchmark's flags."""

    @abstractmethod
    def measure(self, args: argparse.Namespace, report: Report) -> None:
        """Measure every arm, and add rows and targets to the report as they come.

        Raises a NanorayError before the first row for flags that cannot be measured here.
        """

    def format_text(self, report: Report) -> list[str]:
        """Return the table and findings for the terminal; [] prints one line per row."""
        return []

    @abstractmethod
    def format_markdown(self, report: Report) -> list[str]:
        """Return the tables and findings for a page of the documentation."""

    @abstractmethod
    def draw(self, report: Report, path: Path) -> None:
        """Draw the report into a figure file; the suffix of `path` chooses its format."""

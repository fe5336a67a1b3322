"""What every benchmark implements; nanoray/bench/registry.py lists them.

A benchmark is arms × measures. It declares its flags that count, its tables and its figure, and
measures; printing and drawing are written once, here, in table.py and in figure.py.
"""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from nanoray.bench.harness.figure import Figure
from nanoray.bench.harness.rank_pool import RankFailed, RankPool, describe
from nanoray.bench.harness.ranks import Where
from nanoray.bench.harness.report import Report, table
from nanoray.bench.harness.table import Table
from nanoray.errors import ConfigError


@dataclass(frozen=True)
class Number:
    """A flag with a number above 0, such as --rounds.

    few   in place of `usual` under --quick
    zero  whether it may be 0
    """

    name: str
    what: str
    usual: float
    few: float | None = None
    zero: bool = False

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Add the flag; without it `read_numbers` decides."""
        default = f"{self.usual:g}"
        if self.few is not None:
            default += f"; {self.few:g} with --quick"
        text = f"{self.what} [{default}]"
        parser.add_argument(f"--{self.name}", type=type(self.usual), metavar="N", help=text)

    def of(self, args: argparse.Namespace) -> float:
        """Return the flag's number, or the one without it. Raises ConfigError for one that cannot be."""
        value: float | None = getattr(args, self.name)
        if value is None:
            return self.few if args.quick and self.few is not None else self.usual
        if value > 0 or (self.zero and value == 0):
            return value
        least = "0 or more" if self.zero else "a number above 0"
        raise ConfigError(
            f"{self.name} = {value:g}; give {least}, or leave it out for {self.usual:g}"
        )


class Benchmark(ABC):
    """One benchmark: its flags, its measurement, and the ways to show what it measured.

    `measure` needs the machine. The other methods read nothing but the report, so that they also
    work on a JSON file that was written elsewhere.
    """

    # Flags with a number; `args` has them when `measure` is called
    numbers: Sequence[Number] = ()
    tables: Sequence[Table] = ()
    # Whether the terminal has a line for each row, too: of a benchmark whose tables show only some
    shows_rows = False
    figure: Figure

    @abstractmethod
    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Add this benchmark's flags, but for `numbers`."""

    @abstractmethod
    def measure(self, args: argparse.Namespace, report: Report) -> None:
        """Measure every arm, and add rows and targets to the report as they come.

        Raises a NanorayError before the first row for flags that cannot be measured here. Rows that
        are made of several events belong into `part`, so that an interruption keeps them.
        """

    def notes(self, report: Report) -> list[str]:
        """Return lines that stand below the tables in the terminal."""
        return []

    def format_text(self, report: Report) -> list[str]:
        """Return what the terminal shows of the rows: tables, or a line per row, and the notes."""
        blocks = [each.format_text(report) for each in self.tables]
        if self.shows_rows or not any(blocks):
            blocks.append(table(report.rows))
        return _apart([*blocks, self.notes(report)])

    def format_markdown(self, report: Report) -> list[str]:
        """Return the tables for a page of the documentation."""
        return _apart([each.format_page(report) for each in self.tables])

    def draw(self, report: Report, path: Path) -> None:
        """Draw the report into a figure file; the suffix of `path` chooses its format."""
        self.figure.draw(report, path)


def _apart(blocks: Sequence[list[str]]) -> list[str]:
    """Join blocks of lines with a blank line between two; empty blocks are left out."""
    lines: list[str] = []
    for block in filter(None, blocks):
        lines += ["", *block] if lines else block
    return lines


def read_numbers(args: argparse.Namespace, numbers: Sequence[Number]) -> None:
    """Set the numbers of the flags. Raises ConfigError for one that cannot be."""
    for number in numbers:
        setattr(args, number.name, number.of(args))


@contextmanager
def part(report: Report, add_rows: Callable[[], None]) -> Iterator[None]:
    """Measure one part of a benchmark, then add its rows, however it ends.

    When a rank fails, that is a failure of the report, and the next part goes on. When a user
    interrupts, the rows hold the rounds until then, and __main__.py writes the report.
    """
    try:
        yield
    except RankFailed as error:
        report.failures.append(str(error))
    finally:
        add_rows()


def _no_rows() -> None:
    pass


@contextmanager
def ranks_for(
    report: Report, where: Where, add_rows: Callable[[], None] = _no_rows
) -> Iterator[RankPool]:
    """Start ranks for one part of a benchmark, and describe them in the report."""
    with part(report, add_rows), RankPool(where) as pool:
        describe(report, pool)
        yield pool

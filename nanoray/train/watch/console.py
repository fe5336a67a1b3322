"""The output of a command: lines, on a terminal a bar below them, or with --quiet only warnings."""

from __future__ import annotations

import logging
import sys
from math import nan
from typing import IO, Any, cast

from nanoray.base.output import STEPS, LastingStream, is_taken
from nanoray.base.text import short
from nanoray.train.watch.observers import Console


def choose_console(max_steps: int, quiet: bool) -> Console:
    """Return the console for what stdout is: a terminal that can erase a line, or anything else."""
    if quiet:
        return QuietConsole(max_steps)
    # A bar belongs to the lines above it, which the program's logging may have.
    goes_elsewhere = is_taken(logging.INFO, STEPS)
    if isinstance(sys.stdout, LastingStream) and sys.stdout.has_status and not goes_elsewhere:
        return TerminalConsole(max_steps, sys.stdout)
    return Console(max_steps)


class QuietConsole(Console):
    """Prints warnings, and nothing else."""

    def on_note(self, text: str) -> None:
        """Print a warning."""
        if text.startswith("warning"):
            super().on_note(text)

    def on_record(self, record: dict[str, Any]) -> None:
        """Print nothing."""


class TerminalConsole(Console):
    """Shows the newest record in a bar at the bottom, and prints each evaluation above it.

    The bar is drawn when a record arrives, without a thread; nothing remains on the terminal if the
    process is killed.
    """

    def __init__(self, max_steps: int, terminal: LastingStream) -> None:
        """`terminal` has a status line. NO_COLOR in the environment leaves colours out."""
        super().__init__(max_steps)
        from rich.console import Console as Screen  # imported only on a terminal

        self._terminal = terminal
        self._news: dict[str, str] = {}  # the newest text of each part of the bar
        self._screen = Screen(file=cast(IO[str], terminal), force_terminal=True, highlight=False)

    def on_record(self, record: dict[str, Any]) -> None:
        """Draw the bar anew; print the line of an evaluation."""
        if "val/loss" in record:
            super().on_record(record)

        # A part that this record lacks keeps its newest text: not every step is traced.
        news = self._news
        news["loss"] = f"loss {record.get('train/loss', nan):.4f}"
        for key, unit in (("perf/tok_per_sec", "tok/s"), ("perf/samples_per_sec", "samples/s")):
            if key in record:
                news["speed"] = f"{short(record[key])} {unit}"
        if "comm/exposed_share" in record:
            news["comm"] = f"comm exposed {record['comm/exposed_share']:.0f} %"
        parts = [news[key] for key in ("loss", "speed", "comm") if key in news]
        parts += self.eta(record)
        self._terminal.show(self._bar(record["step"], " · ".join(parts)))

    def _bar(self, step: int, news: str) -> str:
        """Return one line of at most the terminal's width, with escape codes for colours."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        count = f"step {step:>{len(str(self.max_steps))}}/{self.max_steps}"
        width = self._screen.width - 1  # a full line would wrap
        room = min(40, width - len(count) - len(news) - 4)
        row: list[Any] = [Text(count, "bold"), Text(news, no_wrap=True, overflow="ellipsis")]
        if room >= 5:
            row.insert(1, ProgressBar(self.max_steps, step, width=room))
        grid = Table.grid(padding=(0, 2))
        grid.add_row(*row)
        with self._screen.capture() as drawn:
            self._screen.print(grid, width=width, end="")
        return (drawn.get().splitlines() or [""])[0]

    def close(self) -> None:
        """Remove the bar."""
        self._terminal.show("")

"""The output of a command: lines, or with --quiet only warnings."""

from __future__ import annotations

from typing import Any

from nanoray.observe.watch.observers import Console


def choose_console(max_steps: int, quiet: bool) -> Console:
    """Return what prints notes and steps."""
    return QuietConsole(max_steps) if quiet else Console(max_steps)


class QuietConsole(Console):
    """Prints warnings, and nothing else."""

    def on_note(self, text: str) -> None:
        """Print a warning."""
        if text.startswith("warning"):
            super().on_note(text)

    def on_record(self, record: dict[str, Any]) -> None:
        """Print nothing."""

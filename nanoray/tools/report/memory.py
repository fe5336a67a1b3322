"""Read and format the memory timelines that `--memory_at` wrote: each rank's memory in one step.

Imports no torch, so that a page is written within a second.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nanoray.base.atomic import read_json
from nanoray.base.text import aligned

COLUMNS = ("category", "at the peak", "most", "formula", "most / formula")


def read_memory(folder: Path) -> list[dict[str, Any]]:
    """Return the timelines of the newest recorded step, ordered by rank."""
    # The run may be writing one of the files, or was killed while it did.
    timelines = [
        timeline for path in folder.glob("memory/rank*.json") if (timeline := read_json(path))
    ]

    # A rank that did not take part in the newest recorded step left the file of an older one.
    newest_step = max((timeline["step"] for timeline in timelines), default=0)
    of_newest_step = [timeline for timeline in timelines if timeline["step"] == newest_step]
    return sorted(of_newest_step, key=lambda timeline: int(timeline["rank"]))


def format_mib(size: int | None) -> str:
    """Return bytes as MiB; a question mark for what is not known."""
    if size is None:
        return "?"
    return f"{size / 2**20:,.3f} MiB"


def peak_line(timeline: dict[str, Any]) -> str:
    """Format a rank's peak: bytes, place and time, against the formula and CUDA's allocator."""
    peak = timeline["peak"]
    line = (
        f"memory of step {timeline['step']}, rank {timeline['rank']} on {timeline['device']}: "
        f"{format_mib(peak['bytes'])} at most, in {peak['place']}, "
        f"{peak['ms']:.1f} ms after it began"
    )
    # Not every layout has a formula for its peak.
    formula = timeline["formula"].get("peak")
    if formula:
        deviation = 100 * (peak["bytes"] / formula - 1)
        line += f", {deviation:+.1f} % against the formula's {format_mib(formula)}"
    if timeline["allocator"]:
        line += f"; CUDA's allocator had given out {format_mib(timeline['allocator'])} at most"
    return line


def category_rows(timeline: dict[str, Any]) -> list[list[str]]:
    """Return a row of COLUMNS for each category, as text."""
    table = []
    for category in timeline["categories"]:
        at_peak = timeline["peak"][category]
        most = timeline["most"][category]
        # A category without a formula has no ratio; a formula of 0 bytes has none either.
        formula = timeline["formula"].get(category)
        ratio = ""
        if formula:
            ratio = f"{most / formula:.3f}"
        table.append([category, format_mib(at_peak), format_mib(most), format_mib(formula), ratio])
    return table


def format_timeline(timeline: dict[str, Any]) -> list[str]:
    """Return a rank's peak and the table of its categories as lines."""
    return [peak_line(timeline), *aligned([COLUMNS, *category_rows(timeline)])]

"""Read and tell the memory timelines that `--memory_at` wrote: where each rank's memory went in one
step. No torch.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

COLUMNS = ("category", "at the peak", "most", "formula", "most / formula")


def read_memory(folder: Path) -> list[dict[str, Any]]:
    """Return the timelines of a run's ranks, of the newest step that some rank has recorded."""
    found = []
    for path in folder.glob("memory/rank*.json"):
        with suppress(OSError, ValueError):
            found.append(json.loads(path.read_text(encoding="utf-8")))
    newest = max((of_rank["step"] for of_rank in found), default=0)
    return sorted(
        (of for of in found if of["step"] == newest), key=lambda of_rank: int(of_rank["rank"])
    )


def mib(size: int | None) -> str:
    """Return bytes as MiB; a question mark for what is not known."""
    return "?" if size is None else f"{size / 2**20:,.3f} MiB"


def head(of_rank: dict[str, Any]) -> str:
    """Return one line on a rank's peak: how much, where and when, against the formula and CUDA's
    allocator.
    """
    peak, formula = of_rank["peak"], of_rank["formula"].get("peak")
    told = (
        f", {100 * (peak['bytes'] / formula - 1):+.1f} % against the formula's {mib(formula)}"
        if formula
        else ""
    )
    if of_rank["allocator"]:
        told += f"; CUDA's allocator had given out {mib(of_rank['allocator'])} at most"
    return (
        f"memory of step {of_rank['step']}, rank {of_rank['rank']} on {of_rank['device']}: "
        f"{mib(peak['bytes'])} at "
        f"most, in {peak['place']}, {peak['ms']:.1f} ms after it began{told}"
    )


def rows(of_rank: dict[str, Any]) -> list[list[str]]:
    """Return for each category its bytes at the peak, the most that it had in the step, and the
    formula's, as text.
    """
    found = []
    for name in of_rank["categories"]:
        most, formula = of_rank["most"][name], of_rank["formula"].get(name)
        ratio = f"{most / formula:.3f}" if formula else ""
        found.append([name, mib(of_rank["peak"][name]), mib(most), mib(formula), ratio])
    return found


def told_memory(of_rank: dict[str, Any]) -> list[str]:
    """Return a rank's peak and the table of its categories as lines."""
    table = [[*COLUMNS], *rows(of_rank)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    cells = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]
    return [head(of_rank), *cells]

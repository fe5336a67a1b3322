"""Figures of reports: one way to open, label and write them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import wrap
from typing import Any

from nanoray.bench.harness.report import Report, Row, condition


@contextmanager
def figure(
    report: Report,
    path: Path,
    size: tuple[float, float] = (11, 3.6),
    grid: tuple[int, int] = (1, 2),
    note: str = "",
) -> Iterator[list[Any]]:
    """Yield the axes of a figure of `grid` rows and columns; write it with its conditions, and
    `note`, at the foot.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn, axes = pyplot.subplots(*grid, figsize=size, layout="constrained", squeeze=False)
    try:
        yield list(axes.flat)
        # 17 to an inch
        foot = [line for text in (note, footer(report)) for line in wrap(text, int(17 * size[0]))]
        drawn.supxlabel("\n".join(foot), fontsize=7)
        drawn.savefig(path, dpi=150)
    finally:
        pyplot.close(drawn)


def footer(report: Report) -> str:
    """Return how the numbers were obtained, in one text: command, date, machine and versions."""
    told = report.conditions
    machine = told.get("gpus") or [told.get("cpu", {}).get("name", "")]
    parts = (told.get("command"), told.get("date"), machine[0], condition(told.get("versions", {})))
    return "  ·  ".join(part for part in parts if part and part != "none")


def whiskers(rows: Sequence[Row], quartiles: bool = False) -> list[list[float]]:
    """Return the error bars of medians: down to the lowest value and up to the highest, or the
    quartiles.
    """
    ends = [row.quartiles if quartiles else (min(row.values), max(row.values)) for row in rows]
    pairs = list(zip(rows, ends, strict=True))
    return [
        [row.median - low for row, (low, _) in pairs],
        [high - row.median for row, (_, high) in pairs],
    ]


def bars(axes: Any, rows: Sequence[Row], quartiles: bool = False, **style: Any) -> None:
    """Draw a horizontal bar per row: its median with whiskers, named by its arm."""
    arms, medians = [row.arm for row in rows], [row.median for row in rows]
    axes.barh(arms, medians, **{"xerr": whiskers(rows, quartiles), "capsize": 3} | style)


def measured(report: Report, arms: Sequence[str], metric: str) -> list[Row]:
    """Return the rows of a metric that have values, in the order of `arms`."""
    return [row for arm in arms if (row := report.row(arm, metric)) and row.values]

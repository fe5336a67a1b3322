"""Figures of reports: one way to open, label and write them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import wrap
from typing import Any

from nanoray.bench.harness.report import Measurement, Report, condition


@contextmanager
def figure(
    report: Report,
    path: Path,
    size: tuple[float, float] = (11, 3.6),
    grid: tuple[int, int] = (1, 2),
    note: str = "",
) -> Iterator[list[Any]]:
    """Yield the axes of a figure of `grid` rows and columns, and write the figure to `path`.

    Its conditions, and `note`, stand at the foot.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn, axes = pyplot.subplots(*grid, figsize=size, layout="constrained", squeeze=False)
    try:
        yield list(axes.flat)
        width = int(17 * size[0])  # characters of the foot: 17 to an inch
        foot = wrap(note, width) + wrap(footer(report), width)
        drawn.supxlabel("\n".join(foot), fontsize=7)
        drawn.savefig(path, dpi=150)
    finally:
        pyplot.close(drawn)


def footer(report: Report) -> str:
    """Return how the numbers were obtained, in one text: command, date, machine and versions."""
    known = report.conditions
    machine = known.get("gpus") or [known.get("cpu", {}).get("name", "")]
    versions = condition(known.get("versions", {}))
    parts = (known.get("command"), known.get("date"), machine[0], versions)
    return "  ·  ".join(part for part in parts if part and part != "none")


def whiskers(rows: Sequence[Measurement], quartiles: bool = False) -> list[list[float]]:
    """Return the error bars of medians: to the lowest and highest value, or to the quartiles."""
    down = []
    up = []
    for row in rows:
        low, high = row.quartiles if quartiles else (min(row.values), max(row.values))
        down.append(row.median - low)
        up.append(high - row.median)
    return [down, up]


def bars(axes: Any, rows: Sequence[Measurement], quartiles: bool = False, **style: Any) -> None:
    """Draw a horizontal bar per row: its median with whiskers, named by its arm."""
    arms = [row.arm for row in rows]
    medians = [row.median for row in rows]
    axes.barh(arms, medians, **{"xerr": whiskers(rows, quartiles), "capsize": 3} | style)


def measured(report: Report, arms: Sequence[str], metric: str) -> list[Measurement]:
    """Return the rows of a metric that have values, in the order of `arms`."""
    rows = [report.row(arm, metric) for arm in arms]
    return [row for row in rows if row and row.values]

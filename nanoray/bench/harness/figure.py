"""Figures of reports: one is a row of declared panels, and is opened, labelled and written here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import wrap
from typing import Any

from nanoray.bench.harness.report import Measurement, Report, condition


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    draw    puts the marks of a report on the axes
    axes    what `axes.set` takes: title, labels, limits, scales
    legend  what `axes.legend` takes; None: there is none
    down    from the top down, as bars are read
    """

    draw: Callable[[Any, Report], None]
    axes: Mapping[str, Any] = field(default_factory=dict)
    legend: Mapping[str, Any] | None = None
    grid: bool = False
    down: bool = False

    def put_on(self, axes: Any, report: Report) -> None:
        """Draw a report on these axes, and label them."""
        self.draw(axes, report)
        if self.axes:
            axes.set(**self.axes)
        if self.grid:
            axes.grid(alpha=0.25)
        if self.down:
            axes.invert_yaxis()
        if self.legend is not None and axes.get_legend_handles_labels()[0]:
            axes.legend(**self.legend)


@dataclass(frozen=True)
class Figure:
    """A figure: its panels, and what stands at its foot.

    note  the conditions that explain it, or a function that writes them
    """

    panels: Sequence[Panel] | Callable[[Report], Sequence[Panel]]
    size: tuple[float, float] | Callable[[Report], tuple[float, float]] = (11, 3.6)
    rows: int = 1
    note: Sequence[str] | Callable[[Report], str] = ()

    def draw(self, report: Report, path: Path) -> None:
        """Draw a report into a figure file; the suffix of `path` chooses its format."""
        panels = self.panels(report) if callable(self.panels) else self.panels
        size = self.size(report) if callable(self.size) else self.size
        if callable(self.note):
            note = self.note(report)
        else:
            known = report.conditions
            note = " · ".join(str(known[key]) for key in self.note if key in known)
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        grid = (self.rows, max(1, len(panels) // self.rows))
        drawn, every = pyplot.subplots(*grid, figsize=size, layout="constrained", squeeze=False)
        try:
            for axes, panel in zip(every.flat, panels, strict=False):
                panel.put_on(axes, report)
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


# Marks: each takes the rows that it shows.


def whiskers(rows: Sequence[Measurement], quartiles: bool = False) -> list[list[float]]:
    """Return the error bars of medians: to the lowest and highest value, or to the quartiles."""
    down = []
    up = []
    for row in rows:
        low, high = row.quartiles if quartiles else (min(row.values), max(row.values))
        down.append(row.median - low)
        up.append(high - row.median)
    return [down, up]


def dots(
    axes: Any,
    at: Sequence[Any],
    rows: Sequence[Measurement],
    quartiles: bool = True,
    across: bool = False,
    **style: Any,
) -> None:
    """Draw the medians of rows at numbers or names, with whiskers; across: values go to the right."""
    if not rows:
        return
    medians = [row.median for row in rows]
    spread = whiskers(rows, quartiles)
    style = {"fmt": "o", "capsize": 2} | style
    if across:
        axes.errorbar(medians, at, xerr=spread, **style)
    else:
        axes.errorbar(at, medians, yerr=spread, **style)


def bars(axes: Any, rows: Sequence[Measurement], quartiles: bool = False, **style: Any) -> None:
    """Draw a horizontal bar per row: its median with whiskers, named by its arm."""
    arms = [row.arm for row in rows]
    medians = [row.median for row in rows]
    axes.barh(arms, medians, **{"xerr": whiskers(rows, quartiles), "capsize": 3} | style)


def with_values(report: Report, metric: str, ratios: bool = False) -> list[Measurement]:
    """Return the rows of a metric that have values, of arms or of ratios."""
    return [
        row
        for row in report.rows
        if row.metric == metric and row.values and (row.unit == "ratio") == ratios
    ]


def measured(report: Report, arms: Sequence[str], metric: str) -> list[Measurement]:
    """Return the rows of a metric that have values, in the order of `arms`."""
    rows = [report.row(arm, metric) for arm in arms]
    return [row for row in rows if row and row.values]

"""The charts of a page: the loss, and smaller ones: speed, where the time went, memory, communication."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from nanoray.observe.report.figures import LOSS
from nanoray.observe.report.gather import RunFiles
from nanoray.observe.trace.accounts import MEANINGS

FAULTS = 100  # most faults that are marked, the newest ones
POINTS = 600  # most points of a curve; more make the page large and cannot be seen
COLOURS = ("#3a7bd5", "#d9772b", "#2b9c73", "#a45bc4", "#c94f5d", "#7f8c2f", "#3aa0b8", "#8d6e63")
FAULT = "#c0392b"
LARGE = (11, 4)  # inches
SMALL = (7, 3)


class Chart(NamedTuple):
    """Metrics to draw over steps: of each run the first that it has recorded."""

    title: str
    metrics: tuple[str, ...]


class Drawing(NamedTuple):
    """A chart as base64 of an SVG."""

    title: str
    image: str


LOSS_CHART = Chart("loss; bold: mean of the steps around each one; dots: validation", LOSS)
SPEED = Chart("tokens or samples per second", ("perf/tok_per_sec", "perf/samples_per_sec"))
OTHERS = (
    Chart("peak memory of rank 0 (GiB)", ("mem/peak_gib",)),
    Chart("memory of the largest rank (GiB)", ("mem/rss_gib",)),
    Chart("memory of the fullest GPU (GiB)", ("gpu/mem_gib",)),
    Chart("load of the busiest GPU (%)", ("gpu/load",)),
    Chart("exposed communication (% of the step)", ("comm/exposed_share",)),
)


def loss_chart(runs: Sequence[RunFiles]) -> Drawing | None:
    """Return the drawing of the loss; None if no run has recorded one."""
    drawn = _draw_known([LOSS_CHART], runs, LARGE)
    return drawn[0] if drawn else None


def small_charts(runs: Sequence[RunFiles]) -> list[Drawing]:
    """Return the drawing of each other chart for which some run has values."""
    drawn = _draw_known([SPEED], runs, SMALL)
    if any(run.accounts for run in runs):
        title = "share of the time of all ranks (%)"
        drawn.append(_drawing(title, SMALL, partial(_draw_time, runs)))
    return drawn + _draw_known(OTHERS, runs, SMALL)


def _draw_known(
    charts: Sequence[Chart], runs: Sequence[RunFiles], size: tuple[int, int]
) -> list[Drawing]:
    """Return the drawing of each chart for which some run has two points of a curve."""
    return [
        _drawing(chart.title, size, partial(_draw_curves, chart, runs))
        for chart in charts
        if any(len(run.series(*chart.metrics)[0]) > 1 for run in runs)
    ]


def running_mean(values: Sequence[float]) -> list[float]:
    """Return the mean of the values around each one.

    Towards either end fewer values are taken, as many on one side as on the other. So the curve
    begins and ends on the data, and does not lag behind a loss that falls.
    """
    reach = max(2, len(values) // 20)
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)

    means = []
    for i in range(len(values)):
        side = min(reach, i, len(values) - 1 - i)
        means.append((sums[i + side + 1] - sums[i - side]) / (2 * side + 1))
    return means


def thinned(steps: list[int], values: list[float]) -> tuple[list[int], list[float]]:
    """Return at most POINTS points of a curve, which keeps its peaks.

    Each stretch of steps keeps its lowest and its highest value.
    """
    if len(steps) <= POINTS:
        return steps, values
    stretch = math.ceil(2 * len(steps) / POINTS)
    kept: list[int] = []
    for start in range(0, len(steps), stretch):
        indices = range(start, min(start + stretch, len(steps)))
        lowest = min(indices, key=values.__getitem__)
        highest = max(indices, key=values.__getitem__)
        kept += sorted({lowest, highest})  # in a flat stretch they are the same point
    return [steps[i] for i in kept], [values[i] for i in kept]


def _draw_curves(chart: Chart, runs: Sequence[RunFiles], axes: Any) -> None:
    """Draw each run's curve and its faults; of the loss also its mean and the validation losses."""
    for number, run in enumerate(runs):
        colour = COLOURS[number % len(COLOURS)]
        steps, values = run.series(*chart.metrics)
        if chart is LOSS_CHART:
            # The mean is drawn over the noisy curve, which is thin and pale.
            axes.plot(*thinned(steps, values), color=colour, lw=0.8, alpha=0.45)
            axes.plot(*thinned(steps, running_mean(values)), color=colour, lw=1.8)
            axes.plot(*thinned(*run.series("val/loss")), "o", color=colour, ms=4)
        else:
            axes.plot(*thinned(steps, values), color=colour, lw=1.2)
        for fault in run.faults[-FAULTS:]:
            axes.axvline(fault["step"], color=FAULT, lw=0.7, ls=":")
    axes.set_xlabel(runs[0].unit)
    axes.grid(lw=0.5)
    if chart is not LOSS_CHART:
        axes.set_ylim(bottom=0)


def _draw_time(runs: Sequence[RunFiles], axes: Any) -> None:
    """Draw a bar for each run: the accounts of its ledger, one after the other."""
    from matplotlib import colormaps

    with_ledger = [(run.name, run.accounts) for run in runs if run.accounts]
    left = [0.0] * len(with_ledger)
    for number, account in enumerate(MEANINGS):
        shares = [
            100 * accounts.seconds[account] / (accounts.total or 1) for _, accounts in with_ledger
        ]
        if not any(shares):
            continue
        colour = colormaps["tab20"](number)
        axes.barh(range(len(shares)), shares, left=left, color=colour, label=account)
        left = [start + share for start, share in zip(left, shares, strict=True)]
    names = [name for name, _ in with_ledger] if len(with_ledger) > 1 else [""]
    axes.set_yticks(range(len(names)), names)
    axes.set_xlim(0, 100)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=4, frameon=False, fontsize=7)


def _drawing(title: str, size: tuple[int, int], draw: Callable[[Any], None]) -> Drawing:
    """Return the picture of what `draw` puts on its axes. Equal input gives equal bytes."""
    # Importing matplotlib takes longer than the rest of the command.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    file = io.StringIO()
    with rc_context({"svg.hashsalt": title, "font.size": 9}):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure.subplots())
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return Drawing(title, base64.b64encode(file.getvalue().encode()).decode())

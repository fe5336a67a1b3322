"""Curves over steps as SVG for the middle of an HTML page: text and axes take the colours of the page around them."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from nanoray.report.gather import Run

FAULTS = 100  # newest ones that are marked
POINTS = 600  # of a curve; more make the page large and cannot be seen
COLOURS = ("#3a7bd5", "#d9772b", "#2b9c73", "#a45bc4", "#c94f5d", "#7f8c2f", "#3aa0b8", "#8d6e63")
_TEXT, _GRID = "#010203", "#010204"  # stand-ins: the page puts its own colours in their place
FAULT = "#c0392b"


class Chart(NamedTuple):
    """A metric to draw, the line that smooths it, and points beside it."""

    title: str
    metric: str
    smooth: str = ""
    points: str = ""
    log: bool = False


CHARTS = (
    Chart("loss (nat/token); dots: validation", "train/loss", "train/loss_ema", "val/loss"),
    Chart("tokens per second", "perf/tok_per_sec"),
    Chart("samples per second", "perf/samples_per_sec"),
    Chart("learning rate", "train/lr"),
    Chart("gradient norm", "train/grad_norm", log=True),
    Chart("time per step (ms)", "time/step_ms"),
    Chart("exposed communication (% of the step)", "comm/exposed_share"),
    Chart("peak memory of rank 0 (GiB)", "mem/peak_gib"),
    Chart("loss scale of fp16", "train/loss_scale", log=True),
    Chart("validation accuracy", "val/accuracy"),
)


def charts(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Return (title, SVG) of each chart for which some run has values."""
    return [
        (chart.title, _draw(chart, runs, number))
        for number, chart in enumerate(CHARTS)
        if any(len(run.series(chart.metric)[0]) > 1 for run in runs)
    ]


def thinned(steps: list[int], values: list[float]) -> tuple[list[int], list[float]]:
    """Return at most POINTS points of a curve: of each stretch the lowest and the highest, so that no peak goes."""
    if len(steps) <= POINTS:
        return steps, values
    width, kept = -(-2 * len(steps) // POINTS), []
    for start in range(0, len(steps), width):
        part = range(start, min(start + width, len(steps)))
        kept += sorted({min(part, key=values.__getitem__), max(part, key=values.__getitem__)})
    return [steps[i] for i in kept], [values[i] for i in kept]


def _draw(chart: Chart, runs: Sequence[Run], number: int) -> str:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    wide = number == 0
    style: Any = {
        "svg.fonttype": "none", "svg.hashsalt": chart.metric, "font.size": 9, "axes.edgecolor": _TEXT,
        "text.color": _TEXT, "axes.labelcolor": _TEXT, "xtick.color": _TEXT, "ytick.color": _TEXT, "grid.color": _GRID,
        "axes.spines.top": False, "axes.spines.right": False,
    }  # fmt: skip
    with matplotlib.rc_context(style):
        figure, axes = pyplot.subplots(figsize=(9, 3.4) if wide else (4.4, 2.3), layout="constrained")
        for run, colour in zip(runs, _cycled(len(runs)), strict=True):
            steps, values = thinned(*run.series(chart.metric))
            axes.plot(steps, values, color=colour, lw=0.8 if chart.smooth else 1.2, alpha=0.45 if chart.smooth else 1)
            if chart.smooth:
                axes.plot(*thinned(*run.series(chart.smooth)), color=colour, lw=1.8)
            if chart.points:
                axes.plot(*thinned(*run.series(chart.points)), "o", color=colour, ms=4)
            for fault in run.faults[-FAULTS:]:
                axes.axvline(fault["step"], color=FAULT, lw=0.7, ls=":")
        axes.set_xlabel("step")
        axes.grid(lw=0.5)
        if chart.log and all(value > 0 for run in runs for value in run.series(chart.metric)[1]):
            axes.set_yscale("log")
        elif not wide:
            axes.set_ylim(bottom=0)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        pyplot.close(figure)
    return _inline(file.getvalue(), chart.title)


def _cycled(count: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(count)]


def _inline(svg: str, title: str) -> str:
    """Return the SVG element alone, in the page's colours, scalable, with a name for screen readers."""
    svg = svg[svg.index("<svg ") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    head = rf'<svg viewBox="\1" role="img" aria-label="{title}">'
    svg = re.sub(r'<svg [^>]*viewBox="([^"]*)"[^>]*>', head, svg, count=1)
    svg = re.sub(r"<style[^>]*>.*?</style>", "", svg, flags=re.DOTALL)
    return svg.replace(_TEXT, "currentColor").replace(_GRID, "var(--rule)")

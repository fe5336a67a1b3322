"""Draw curves over steps, and memory over one step, as SVG that is part of an HTML page.

Text and axes take the page's colours, so the charts follow its light and dark styles.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from markupsafe import Markup

from nanoray.tools.report.gather import RunFiles
from nanoray.tools.report.memory import category_rows, peak_line
from nanoray.train.watch.dangers import COLUMNS, MOST, SHARES, SUBNORMAL, UNCHANGED, ZERO

RANKS = 4  # most ranks whose memory is drawn
FAULTS = 100  # most faults that are marked, the newest ones
POINTS = 600  # most points of a curve; more make the page large and cannot be seen
COLOURS = ("#3a7bd5", "#d9772b", "#2b9c73", "#a45bc4", "#c94f5d", "#7f8c2f", "#3aa0b8", "#8d6e63")
_TEXT = "#010203"  # matplotlib needs a colour; _inline replaces it with the page's
_GRID = "#010204"
FAULT = "#c0392b"
PHASES = 8  # most phases that are named in a figure; more names overlap
NAMED = 8  # most layers that are named in a legend
TITLES = {
    "weight_rms": "weights, RMS",
    "grad_rms": "gradients, RMS",
    "update_ratio": "update to weight, ratio of RMS",
    "activation_rms": "activations, RMS",
    "attention_entropy": "attention's entropy, share of its largest",
    "max_logit": "attention's largest logit",
    "dead": "dead hidden units (%)",
    ZERO: "gradients that are zero (%)",
    SUBNORMAL: "gradients that are subnormal (%)",
    UNCHANGED: "weights that an update did not change (%)",
}


class Chart(NamedTuple):
    """A metric to draw, whether a running mean smooths it, and points beside it."""

    title: str
    metric: str
    smooth: bool = False
    points: str = ""
    log: bool = False


class Drawing(NamedTuple):
    """A chart as SVG, and another one for phones where its shape needs a screen's width."""

    title: str
    svg: str
    narrow: str = ""


CHARTS = (
    Chart("loss (nat/token)", "train/loss", smooth=True, points="val/loss"),
    Chart("tokens per second", "perf/tok_per_sec"),
    Chart("samples per second", "perf/samples_per_sec"),
    Chart("learning rate", "train/lr"),
    Chart("gradient norm", "train/grad_norm", log=True),
    Chart("time per step (ms)", "time/step_ms"),
    Chart("exposed communication (% of the step)", "comm/exposed_share"),
    Chart("peak memory of rank 0 (GiB)", "mem/peak_gib"),
    Chart("loss scale of fp16", "train/loss_scale", log=True),
    Chart("steps that fp16 skipped", "train/skipped_steps"),
    Chart("steps since fp16's scale last changed", "train/good_steps"),
    Chart("gradients that are zero or subnormal (%)", "precision/grad_lost"),
    Chart("weights that an update did not change (%)", "precision/unchanged"),
    Chart("validation accuracy", "val/accuracy"),
)


def charts(runs: Sequence[RunFiles]) -> list[Drawing]:
    """Return the drawing of each chart for which some run has values."""
    drawn = []
    for number, chart in enumerate(CHARTS):
        has_curve = any(len(run.series(chart.metric)[0]) > 1 for run in runs)
        if not has_curve:
            continue
        # The first chart is the loss: it is wide, and its axis does not begin at zero.
        is_first = number == 0
        draw = partial(_draw_chart, chart, runs, is_first)
        narrow = ""
        if is_first:
            narrow = _svg(draw, chart.title, is_copy=True)
        drawn.append(Drawing(_caption(chart, runs), _svg(draw, chart.title, is_first), narrow))
    return drawn


def _caption(chart: Chart, runs: Sequence[RunFiles]) -> str:
    """Return a chart's title and what its lines and dots are."""
    parts = []
    if chart.smooth:
        around = max(1 + 2 * _reach(len(run.series(chart.metric)[0])) for run in runs)
        parts.append(f"pale: as logged; bold: mean of the {around} logged steps around it")
    if chart.points and any(run.series(chart.points)[0] for run in runs):
        parts.append("dots: validation")
    return "; ".join([chart.title, *parts])


def _reach(count: int) -> int:
    """Return how many records a running mean takes on each side, for a curve of this length."""
    return max(2, count // 20)


def running_mean(values: Sequence[float]) -> list[float]:
    """Return the mean of the values around each one.

    Towards either end fewer values are taken, as many on one side as on the other. So the curve
    begins and ends on the data, and does not lag behind a loss that falls.
    """
    reach = _reach(len(values))
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


def _draw_chart(chart: Chart, runs: Sequence[RunFiles], is_first: bool, axes: Any) -> None:
    for number, run in enumerate(runs):
        _draw_run(axes, chart, run, COLOURS[number % len(COLOURS)])
    axes.set_xlabel("step")

    # A logarithmic axis drops values that are not positive, and with them a part of the curve.
    values = [value for run in runs for value in run.series(chart.metric)[1]]
    if chart.log and all(value > 0 for value in values):
        axes.set_yscale("log")
    elif not is_first:
        axes.set_ylim(bottom=0)


def _draw_run(axes: Any, chart: Chart, run: RunFiles, colour: str) -> None:
    """Draw one run's curve, its running mean, its points and its faults."""
    steps, values = run.series(chart.metric)
    if chart.smooth:
        # The mean is drawn over the noisy curve, which is thin and pale.
        axes.plot(*thinned(steps, values), color=colour, lw=0.8, alpha=0.45)
        axes.plot(*thinned(steps, running_mean(values)), color=colour, lw=1.8)
    else:
        axes.plot(*thinned(steps, values), color=colour, lw=1.2, alpha=1)

    if chart.points:
        axes.plot(*thinned(*run.series(chart.points)), "o", color=colour, ms=4)
    for fault in run.faults[-FAULTS:]:
        axes.axvline(fault["step"], color=FAULT, lw=0.7, ls=":")


def memory_chart(timeline: dict[str, Any]) -> Drawing:
    """Return the drawing of a rank's memory over one step, its categories stacked.

    The dashed line is the formula's peak. Memory changes only when a storage is allocated or
    freed, so the areas have steps.
    """

    def draw(legend: dict[str, Any], axes: Any) -> None:
        # A point is (ms, number of its place, bytes of the first category, of the second, ...).
        ms, place_numbers, *bytes_by_category = zip(*timeline["points"], strict=True)
        _draw_areas(axes, ms, bytes_by_category, timeline["categories"])
        axes.set_axisbelow(True)

        formula = timeline["formula"].get("peak")
        if formula:
            axes.axhline(formula / 2**20, color=_TEXT, lw=0.9, ls="--", label="formula's peak")

        # The first word of a place is its phase: "forward blocks.3" is in the forward pass.
        phases = [timeline["places"][number].partition(" ")[0] for number in place_numbers]
        _draw_phases(axes, ms, phases)

        axes.set(
            xlabel="ms since the step began", ylabel="MiB", xlim=(ms[0], ms[-1]), ylim=(0, None)
        )
        axes.legend(**legend, frameon=False, fontsize=8)

    title = f"memory of rank {timeline['rank']} over step {timeline['step']}"
    beside = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.25), "ncols": 3}
    return Drawing(
        title,
        _svg(partial(draw, beside), title, wide=True),
        _svg(partial(draw, below), title, is_copy=True),
    )


def _draw_areas(
    axes: Any,
    ms: Sequence[float],
    bytes_by_category: Sequence[Sequence[int]],
    categories: Sequence[str],
) -> None:
    """Draw each category's bytes on top of those of the categories before it."""
    # The upper edge of a category's area, in MiB: itself and all categories below it.
    tops: list[list[float]] = []
    total = [0] * len(ms)
    for sizes in bytes_by_category:
        total = [below + size for below, size in zip(total, sizes, strict=True)]
        tops.append([size / 2**20 for size in total])

    # From the highest down, because each area is filled to the axis and covers the one before it.
    last = len(ms) - 1
    for number in reversed(range(len(tops))):
        top = tops[number]
        # Points between two equal values add nothing to an area with steps but bytes to the page.
        kept = [k for k in range(len(ms)) if k in (0, last) or top[k] != top[k - 1]]
        axes.fill_between(
            [ms[k] for k in kept],
            [top[k] for k in kept],
            label=categories[number],
            color=COLOURS[number],
            step="post",
            lw=0,
        )


def _draw_phases(axes: Any, ms: Sequence[float], phases: Sequence[str]) -> None:
    """Mark the beginning of each phase with a line and its name, unless there are too many."""
    starts = [i for i in range(1, len(phases)) if phases[i] not in ("", phases[i - 1])]
    if len(starts) > PHASES:
        return
    for i in starts:
        axes.axvline(ms[i], color=_GRID, lw=0.7)
        axes.text(ms[i], 1.01, f" {phases[i]}", transform=axes.get_xaxis_transform(), fontsize=7)


def drawn_memory(
    timelines: Sequence[dict[str, Any]],
) -> list[tuple[str, Markup, Markup, list[list[str]]]]:
    """Return the line, the picture, the one for phones and the table of the first RANKS ranks."""
    drawn = []
    for timeline in timelines[:RANKS]:
        _, wide, narrow = memory_chart(timeline)
        rows = category_rows(timeline)
        drawn.append((peak_line(timeline), Markup(wide), Markup(narrow), rows))
    return drawn


def layer_charts(records: Sequence[dict[str, Any]]) -> list[Drawing]:
    """Return the drawing of each statistic over steps: one line per layer, the first darkest."""
    drawn = []
    for column in (*COLUMNS, *SHARES):
        layers = _layers_with(column, records)
        if layers:
            draw = partial(_draw_layers, records, column, layers)
            drawn.append(Drawing(TITLES[column], _svg(draw, TITLES[column])))
    return drawn


def _layers_with(column: str, records: Sequence[dict[str, Any]]) -> list[str]:
    """Return the layers that have a statistic in some record, in the order of the model."""
    layers: dict[str, None] = {}  # a set that keeps the order
    for record in records:
        for layer, statistics in record["layers"].items():
            if column in statistics:
                layers[layer] = None
    return list(layers)


def _draw_layers(
    records: Sequence[dict[str, Any]], column: str, layers: list[str], axes: Any
) -> None:
    from matplotlib import colormaps

    all_values: list[float] = []
    for number, layer in enumerate(layers):
        # A record has None where the value was not finite, and a layer may be missing from it.
        steps = []
        values = []
        for record in records:
            value = record["layers"].get(layer, {}).get(column)
            if value is not None:
                steps.append(record["step"])
                values.append(value)
        steps, values = thinned(steps, values)
        all_values += values

        # Up to 0.9, because the end of the map is a yellow that cannot be seen on white.
        colour = colormaps["viridis"](0.9 * number / max(1, len(layers) - 1))
        marker = "." if len(steps) < 2 else ""  # a single point has no line
        axes.plot(steps, values, color=colour, lw=1.2, marker=marker, label=layer)

    # The limit of a warning is drawn only near the curves, so that it does not flatten them.
    if column in MOST and all_values and max(all_values) > MOST[column] / 10:
        axes.axhline(MOST[column], color=FAULT, lw=0.7, ls=":")
    if min(all_values, default=0) > 0 and max(all_values) > 20 * min(all_values):
        axes.set_yscale("log")
    axes.set_xlabel("step")
    if len(layers) <= NAMED:
        axes.legend(frameon=False, fontsize=6, ncols=2)


def _svg(draw: Callable[[Any], None], title: str, wide: bool = False, is_copy: bool = False) -> str:
    """Return the SVG of what `draw` puts on its axes. Equal input gives equal bytes.

    `is_copy`: the page has the same picture in another shape, and screen readers skip this one.
    """
    # Importing matplotlib takes longer than the rest of the command.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    style: Any = {
        "svg.fonttype": "none",  # text stays text, which a reader can search
        # Ids that do not change from one call to the next, and differ between two pictures.
        "svg.hashsalt": f"{title}, copy" if is_copy else title,
        "font.size": 9,
        "axes.edgecolor": _TEXT,
        "text.color": _TEXT,
        "axes.labelcolor": _TEXT,
        "xtick.color": _TEXT,
        "ytick.color": _TEXT,
        "grid.color": _GRID,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    size_in = (9, 3.4) if wide else (4.4, 2.3)
    no_metadata = {"Date": None, "Creator": None}
    file = io.StringIO()
    with rc_context(style):
        figure = Figure(figsize=size_in, layout="constrained")
        axes = figure.subplots()
        axes.grid(lw=0.5)
        draw(axes)
        figure.savefig(file, format="svg", transparent=True, metadata=no_metadata)
    label = f'role="img" aria-label="{title}"'
    if is_copy:
        label = 'aria-hidden="true"'
    return _inline(file.getvalue(), label)


def _inline(svg: str, label: str) -> str:
    """Return the SVG element alone: scalable, in the page's colours, with a label's attributes."""
    # Without the XML declaration and the metadata, which have no place inside HTML.
    svg = svg[svg.index("<svg ") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)

    # Without width and height: the page's style sets the size, and the viewBox the proportions.
    tag = rf'<svg viewBox="\1" {label}>'
    svg = re.sub(r'<svg [^>]*viewBox="([^"]*)"[^>]*>', tag, svg, count=1)

    # Tenths of a point are enough for a screen, and keep the page small.
    svg = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d)\d+", r"\1", path[0]), svg)

    # A style element inside an SVG would apply to the whole page.
    svg = re.sub(r"<style[^>]*>.*?</style>", "", svg, flags=re.DOTALL)
    return svg.replace(_TEXT, "currentColor").replace(_GRID, "var(--rule)")

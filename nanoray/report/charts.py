"""Curves over steps, and memory over one, as SVG for the middle of an HTML page, whose colours text
and axes take.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from markupsafe import Markup

from nanoray.report.gather import Run
from nanoray.report.memory import head, rows
from nanoray.train.watch.dangers import COLUMNS, MOST, SHARES, SUBNORMAL, UNCHANGED, ZERO

RANKS = 4  # whose memory is drawn
FAULTS = 100  # newest ones that are marked
POINTS = 600  # of a curve; more make the page large and cannot be seen
COLOURS = ("#3a7bd5", "#d9772b", "#2b9c73", "#a45bc4", "#c94f5d", "#7f8c2f", "#3aa0b8", "#8d6e63")
_TEXT, _GRID = "#010203", "#010204"  # stand-ins: the page puts its own colours in their place
FAULT = "#c0392b"
PHASES, NAMED = 8, 8  # at most so many phases, or layers, have their names in a figure
TITLES = {
    "weight_rms": "weights, RMS", "grad_rms": "gradients, RMS", "update_ratio": "update to weight, ratio of RMS",
    "activation_rms": "activations, RMS", "attention_entropy": "attention's entropy, share of its largest",
    "max_logit": "attention's largest logit", "dead": "dead hidden units (%)",
    ZERO: "gradients that are zero (%)", SUBNORMAL: "gradients that are subnormal (%)",
    UNCHANGED: "weights that an update did not change (%)",
}  # fmt: skip


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
    Chart("steps that fp16 skipped", "train/skipped_steps"),
    Chart("steps since fp16's scale last changed", "train/good_steps"),
    Chart("gradients that are zero or subnormal (%)", "precision/grad_lost"),
    Chart("weights that an update did not change (%)", "precision/unchanged"),
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
    """Return at most POINTS points of a curve: of each stretch the lowest and the highest, so that
    no peak goes.
    """
    if len(steps) <= POINTS:
        return steps, values
    width, kept = -(-2 * len(steps) // POINTS), []
    for start in range(0, len(steps), width):
        part = range(start, min(start + width, len(steps)))
        kept += sorted({min(part, key=values.__getitem__), max(part, key=values.__getitem__)})
    return [steps[i] for i in kept], [values[i] for i in kept]


def _draw(chart: Chart, runs: Sequence[Run], number: int) -> str:
    def draw(axes: Any) -> None:
        for run, colour in zip(runs, _cycled(len(runs)), strict=True):
            steps, values = thinned(*run.series(chart.metric))
            axes.plot(
                steps,
                values,
                color=colour,
                lw=0.8 if chart.smooth else 1.2,
                alpha=0.45 if chart.smooth else 1,
            )
            if chart.smooth:
                axes.plot(*thinned(*run.series(chart.smooth)), color=colour, lw=1.8)
            if chart.points:
                axes.plot(*thinned(*run.series(chart.points)), "o", color=colour, ms=4)
            for fault in run.faults[-FAULTS:]:
                axes.axvline(fault["step"], color=FAULT, lw=0.7, ls=":")
        axes.set_xlabel("step")
        if chart.log and all(value > 0 for run in runs for value in run.series(chart.metric)[1]):
            axes.set_yscale("log")
        elif number:
            axes.set_ylim(bottom=0)

    return _svg(draw, chart.title, wide=number == 0)


def memory_chart(of_rank: dict[str, Any]) -> str:
    """Return the SVG of a rank's memory over one step, the categories on top of each other; dashes:
    the formula's peak.

    A storage is there from one operation to another, so the areas have steps.
    """

    def draw(axes: Any) -> None:
        ms, numbers, *sizes = zip(*of_rank["points"], strict=True)
        tops = [
            [sum(of) / 2**20 for of in zip(*sizes[: i + 1], strict=True)] for i in range(len(sizes))
        ]
        for i in reversed(range(len(tops))):  # the highest first: the next ones cover it
            turns = [
                k for k, top in enumerate(tops[i]) if k in (0, len(ms) - 1) or top != tops[i][k - 1]
            ]
            edge = [ms[k] for k in turns], [tops[i][k] for k in turns]
            axes.fill_between(
                *edge, label=of_rank["categories"][i], color=COLOURS[i], step="post", lw=0
            )
        axes.set_axisbelow(True)
        if formula := of_rank["formula"].get("peak"):
            axes.axhline(formula / 2**20, color=_TEXT, lw=0.9, ls="--", label="formula's peak")
        phases = [of_rank["places"][number].partition(" ")[0] for number in numbers]
        turns = [i for i in range(1, len(phases)) if phases[i] not in ("", phases[i - 1])]
        for i in turns if len(turns) <= PHASES else ():
            axes.axvline(ms[i], color=_GRID, lw=0.7)
            axes.text(
                ms[i], 1.01, f" {phases[i]}", transform=axes.get_xaxis_transform(), fontsize=7
            )
        axes.set(
            xlabel="ms since the step began", ylabel="MiB", xlim=(ms[0], ms[-1]), ylim=(0, None)
        )
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)

    return _svg(draw, f"memory of rank {of_rank['rank']} over step {of_rank['step']}", wide=True)


def drawn_memory(of_ranks: Sequence[dict[str, Any]]) -> list[tuple[str, Markup, list[list[str]]]]:
    """Return the line, the picture and the table of each rank's memory; of many ranks, the first
    ones.
    """
    return [(head(of), Markup(memory_chart(of)), rows(of)) for of in of_ranks[:RANKS]]


def layer_charts(records: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return (title, SVG) of each statistic: a line for each layer over steps, the first layer's
    darkest.
    """
    found = []
    for column in (*COLUMNS, *SHARES):
        layers = list(
            dict.fromkeys(
                name for r in records for name, own in r["layers"].items() if column in own
            )
        )
        if layers:
            found.append(
                (
                    TITLES[column],
                    _svg(partial(_draw_layers, records, column, layers), TITLES[column]),
                )
            )
    return found


def _draw_layers(
    records: Sequence[dict[str, Any]], column: str, layers: list[str], axes: Any
) -> None:
    from matplotlib import colormaps

    every = list[float]()
    for i, layer in enumerate(layers):
        known = [
            (r["step"], value)
            for r in records
            if (value := r["layers"].get(layer, {}).get(column)) is not None
        ]
        steps, values = thinned([step for step, _ in known], [value for _, value in known])
        colour, every = colormaps["viridis"](0.9 * i / max(1, len(layers) - 1)), every + values
        axes.plot(
            steps, values, color=colour, lw=1.2, marker="." if len(steps) < 2 else "", label=layer
        )
    if column in MOST and every and max(every) > MOST[column] / 10:
        axes.axhline(MOST[column], color=FAULT, lw=0.7, ls=":")
    if min(every, default=0) > 0 and max(every) > 20 * min(every):
        axes.set_yscale("log")
    axes.set_xlabel("step")
    if len(layers) <= NAMED:
        axes.legend(frameon=False, fontsize=6, ncols=2)


def _svg(draw: Callable[[Any], None], title: str, wide: bool = False) -> str:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style: Any = {
        "svg.fonttype": "none", "svg.hashsalt": title, "font.size": 9, "axes.edgecolor": _TEXT,
        "text.color": _TEXT, "axes.labelcolor": _TEXT, "xtick.color": _TEXT, "ytick.color": _TEXT, "grid.color": _GRID,
        "axes.spines.top": False, "axes.spines.right": False,
    }  # fmt: skip
    with matplotlib.rc_context(style):
        figure, axes = pyplot.subplots(
            figsize=(9, 3.4) if wide else (4.4, 2.3), layout="constrained"
        )
        axes.grid(lw=0.5)
        draw(axes)
        file = io.StringIO()
        figure.savefig(
            file, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
        )
        pyplot.close(figure)
    return _inline(file.getvalue(), title)


def _cycled(count: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(count)]


def _inline(svg: str, title: str) -> str:
    """Return the SVG element alone, in the page's colours, scalable, with a name for screen
    readers.
    """
    svg = svg[svg.index("<svg ") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    head = rf'<svg viewBox="\1" role="img" aria-label="{title}">'
    svg = re.sub(r'<svg [^>]*viewBox="([^"]*)"[^>]*>', head, svg, count=1)
    # Tenths of a point are enough
    svg = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d)\d+", r"\1", path[0]), svg)
    svg = re.sub(r"<style[^>]*>.*?</style>", "", svg, flags=re.DOTALL)
    return svg.replace(_TEXT, "currentColor").replace(_GRID, "var(--rule)")

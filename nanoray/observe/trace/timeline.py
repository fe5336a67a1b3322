"""Draw the timeline of traced steps: phases and collectives of all ranks.

`nanoray report timeline RUN [--step S]` makes the picture, an SVG or a PNG.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

MAX_DRAWN = 4  # steps in one picture
MAX_RANKS = 16  # ranks in one picture


def group_of(step: dict[str, Any]) -> tuple[Any, Any]:
    """Return the group of ranks that traced a step: its command's start, and its attempt there."""
    return step["started"], step["attempt"]


def newest_window(steps: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the newest steps that follow each other, of one group of ranks."""
    window = [steps[-1]]
    for step in reversed(steps[:-1]):
        oldest = window[0]
        if step["step"] != oldest["step"] - 1 or group_of(step) != group_of(oldest):
            break
        window.insert(0, step)
    return window[-MAX_DRAWN:]


def _collectives_of(step: dict[str, Any], rank: int) -> list[dict[str, Any]]:
    """Return the collectives of a step in which a rank took part."""
    return [c for c in step["collectives"] if c["start_ms"][rank] is not None]


COLOURS = {
    "data": "#c9a227",
    "forward": "#7fb3d5",
    "backward": "#2e6da4",
    "idle": "#efe3cf",
    "optimizer": "#7d9a58",
    "log": "#b8b8b8",
    "eval": "#8e7cc3",
    "checkpoint": "#c27ba0",
}
EXPOSED = "#c0392b"
HIDDEN = "#f0b27a"


def draw(steps: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the phases and collectives of every rank in these steps, with a legend."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    all_ranks = len(steps[0]["phases"])
    ranks = min(all_ranks, MAX_RANKS)
    origin = steps[0]["origin_s"]
    figure = Figure(figsize=(12, 1.9 + 0.9 * ranks), layout="constrained")
    axes = figure.subplots()

    # Two bars per rank: its phases, and below them its collectives.
    for step in steps:
        shift_ms = 1e3 * (step["origin_s"] - origin)
        for rank in range(ranks):
            _draw_phases(axes, step, rank, shift_ms)
            _draw_collectives(axes, step, rank, shift_ms)
        axes.axvline(shift_ms, color="0.4", lw=0.6)
        axes.text(shift_ms, -0.62, f" step {step['step']}", fontsize=8, color="0.3", va="center")

    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    # The axis is reversed, and has room for the names of the steps.
    axes.set_ylim(ranks - 0.4, -0.75)  # rank 0 above
    axes.set_xlabel("ms on rank 0's clock")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)

    used = set()
    for step in steps:
        for phases in step["phases"][:ranks]:
            used |= {name for name, _, _ in phases}
    # Only the phases that occur, in the order of a step.
    legend = []
    for name, colour in COLOURS.items():
        if name in used:
            label = "idle: waits for another stage" if name == "idle" else name
            legend.append(Patch(color=colour, label=label))
    legend.append(Patch(color=HIDDEN, label="collective, hidden behind backward"))
    legend.append(Patch(color=EXPOSED, label="collective, exposed: the step waits"))
    figure.legend(handles=legend, loc="outside lower center", ncols=5, fontsize=8, frameon=False)

    axes.set_title(_title(steps, ranks, all_ranks, pipeline="idle" in used), fontsize=9, loc="left")
    # Without a date, so that the same steps give the same file.
    metadata = {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(path, metadata=metadata)


def _draw_phases(axes: Any, step: dict[str, Any], rank: int, shift_ms: float) -> None:
    phases = step["phases"][rank]
    spans = [(shift_ms + start, end - start) for _, start, end in phases]
    colours = [COLOURS.get(name, "#dddddd") for name, _, _ in phases]
    axes.broken_barh(spans, (rank - 0.4, 0.36), color=colours)


def _draw_collectives(axes: Any, step: dict[str, Any], rank: int, shift_ms: float) -> None:
    collectives = _collectives_of(step, rank)
    # Backward computes until its last bucket is ready; from then on buckets are exposed.
    ready = max((c["enqueue_ms"][rank] for c in collectives if c["last"]), default=0.0)
    hidden = []
    exposed = []
    for c in collectives:
        start = c["start_ms"][rank]
        end = c["end_ms"][rank]
        exposed_from = start  # the rank waits in a call from its start
        if "wait_ms" in c:  # but for a message beside compute later, or not at all
            exposed_from = min(c["wait_ms"][rank], end)
        if c["bucket"] is not None:
            exposed_from = min(max(start, ready), end)
            center = shift_ms + (start + end) / 2
            axes.text(center, rank + 0.16, str(c["bucket"]), fontsize=7, ha="center", va="center")
        hidden.append((shift_ms + start, exposed_from - start))
        exposed.append((shift_ms + exposed_from, end - exposed_from))
    axes.broken_barh(hidden, (rank + 0.01, 0.3), color=HIDDEN, ec="white", lw=0.6)
    axes.broken_barh(exposed, (rank + 0.01, 0.3), color=EXPOSED, ec="white", lw=0.6)


def _title(steps: Sequence[dict[str, Any]], ranks: int, all_ranks: int, pipeline: bool) -> str:
    """Return the means of the steps, and how to read the bars."""
    which = f"{all_ranks} ranks"
    if all_ranks > ranks:
        which = f"the first {ranks} of {all_ranks} ranks"
    step_ms = fmean(step["figures"]["step_ms"] for step in steps)
    busy_ms = fmean(step["figures"]["busy_ms"] for step in steps)
    exposed_ms = fmean(step["figures"]["exposed_ms"] for step in steps)
    share = 100 * exposed_ms / step_ms if step_ms else 0.0  # a program may call no optimizer
    buckets = [c for c in steps[-1]["collectives"] if c["bucket"] is not None]
    sizes = ", ".join(f"{bucket['bytes'] / 1e6:.2g} MB" for bucket in buckets)
    title = (
        f"{which}, {len(steps)} step(s): {step_ms:.1f} ms a step, collectives {busy_ms:.1f} ms, "
        f"exposed {exposed_ms:.1f} ms ({share:.0f} %)\n"
        f"upper bar: what the rank does; lower bar: gradient buckets ({sizes}) and other "
        "collectives"
    )
    if pipeline:
        bubble = fmean(step["figures"]["bubble"] for step in steps)
        title += f"\na stage is idle {bubble:.0f} % of forward and backward"
    return title

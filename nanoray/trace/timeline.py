"""The timeline of traced steps: phases and collectives of all ranks, as a picture (SVG, PNG) and
for Perfetto (JSON).

A run with --comm_trace draws its newest steps at its end; `python -m nanoray.trace RUN --step S`
draws others.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

MAX_DRAWN, MAX_RANKS = 4, 16  # steps and ranks in one picture


def group_of(step: dict[str, Any]) -> tuple[Any, Any]:
    """Return which group of ranks traced a step: each command counts its attempts anew."""
    return step.get("started"), step.get("attempt")


def newest_window(steps: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the newest steps that follow each other, of one group of ranks."""
    window = [steps[-1]]
    for step in reversed(steps[:-1]):
        if (step["step"], group_of(step)) != (window[0]["step"] - 1, group_of(window[0])):
            break
        window.insert(0, step)
    return window[-MAX_DRAWN:]


def chrome_trace(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the steps in Chrome's trace format: a process per rank, a row of phases, a row per
    kind of collective.
    """
    origin = steps[0]["origin_s"]
    events: list[dict[str, Any]] = []
    for rank in range(len(steps[0]["phases"])):
        # Slices of a row must not overlap; overlapping collectives get more rows
        rows = {"phases": 0}
        events.append(
            {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        )
        events.append(
            {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
        )
        for step in steps:
            shift = 1e6 * (step["origin_s"] - origin)
            for name, start, end in step["phases"][rank]:
                span = {
                    "ts": shift + 1e3 * start,
                    "dur": 1e3 * (end - start),
                    "pid": rank,
                    "tid": 0,
                }
                events.append(
                    {
                        "ph": "X",
                        "name": name,
                        "cat": "phase",
                        **span,
                        "args": {"step": step["step"]},
                    }
                )
            free: dict[str, float] = {}
            own = [c for c in step["collectives"] if c["start_ms"][rank] is not None]
            for c in sorted(own, key=lambda c: c["start_ms"][rank]):
                label = c["what"] if c["bucket"] is None else f"bucket {c['bucket']}"
                start, end = c["start_ms"][rank], c["end_ms"][rank]
                row_name = next(
                    n
                    for n in (c["what"], *(f"{c['what']} {i}" for i in range(2, 99)))
                    if free.get(n, start) <= start
                )
                row = rows.setdefault(row_name, len(rows))
                free[row_name] = end
                span = {
                    "ts": shift + 1e3 * start,
                    "dur": 1e3 * (end - start),
                    "pid": rank,
                    "tid": row,
                }
                keys = (
                    "op",
                    "group",
                    "dtype",
                    "bytes",
                    "timing",
                    "latency_us",
                    "time_us",
                    "skew_us",
                    "busbw_gbps",
                )
                args = {key: c[key] for key in keys if key in c} | {
                    "enqueue_us": shift + 1e3 * c["enqueue_ms"][rank]
                }
                events.append({"ph": "X", "name": label, "cat": "collective", **span, "args": args})
        for name, row in rows.items():
            events.append(
                {"ph": "M", "name": "thread_name", "pid": rank, "tid": row, "args": {"name": name}}
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


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
EXPOSED, HIDDEN = "#c0392b", "#f0b27a"


def draw(steps: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw what every rank did in these steps, with a legend."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    ranks, origin = min(len(steps[0]["phases"]), MAX_RANKS), steps[0]["origin_s"]
    figure, axes = pyplot.subplots(figsize=(12, 1.9 + 0.9 * ranks), layout="constrained")
    used = set()
    for step in steps:
        shift = 1e3 * (step["origin_s"] - origin)
        for rank, phases in enumerate(step["phases"][:ranks]):
            used |= {name for name, _, _ in phases}
            spans = [(shift + start, end - start) for _, start, end in phases]
            axes.broken_barh(
                spans,
                (rank - 0.4, 0.36),
                color=[COLOURS.get(name, "#dddddd") for name, _, _ in phases],
            )
            own = [c for c in step["collectives"] if c["start_ms"][rank] is not None]
            ready = max((c["enqueue_ms"][rank] for c in own if c["last"]), default=0.0)
            hidden, exposed = [], []
            for c in own:
                start, end = c["start_ms"][rank], c["end_ms"][rank]
                middle = start if c["bucket"] is None else min(max(start, ready), end)
                hidden.append((shift + start, middle - start))
                exposed.append((shift + middle, end - middle))
                if c["bucket"] is not None:
                    at = (shift + (start + end) / 2, rank + 0.16)
                    axes.text(*at, str(c["bucket"]), fontsize=7, ha="center", va="center")
            axes.broken_barh(hidden, (rank + 0.01, 0.3), color=HIDDEN, ec="white", lw=0.6)
            axes.broken_barh(exposed, (rank + 0.01, 0.3), color=EXPOSED, ec="white", lw=0.6)
        axes.axvline(shift, color="0.4", lw=0.6)
        axes.text(shift, -0.62, f" step {step['step']}", fontsize=8, color="0.3", va="center")
    axes.set_yticks(range(ranks), [f"rank {r}" for r in range(ranks)])
    axes.set_ylim(ranks - 0.4, -0.75)
    axes.set_xlabel("ms on rank 0's clock")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    labels = dict.fromkeys(COLOURS, "") | {"idle": ": waits for another stage"}
    legend = [
        Patch(color=COLOURS[name], label=name + labels[name]) for name in COLOURS if name in used
    ]
    legend.append(Patch(color=HIDDEN, label="collective, hidden behind backward"))
    legend.append(Patch(color=EXPOSED, label="collective, exposed: the step waits"))
    figure.legend(handles=legend, loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    step_ms, busy_ms, exposed_ms = (
        fmean(s["figures"][k] for s in steps) for k in ("step_ms", "busy_ms", "exposed_ms")
    )
    all_ranks = len(steps[0]["phases"])
    which = (
        f"{all_ranks} ranks" if all_ranks == ranks else f"the first {ranks} of {all_ranks} ranks"
    )
    numbers = ", ".join(
        f"{c['bytes'] / 1e6:.2g} MB" for c in steps[-1]["collectives"] if c["bucket"] is not None
    )
    axes.set_title(
        f"{which}, {len(steps)} step(s): {step_ms:.1f} ms a step, collectives {busy_ms:.1f} ms, "
        f"exposed {exposed_ms:.1f} ms ({100 * exposed_ms / step_ms:.0f} %)\n"
        f"upper bar: what the rank does; lower bar: gradient buckets ({numbers}) and other "
        "collectives",
        fontsize=9,
        loc="left",
    )
    if "idle" in used:
        share = fmean(s["figures"]["bubble"] for s in steps)
        axes.set_title(
            f"{axes.get_title('left')}\na stage is idle {share:.0f} % of forward and backward",
            fontsize=9,
            loc="left",
        )
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)

"""The dump as text: its first lines, the tree, one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nanoray.machine.text import aligned, short
from nanoray.observe.watch.dangers import COLUMNS, table


def flops(count: int) -> str:
    """Return a number of FLOPs with a prefix: 1.23 G."""
    return short(count, gap=" ") if count else ""


def size(count: int) -> str:
    """Return bytes with a binary prefix: 1.5 MiB."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 2**power:
            return f"{count / 2**power:,.4g} {unit}"
    return f"{count} B" if count else ""


def dims(shape: Sequence[int]) -> str:
    """Return a shape: 6×64×128."""
    return "×".join(map(str, shape))


def shapes(tensors: Sequence[Any]) -> str:
    """Return shapes and dtypes: 6×64×128 float32."""
    return ", ".join(f"{dims(shape) or 'scalar'} {dtype}" for shape, dtype in tensors)


def figures_of(description: dict[str, Any]) -> dict[str, str]:
    """Return the first lines as labels and texts."""
    weights = "none loaded"
    if description["checkpoint"]:
        weights = f"{description['checkpoint']}, step {description['step']}"
    samples = description["micro_batch_size"]
    counted = sum(row["flops"] for row in description["modules"])
    return {
        "model": f"{description['model']}, {description['parameters']:,} parameters, {description['optimizer']}",
        "weights": weights,
        "precision": f"{description['precision']} ({description['why_precision']})",
        "batch": f"what follows is of one micro batch, {samples} samples",
        "FLOPs": f"{flops(counted)} in a forward, counted" if counted else "not counted",
    }


# The names of the columns, in the order of the rows below.
TREE = ("module", "type", "weights", "returns", "parameters", "FLOPs", "kept")
BATCH = ("module", "type", "returns", "mean", "RMS", "weights RMS", "gradients RMS")


def lines(description: dict[str, Any]) -> list[str]:
    """Return the dump as lines."""
    found = [f"{description['subject']}"]
    found += [f"{label:<10} {text}" for label, text in figures_of(description).items()]
    found += [f"{'note':<10} {note}" for note in description["notes"]]
    found += ["", *aligned([TREE, *_tree(description)])]
    record = description["statistics"]
    if record:
        found += [
            "",
            f"statistics of step {record['step']}, which took rank 0 {record['cost_ms']:.3g} ms",
            *aligned([("layer", *COLUMNS), *table(record)]),
        ]
    if description["verify"]:
        found += ["", *_batch(description["verify"])]
    return found


def alike(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return for each layer that repeats an earlier one of its list the name of that one.

    Two layers are equal when the same modules and tensors have the same shapes and costs.
    """
    # Only layers of lists, whose names end in a number.
    content: dict[str, list[Any]] = {}
    for row in rows:
        if row["layer"]:
            inner = row["name"].removeprefix(row["layer"])
            keys = ("type", "weights", "outputs", "calls", "kept", "flops")
            cells = [row[key] for key in keys]
            content.setdefault(row["layer"], []).append([inner, *cells])

    first_with: dict[str, str] = {}
    repeated = {}
    for layer, cells in content.items():
        # The repr of the cells is hashable, and equal for equal layers.
        first = first_with.setdefault(repr(cells), layer)
        if first != layer:
            repeated[layer] = first
    return repeated


def _tree(description: dict[str, Any]) -> list[list[str]]:
    found, same = [], alike(description["modules"])
    for row in description["modules"]:
        name = row["name"].rpartition(".")[2] or "(model)"
        place = "  " * row["depth"] + name
        # A repeated layer takes one row, however many modules it has.
        if row["layer"] in same:
            if row["name"] == row["layer"]:
                found.append([place, f"as {same[row['layer']]}", *[""] * 5])
            continue
        weights = " ".join(f"{key} {dims(of)}" for key, of in row["weights"].items())
        parameters = f"{row['parameters']:,}" if row["parameters"] else ""
        found.append(
            [
                place,
                row["type"],
                weights,
                shapes(row["outputs"]),
                parameters,
                flops(row["flops"]),
                size(row["kept"]),
            ]
        )
    return found


def _batch(batch: dict[str, Any]) -> list[str]:
    """Return the loss, a row for each module, and the problems."""
    rows = []
    for row in batch["modules"]:
        cells = [row["name"] or "(model)", row["type"], shapes(row["outputs"])]
        if not row["calls"]:
            cells[2] = "is not called"
        for key in ("output_mean", "output_rms", "weight_rms", "grad_rms"):
            cells.append("" if row[key] is None else f"{row[key]:.3g}")
        rows.append(cells)
    return [
        f"one batch, forward and backward, in one process on this CPU: loss {batch['loss']:.4f}",
        *aligned([BATCH, *rows]),
        *[f"problem: {problem}" for problem in batch["problems"]],
    ]

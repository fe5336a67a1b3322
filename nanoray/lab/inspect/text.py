"""The dump as text: tree, owners, one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nanoray.lab.inspect.tree import format_ranks
from nanoray.machine.text import aligned, short
from nanoray.observe.watch.dangers import COLUMNS, table

UNKNOWN = "?"


def flops(count: int | None) -> str:
    """Return a number of FLOPs with a prefix: 1.23 G."""
    if count is None:
        return UNKNOWN
    return short(count, gap=" ") if count else ""


def size(count: int | None) -> str:
    """Return bytes with a binary prefix: 1.5 MiB."""
    if count is None:
        return UNKNOWN
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
    batch = description["batch"]
    axes = description["layout"]
    replicas = axes["replicas"]
    sizes = {axis: n for axis, n in axes.items() if axis != "replicas"}
    layout = " × ".join(f"{axis} {n}" for axis, n in sizes.items() if n > 1 or axis == "dp")
    if replicas > 1:
        layout += f" ({replicas} replicas)"
    weights = "none loaded"
    if description["checkpoint"]:
        weights = f"{description['checkpoint']}, step {description['step']}"

    # Counted by a pass, if there was one
    forward = sum(row["forward_flops"] for row in description["modules"])
    backward = sum(row["backward_flops"] for row in description["modules"])
    counted = "not counted"
    if forward or backward:
        counted = f"{flops(forward)} forward, {flops(backward)} backward, counted"
    return {
        "model": f"{description['model']}, {description['parameters']:,} parameters, {description['optimizer']}",
        "weights": weights,
        "ranks": f"{description['ranks']} = {layout}, {description['dp_mode']}",
        "precision": f"{description['precision']} ({description['why_precision']})",
        "batch": f"{batch['micro']} × {batch['accum']} accum × {batch['dp']} dp; what follows is of "
        f"one micro batch, {batch['units']:,} {batch['unit']}",
        "FLOPs": counted,
    }


# The names of the columns, in the order of the rows below.
TREE = (
    "module",
    "type",
    "weights",
    "returns",
    "reads",
    "parameters",
    "forward",
    "backward",
    "kept",
)
OWNERS = ("tensor", "shape", "dtype", "owner", "held by ranks", "updated by ranks")
BATCH = ("module", "type", "returns", "mean", "RMS", "weights RMS", "gradients RMS")


def lines(description: dict[str, Any]) -> list[str]:
    """Return the dump as lines."""
    found = [f"{description['subject']}"]
    found += [f"{label:<10} {text}" for label, text in figures_of(description).items()]
    found += [f"{'note':<10} {note}" for note in description["notes"]]
    found += ["", *aligned([TREE, *_tree(description)])]
    found += ["", "owners", *aligned([OWNERS, *owners(description)])]

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

    Two layers are equal when the same modules and tensors have the same shapes and costs. What
    their first module reads may differ.
    """
    # Only layers of lists, whose names end in a number.
    content: dict[str, list[Any]] = {}
    for row in rows:
        if row["layer"]:
            inner = row["name"].removeprefix(row["layer"])
            keys = ("type", "weights", "outputs", "calls", "kept", "forward_flops")
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
                found.append([place, f"as {same[row['layer']]}", *[""] * 7])
            continue
        weights = " ".join(f"{key} {dims(of)}" for key, of in row["weights"].items())
        parameters = f"{row['parameters']:,}" if row["parameters"] else ""
        costs = [flops(row["forward_flops"]), flops(row["backward_flops"]), size(row["kept"])]
        found.append(
            [
                place,
                row["type"],
                weights,
                shapes(row["outputs"]),
                ", ".join(row["reads"]),
                parameters,
                *costs,
            ]
        )
    if description["loss_reads"]:
        found.append(["(loss)", "", "", "", ", ".join(description["loss_reads"]), *[""] * 4])
    return found


def owners(description: dict[str, Any]) -> list[list[str]]:
    """Return for each tensor its shape, dtype, owner, and the ranks that hold and update it."""
    rows = []
    for row in description["tensors"]:
        owner = f"is {row['tied_to']}" if row["tied_to"] else row.get("owner", UNKNOWN)
        ranks = [
            " | ".join(format_ranks(of["ranks"]) for of in row.get(kind, ()))
            for kind in ("held", "updated")
        ]
        rows.append([row["name"], dims(row["shape"]), row["dtype"], owner, *ranks])
    return rows


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

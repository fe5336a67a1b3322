"""The columns of statistics.jsonl as a table; layers that explode or vanish. No torch."""

from __future__ import annotations

import statistics
from typing import Any

FILE = "statistics.jsonl"
COLUMNS = (
    "weight_rms",
    "grad_rms",
    "update_ratio",
    "activation_rms",
)
MOST = {"activation_rms": 1e3, "update_ratio": 0.1}  # above: exploding
LEAST_GRAD = 1e-3  # a layer's gradient, as a share of the layers' median


def dangers(layers: dict[str, dict[str, float | None]]) -> dict[str, str]:
    """Return the dangers of a step: exploding, vanishing -> the worst layer in words.

    A value of None was not finite.
    """
    found: dict[str, str] = {}

    # Exploding: a value above its limit, the first kind of value that is.
    for key, most in MOST.items():
        value, layer = _largest(layers, key)
        if value > most:
            found.setdefault("exploding", f"{key} of {layer} is {value:.3g}, above {most:g}")

    # A gradient that is not finite is worse, and replaces it. Embeddings are left out: they have
    # gradients of another size.
    grads: dict[str, float] = {}
    not_finite = []
    for layer, values in layers.items():
        if "." in layer:
            grad = values["grad_rms"]
            if grad is None:
                not_finite.append(layer)
            else:
                grads[layer] = grad
    if not_finite:
        found["exploding"] = f"the gradient of {not_finite[0]} is not finite"

    # Vanishing: a layer's gradient far below that of the others.
    if len(grads) > 1:
        least = min(grads, key=lambda layer: grads[layer])
        median = statistics.median(grads.values())
        if grads[least] < LEAST_GRAD * median:
            found["vanishing"] = (
                f"grad_rms of {least} is {grads[least]:.3g}, that of the median layer {median:.3g}"
            )
    return found


def _largest(layers: dict[str, dict[str, float | None]], key: str) -> tuple[float, str]:
    """Return the largest finite value under a key, and its layer; (0, "") if there is none."""
    largest = (0.0, "")
    for layer, values in layers.items():
        value = values.get(key)
        if value is not None:
            largest = max(largest, (value, layer))
    return largest


def table(record: dict[str, Any]) -> list[list[str]]:
    """Return a record as rows of cells: a layer's name, and COLUMNS; `?` for one not finite."""
    rows = []
    for layer, values in record["layers"].items():
        cells = [layer]
        for key in COLUMNS:
            if key not in values:
                cells.append("")
            elif values[key] is None:
                cells.append("?")
            else:
                cells.append(f"{values[key]:.3g}")
        rows.append(cells)
    return rows

"""What statistics.jsonl says of layers: its columns, as a table, and what is exploding, vanishing
or dead. No torch.
"""

from __future__ import annotations

import statistics
from typing import Any

FILE = "statistics.jsonl"
# Key of a metrics record: for each layer, these shares of its elements in percent
PRECISION = "precision_layers"
# Gradients, gradients, weights
SHARES = ZERO, SUBNORMAL, UNCHANGED = "zero", "subnormal", "unchanged"
COLUMNS = (
    "weight_rms",
    "grad_rms",
    "update_ratio",
    "activation_rms",
    "attention_entropy",
    "max_logit",
    "dead",
)
MOST = {"activation_rms": 1e3, "max_logit": 100.0, "update_ratio": 0.1}  # above: exploding
# % of a layer's units; a layer's gradient, as a share of the layers' median
MOST_DEAD, LEAST_GRAD = 50.0, 1e-3


def dangers(layers: dict[str, dict[str, float | None]]) -> dict[str, str]:
    """Return what is exploding, vanishing or dead: kind -> a description of the worst layer."""
    found: dict[str, str] = {}
    for key, most in MOST.items():
        worst = max(
            ((own[key], layer) for layer, own in layers.items() if own.get(key) is not None),
            default=(0.0, ""),
        )
        if worst[0] is not None and worst[0] > most:
            found.setdefault("exploding", f"{key} of {worst[1]} is {worst[0]:.3g}, above {most:g}")
    blocks = {layer: own["grad_rms"] for layer, own in layers.items() if "." in layer}
    grads = {layer: grad for layer, grad in blocks.items() if grad is not None}
    if lost := [layer for layer in blocks if layer not in grads]:
        found["exploding"] = f"the gradient of {lost[0]} is not finite"
    if len(grads) > 1:
        least, median = (
            min(grads, key=lambda layer: grads[layer]),
            statistics.median(grads.values()),
        )
        if grads[least] < LEAST_GRAD * median:
            found["vanishing"] = (
                f"grad_rms of {least} is {grads[least]:.3g}, that of the median layer {median:.3g}"
            )
    dead = max(
        ((own.get("dead") or 0.0, layer) for layer, own in layers.items()), default=(0.0, "")
    )
    if dead[0] > MOST_DEAD:
        found["dead"] = (
            f"{dead[0]:.0f} % of the hidden units of {dead[1]} gave nothing in a micro batch"
        )
    return found


def table(record: dict[str, Any]) -> list[list[str]]:
    """Return a record as rows of cells: each layer's name, and COLUMNS; `?` where a value was not
    finite.
    """
    shown = {None: "?"}
    return [
        [
            layer,
            *(
                "" if key not in own else shown.get(own[key], f"{own[key] or 0:.3g}")
                for key in COLUMNS
            ),
        ]
        for layer, own in record["layers"].items()
    ]

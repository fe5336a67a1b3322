"""What the routers of a mixture of experts did in a step, as numbers of a record. Other models have
none.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from nanoray.mesh.mesh import Mesh
from nanoray.models.moe import BALANCE, DROPPED, ENTROPY, LOAD, Routing, Z

LOADS = "expert_load"  # key of a record: for each layer, each expert's load over the mean


def _of(model: nn.Module) -> Routing | None:
    return getattr(model, "routing", None)


def begin(model: nn.Module) -> None:
    """Forget what the routers did before this step."""
    if routing := _of(model):
        routing.begin()


def means(model: nn.Module, mesh: Mesh) -> Tensor | None:
    """Return the step's means over all ranks, on the device. (all ranks)"""
    routing = _of(model)
    own = routing.means() if routing else None
    return None if own is None else mesh.all_reduce_mean(own, "loss")


def measured(routed: Tensor | None) -> dict[str, Any]:
    """Return what a record has of the step's means (L, LOAD + E); it waits for the device."""
    if routed is None or not routed.isfinite().all():
        return {}
    experts = routed.shape[1] - LOAD
    layers = routed.mean(0).tolist()
    loads = [[round(experts * share, 4) for share in layer] for layer in routed[:, LOAD:].tolist()]
    return {
        "moe/load_max": max(map(max, loads)),
        "moe/load_min": min(map(min, loads)),
        "moe/dropped": 100.0 * layers[DROPPED],
        "moe/entropy": layers[ENTROPY],
        "moe/balance_loss": layers[BALANCE],
        "moe/z_loss": layers[Z],
        LOADS: loads,
    }

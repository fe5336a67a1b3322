"""The work of the routers of a mixture of experts in a step, as numbers for its record."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from nanoray.checkpoint.state.train_state import TrainState
from nanoray.models.moe import BALANCE, DROPPED, ENTROPY, LOAD, Routing, Z
from nanoray.parallel.mesh import Mesh

LOADS = "expert_load"  # key of a record: for each layer, each expert's load over the mean


class RoutingMeans:
    """Averages the routing of logged steps over all ranks. For a model that has routers."""

    def __init__(self, state: TrainState, mesh: Mesh) -> None:
        self._state = state
        self._mesh = mesh
        self._fresh = False  # the routers hold nothing that belongs to another step
        self._means: Tensor | None = None  # of the newest logged step, (L, LOAD + E), on the device

    def begin_step(self, step: int) -> None:
        """Forget the step before."""
        self._fresh = False
        self._means = None

    def phase(self, step: int, name: str) -> None:
        """Reset the routers before the step's own forward.

        An audit computes another rank's micro batch between the beginning of the step and its first
        "data" phase, and its routing must not count.
        """
        if name == "data" and not self._fresh:
            begin(self._state.model)
            self._fresh = True

    def gradients_ready(self, step: int, logged: bool) -> None:
        """Average the routing of a logged step over all ranks. (all ranks)"""
        if logged:
            self._means = means(self._state.model, self._mesh)

    def measured(self) -> dict[str, Any]:
        """Return the numbers of the logged step. Waits for the device."""
        return measured(self._means)


def routing_of(model: nn.Module) -> Routing | None:
    """Return the routing of a model's experts; None for a model without experts."""
    return getattr(model, "routing", None)


def begin(model: nn.Module) -> None:
    """Forget the routing before this step."""
    routing = routing_of(model)
    if routing:
        routing.begin()


def means(model: nn.Module, mesh: Mesh) -> Tensor | None:
    """Return the step's means over all ranks, (L, LOAD + E), on the device. (all ranks)"""
    routing = routing_of(model)
    own = routing.means() if routing else None
    if own is None:
        return None
    return mesh.all_reduce_mean(own, "loss")


def measured(routed: Tensor | None) -> dict[str, Any]:
    """Return the values for a record, given the step's means (L, LOAD + E). Waits for the device."""
    if routed is None or not routed.isfinite().all():
        return {}

    experts = routed.shape[1] - LOAD
    means_of_layers = routed.mean(0).tolist()  # (LOAD + E,)

    # An expert's share of the tokens, as a multiple of an even share.
    loads = []
    for shares in routed[:, LOAD:].tolist():
        loads.append([round(experts * share, 4) for share in shares])
    return {
        "moe/load_max": max(map(max, loads)),
        "moe/load_min": min(map(min, loads)),
        "moe/dropped": 100.0 * means_of_layers[DROPPED],
        "moe/entropy": means_of_layers[ENTROPY],
        "moe/balance_loss": means_of_layers[BALANCE],
        "moe/z_loss": means_of_layers[Z],
        LOADS: loads,
    }

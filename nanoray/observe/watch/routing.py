"""The work of the routers of a mixture of experts in a step, as numbers for its record."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nanoray.models.moe import BALANCE, ENTROPY, LOAD, Routing, Z
from nanoray.parallel.mesh import Mesh

LOADS = "expert_load"  # key of a record: for each layer, each expert's load over the mean


class RoutingMeans:
    """Averages the routing of logged steps over all ranks."""

    def __init__(self, routing: Routing, mesh: Mesh) -> None:
        self._routing = routing
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
            self._routing.begin()
            self._fresh = True

    def gradients_ready(self, step: int, logged: bool) -> None:
        """Average the routing of a logged step over all ranks. (all ranks)"""
        own = self._routing.means() if logged else None
        if own is not None:
            self._means = self._mesh.all_reduce_mean(own, "loss")

    def measured(self) -> dict[str, Any]:
        """Return the numbers of the logged step. Waits for the device."""
        means = self._means
        if means is None or not means.isfinite().all():
            return {}

        experts = means.shape[1] - LOAD
        of_model = means.mean(0).tolist()  # (LOAD + E,)

        # An expert's share of the tokens, as a multiple of an even share.
        loads = []
        for shares in means[:, LOAD:].tolist():
            loads.append([round(experts * share, 4) for share in shares])
        return {
            "moe/load_max": max(map(max, loads)),
            "moe/load_min": min(map(min, loads)),
            "moe/entropy": of_model[ENTROPY],
            "moe/balance_loss": of_model[BALANCE],
            "moe/z_loss": of_model[Z],
            LOADS: loads,
        }

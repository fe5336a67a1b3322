"""What one round of real ranks keeps and sends, counted."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nanoray.mesh.axis import data_axis
from nanoray.mesh.mesh import Mesh
from nanoray.mesh.pieces import whole_shards
from nanoray.parallel.local_sgd import Exchange
from nanoray.state.outer import Outer


def live_bytes() -> int:
    """Return the bytes of all storages of tensors in this process."""
    gc.collect()
    sizes = {}
    for thing in gc.get_objects():
        if type(thing) in (Tensor, nn.Parameter):
            storage = thing.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def count_rank(mesh: Mesh, order: dict[str, Any], emit: Callable[[Any], None]) -> None:
    """Exchange a layer's moves once; emit what was kept, was there meanwhile, and was sent. (all
    ranks)
    """
    torch.manual_seed(0)
    layer = nn.Linear(512, 512, bias=False)
    shards = whole_shards(layer)
    before = live_bytes()
    outer = Outer(shards, order["momentum"], [["weight"]])
    kept = live_bytes() - before

    axis = data_axis(mesh)
    sent = Counter[str]()
    start_exchange = axis.start_exchange
    start_all_gather = axis.start_all_gather

    def noted_exchange(flat: Tensor, *rest: Any) -> Any:
        sent["all_to_all"] += flat.nbytes
        return start_exchange(flat, *rest)

    def noted_gather(flat: Tensor, *rest: Any) -> Any:
        sent["all_gather"] += flat.nbytes
        return start_all_gather(flat, *rest)

    axis.start_exchange = noted_exchange  # type: ignore[method-assign]
    axis.start_all_gather = noted_gather  # type: ignore[method-assign]
    exchange = Exchange(axis, outer.moved(shards, 0), True, 8.0, order["bits"])
    exchange.gather()
    travelling = live_bytes() - before - kept
    exchange.result()
    emit({"kept": kept, "travelling": travelling, "sent": dict(sent), "weights": 4 * 512 * 512})

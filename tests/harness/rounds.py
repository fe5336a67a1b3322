"""What one round of real ranks keeps and sends, counted."""

from __future__ import annotations

import gc
import time
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
    gc.collect()
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
    # Without a search for cycles: what an exchange leaves behind must go by itself.
    gc.disable()
    travelling = 0
    for _ in range(2):
        moved = outer.moved(0)
        exchange = Exchange(axis, moved, True, order["bucket_mb"], order["bits"])
        travelling = max(travelling, live_bytes() - before - kept)
        del moved
        exchange.gather()
        travelling = max(travelling, live_bytes() - before - kept)
        exchange.result()
        del exchange
    # A thread of gloo lets go of its last message a moment later.
    left = live_bytes() - before - kept
    for _ in range(100):
        # All ranks meet equally often.
        mesh.barrier()
        if left:
            time.sleep(0.02)
            left = live_bytes() - before - kept
    gc.enable()
    found = {"kept": kept, "travelling": travelling, "left": left, "sent": dict(sent)}
    emit(found | {"weights": 4 * 512 * 512})

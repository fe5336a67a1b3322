"""How many collectives each rank has started: it tells which rank left one out, when all wait for
ever.
"""

from __future__ import annotations

import threading
from datetime import timedelta

import torch

from nanoray.parallel.mesh import Mesh, collectives_started
from nanoray.parallel.rendezvous import open_store
from tests.harness.commands import wait_for as until
from tests.ranks.test_strangers import both


def leave_one_out(mesh: Mesh) -> tuple[int, int]:
    """Return how many collectives this rank has started before, and while one waits that rank 1
    leaves out.
    """
    ones = torch.ones(8)
    before, during, met = collectives_started(), [0], threading.Event()

    def look() -> None:
        assert met.wait(60)
        if mesh.rank == 0:
            until(lambda: collectives_started() > counted[0], 60)
            mesh.store.set("rank 0 waits", "")
        else:
            mesh.store.wait(["rank 0 waits"], timedelta(seconds=60))
        during[0] = collectives_started()
        if mesh.rank == 1:
            mesh.all_reduce(ones)  # so that rank 0 need not wait for its timeout

    watching = threading.Thread(target=look)
    watching.start()
    mesh.all_gather(mesh.rank)
    mesh.broadcast("word")
    mesh.barrier()
    counted = [collectives_started()]
    met.set()
    if mesh.rank == 0:
        mesh.all_reduce(ones)
    watching.join()
    return before, during[0]


def test_the_rank_that_left_out_a_collective_has_started_one_less() -> None:
    found = both(open_store("127.0.0.1", 2, 60), leave_one_out)
    (before, during), (same, one_less) = found[0], found[1]
    assert before == same
    assert during == one_less + 1 > before + 3

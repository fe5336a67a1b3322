"""A rank that never comes, or that has ended: the others say so in one line, without Ray."""

from __future__ import annotations

from datetime import timedelta

import pytest
from torch.distributed import HashStore, TCPStore

from nanoray.config import make_config
from nanoray.errors import RendezvousError
from nanoray.parallel.rendezvous import Rendezvous
from nanoray.train import __main__ as command

CONFIG = make_config({"init_timeout_s": 7, "micro_batch_size": 1})
TWO = Rendezvous(rank=0, world_size=2, local_world_size=2)


def test_a_rank_that_does_not_come_is_named() -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(RendezvousError) as error:
        command._with_backend(TWO, CONFIG, store)
    said = str(error.value)
    assert said.startswith("rank 1 has not come within init_timeout_s = 7 s, or has ended before; ")
    assert "\n" not in said


def test_so_is_rank_0_whose_store_has_gone() -> None:
    """Rank 0 serves the store: when it ends early, the connections of the others break."""
    served = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    ours = TCPStore("127.0.0.1", served.port, 2, wait_for_workers=False)
    ours.set_timeout(timedelta(seconds=20))
    del served
    with pytest.raises(RendezvousError, match="rank 0 has not come within init"):
        command._from_rank(ours, 0, "spec", CONFIG)

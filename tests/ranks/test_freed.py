"""What a run leaves in its process: nothing that only a search for cycles would free.

Worker processes of a DataLoader are forked. A process group that one of them frees, because its
search for cycles comes first, waits there for threads that were not forked with it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanoray.checkpoint.run_folder import RunSpec
from nanoray.parallel.rendezvous import Rendezvous
from nanoray.train.engine import Engine
from nanoray.train.rank import train
from tests.harness.lasting_ranks import LastingRanks
from tests.harness.ranks import make_spec

WAYS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero1": {"dp_mode": "zero1"},
    "audit": {"audit_every": 2},
    "fsdp": {"dp_mode": "fsdp"},
    "traced": {"comm_trace": "always"},
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[LastingRanks]:
    with LastingRanks(2) as ranks:
        yield ranks


def counting(spec: RunSpec, rendezvous: Rendezvous) -> dict[str, Any]:
    """Train, and count the engines that are left."""
    gc.collect()
    gc.disable()
    try:
        outcome = train(spec, rendezvous)
        left = sum(isinstance(each, Engine) for each in gc.get_objects())
    finally:
        gc.enable()
    return outcome | {"left": left}


@pytest.mark.parametrize("way", WAYS)
def test_the_engine_of_a_run_goes_with_it(
    ranks: LastingRanks, text: Path, tmp_path: Path, way: str
) -> None:
    spec = make_spec(text, tmp_path, max_steps=4, global_batch_size=12, **WAYS[way])
    outcomes = ranks.train(spec, counting)
    assert [outcome.get("left") for outcome in outcomes] == [0, 0], outcomes

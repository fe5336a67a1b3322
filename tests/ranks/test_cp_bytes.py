"""What the ranks that share sequences send in a real step, against the formula of the forecast."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks.conftest import Pools
from tests.ranks.test_hybrid_bytes import carried_on_axes

ZERO1 = {"dp_mode": "zero1"}
ARMS: dict[str, dict[str, Any]] = {
    "cp 2": ZERO1 | {"cp": 2},
    "cp 4, 2 micro batches": ZERO1 | {"cp": 4, "grad_accum_steps": 2},
    "cp 4, block": ZERO1 | {"cp": 4, "activation_checkpointing": "block"},
    "cp 2, selective": ZERO1 | {"cp": 2, "activation_checkpointing": "selective"},
    "cp 2, tp 2": {"cp": 2, "tp": 2} | ZERO1,
    "cp 2, fsdp": {"cp": 2, "dp_mode": "fsdp"},
}


@pytest.mark.full
def test_each_axis_carries_what_the_formula_says(pools: Pools) -> None:
    for arm, (found, said) in carried_on_axes(pools, ARMS).items():
        # A trace calls a message by both of its sides. All-reduces also have the norm, and tp's are
        # tested with tp.
        said = {key.replace("send", "send_recv"): size for key, size in said.items()}
        said = {key: size for key, size in said.items() if not key.endswith("all_reduce")}
        found = {key: size for key, size in found.items() if not key.endswith("all_reduce")}
        assert found == pytest.approx(said), arm
        assert {key.split()[0] for key in found} == {"cp", "dp_cp"}, arm

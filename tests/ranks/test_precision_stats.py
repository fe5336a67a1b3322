"""Shares of lost gradients and of weights that stay: counted by hand, and on real ranks in every
cut of the state.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nanoray.observe.watch.dangers import PRECISION
from nanoray.observe.watch.precision_stats import PrecisionStats
from nanoray.parallel.mesh import Mesh
from nanoray.parallel.pieces import whole_shards
from tests.harness.axes import Runs
from tests.harness.ranks import records


class State:
    """What PrecisionStats reads of a TrainState."""

    sharded = False

    def __init__(self, model: nn.Module) -> None:
        self.shards = whole_shards(model)


ALONE = Mesh(0, 1, 0, torch.device("cpu"), "none", "")


@pytest.mark.parametrize(("precision", "lost"), [("fp16", 3 / 5), ("bf16", 2 / 5)])
def test_counts_by_hand(precision: str, lost: float) -> None:
    """2^-20 is subnormal in fp16 and normal in bf16; 2^-130 in neither."""
    model = nn.Sequential(nn.Linear(4, 1))
    weight, bias = model[0].weight, model[0].bias
    weight.grad, bias.grad = torch.tensor([[0.0, 2.0**-20, 1.0, -2.0]]), torch.tensor([2.0**-130])
    stats = PrecisionStats(2, precision, State(model), ALONE)  # type: ignore[arg-type]
    stats.gradients_ready(1, True)
    assert stats.measured() == {}, "not due"
    stats.gradients_ready(2, True)
    with torch.no_grad():
        weight[0, 0] += 1.0
        bias += 1.0
    found = stats.measured()
    assert found["precision/grad_lost"] == pytest.approx(100 * lost)
    assert found["precision/unchanged"] == pytest.approx(60.0)
    assert found[PRECISION] == {
        "0": {"zero": 20.0, "subnormal": pytest.approx(100 * lost - 20), "unchanged": 60.0}
    }
    assert stats.measured() == {}, "once"


@pytest.fixture
def runs(text: Path, tmp_path: Path) -> Runs:
    return Runs(
        text,
        tmp_path,
        {"max_steps": 4, "global_batch_size": 12, "log_every": 3, "precision_stats": "every=2"},
    )


def of(runs: Runs, name: str, **settings: Any) -> dict[int, dict[str, Any]]:
    found = {r["step"]: r for r in records(runs.trained(name, 2, **settings))}
    assert {step for step, record in found.items() if PRECISION in record} == {2, 4}
    assert set(found) == {1, 2, 3, 4}, "a step that is counted is logged"
    return found


def test_all_cuts_of_the_state_count_alike(runs: Runs) -> None:
    settings = {"precision": "bf16_pure", "lr": 1e-5, "min_lr": 1e-6}
    hand = of(runs, "hand", dp_mode="ddp_by_hand", **settings)[4]
    assert set(hand[PRECISION]) == {"tok_emb", "pos_emb", "blocks.0", "blocks.1", "norm"}
    assert hand["precision/unchanged"] > 70, "updates of 1e-5 are lost in bf16"
    assert hand[PRECISION]["norm"]["unchanged"] == 100.0, "weights near 1"
    zero2 = of(runs, "zero2", dp_mode="zero2", **settings)[4]
    for key in ("precision/grad_lost", "precision/unchanged"):
        assert zero2[key] == pytest.approx(hand[key], abs=1e-9)
    assert zero2[PRECISION] == hand[PRECISION]

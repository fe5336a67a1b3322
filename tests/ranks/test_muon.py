"""Muon and rotary positions in whole runs: resumed to the bit, equal on ranks and in one process,
sampled, cut.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nanoray.cli.sample import main as sample
from tests.harness.axes import Runs, final
from tests.harness.ranks import series

FAST: dict[str, Any] = {
    "optimizer": "muon",
    "positions": "rotary",
    "attention": "plain",
    "loss_chunk": 50,
}
RECIPE: dict[str, Any] = {
    "max_steps": 6,
    "global_batch_size": 12,
    "precision": "fp32",
    "lr": 0.004,
} | FAST


@pytest.fixture
def runs(text: Path, tmp_path: Path) -> Runs:
    return Runs(text, tmp_path, RECIPE)


@pytest.mark.parametrize("mode", ["ddp", pytest.param("ddp_by_hand", marks=pytest.mark.full)])
def test_a_resumed_run_is_the_whole_run(runs: Runs, mode: str) -> None:
    whole, _ = runs.resumed(2, 3, dp_mode=mode)
    kinds = {name.split(".")[0] for name in final(whole).optimizer}
    assert kinds == {"momentum_buffer", "exp_avg", "exp_avg_sq", "step"}


def test_two_ranks_learn_what_one_process_does(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = runs.trained("one", 1), runs.trained("two", 2)
    assert series(two) == pytest.approx(series(one), abs=2e-4)
    assert series(one)[6] < series(one)[1]
    by_hand = runs.trained("hand", 2, dp_mode="ddp_by_hand")
    assert series(by_hand) == pytest.approx(series(two), abs=2e-5), (
        "the norm for clipping is summed in another order"
    )
    assert sample([str(one.folder), "--max_new_tokens", "5", "--device", "cpu"]) == 0
    assert capsys.readouterr().out

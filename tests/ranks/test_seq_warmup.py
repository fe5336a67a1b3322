"""Sequences that are short at first: their lengths, whole runs that resume among them, and what is
refused.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoray.config import Batch, load_config
from nanoray.data.lengths import length_at
from nanoray.data.prepare import prepare
from nanoray.data.tokens import MicroBatches, TokenData
from tests.harness.axes import Runs
from tests.harness.ranks import records, series

SHORT = {"seq_warmup_steps": 4, "seq_warmup_from": 4}  # of 16: lengths 4 4 8 8 16 16
RECIPE: dict[str, Any] = {
    "max_steps": 6,
    "global_batch_size": 12,
    "micro_batch_size": 3,
    "precision": "fp32",
} | SHORT


@pytest.fixture
def runs(text: Path, tmp_path: Path) -> Runs:
    return Runs(text, tmp_path, RECIPE)


def test_a_run_resumed_among_short_sequences_is_the_whole_run(runs: Runs) -> None:
    """Two ranks accumulate; the checkpoint lies between two steps of 8 tokens. Each step counts all
    its tokens.
    """
    whole, _ = runs.resumed(2, 4, dropout=0.1, log_every=1)
    assert [r["train/tokens"] for r in records(whole)] == [12 * 16 * step for step in range(1, 7)]
    without = runs.trained("without", 2, dropout=0.1, seq_warmup_steps=0, seq_warmup_from=8)
    assert series(without)[1] != series(whole)[1]


def test_two_ranks_learn_what_one_process_does(runs: Runs) -> None:
    one, two = runs.trained("one", 1), runs.trained("two", 2)
    assert series(two) == pytest.approx(series(one), abs=2e-4)


def test_a_step_has_the_tokens_that_it_would_have_without(text: Path, tmp_path: Path) -> None:
    settings = {
        "dataset": str(text),
        "data_dir": str(tmp_path),
        "block_size": 64,
        "seq_warmup_steps": 150,
    }
    config = load_config(overrides=settings)
    data = TokenData(prepare(config), config.block_size, config.seed)
    whole, cut = (
        MicroBatches(data, Batch(3, 2, 2), 1, how)
        for how in (None, partial(length_at, config=config))
    )
    for step, length in {0: 8, 49: 8, 50: 16, 99: 16, 100: 32, 149: 32, 150: 64, 10**6: 64}.items():
        for x, y in zip(whole.step(12 * step), cut.step(12 * step), strict=True):
            for long, short in zip(x, y, strict=True):
                assert short.shape == (3 * 64 // length, length)
                assert torch.equal(short.flatten(), long.flatten())

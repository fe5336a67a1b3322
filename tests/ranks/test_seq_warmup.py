"""Sequences that are short at first: their lengths, whole runs that resume among them, and what is
refused.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoray.config import Batch, load_config, resolve_batch
from nanoray.data.lengths import length_at
from nanoray.data.prepare import prepare
from nanoray.data.tokens import MicroBatches, TokenData
from nanoray.errors import ConfigError
from nanoray.forecast.dry_run import dry_run_lines
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


def test_a_dry_run_tells_the_lengths(text: Path, tmp_path: Path) -> None:
    config = load_config(
        overrides={"dataset": str(text), "data_dir": str(tmp_path), "seq_warmup_steps": 150}
    )
    lines = dry_run_lines(config, [], resolve_batch(config, 2), prepare(config), "here")
    assert "sequences  cut into 8 to step 50, 16 to step 100, 32 to step 150, then 64 tok" in lines


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"seq_warmup_steps": 2001},
            "seq_warmup_steps = 2001 is beyond max_steps = 2000; lower it",
        ),
        (
            {"block_size": 96},
            "block_size = 96 is not 2, 4, 8, ... times 8, the tokens with which "
            "seq_warmup_steps begins; use block_size 64 or 128",
        ),
        (
            {"block_size": 8},
            "block_size = 8 is not 2, 4, 8, ... times 8, the tokens with which "
            "seq_warmup_steps begins; use block_size 16 or 32",
        ),
        (
            {"block_size": 63},
            "block_size = 63 is not 2, 4, 8, ... times 8, the tokens with which "
            "seq_warmup_steps begins; use block_size 32 or 64",
        ),
        (
            {"model": "resnet"},
            "with model = resnet: only a gpt has sequences that can be cut; drop one of the two",
        ),
        (
            {"tp": 2},
            "with tp = 2: its ranks pass each other sequences of block_size tokens; drop one of "
            "the two",
        ),
        (
            {"pp": 2},
            "with pp = 2: its ranks pass each other sequences of block_size tokens; drop one of "
            "the two",
        ),
        (
            {"compile": True},
            "with compile = True: it would compile for each length, and a resumed run for other "
            "ones",
        ),
    ],
)
def test_what_cannot_begin_short_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(overrides={"seq_warmup_steps": 100} | settings)
    assert message in str(refused.value)

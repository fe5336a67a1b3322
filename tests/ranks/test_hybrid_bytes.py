"""What each axis of a real step carries, against the formula of the forecast."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from nanoray.bench.simulate import VOCAB
from nanoray.bench.strategies import MODES, configuration
from nanoray.config import resolve_batch
from nanoray.forecast.scale import job_of
from nanoray.forecast.traffic import talks_of
from nanoray.mesh.layout import Layout
from tests.ranks.conftest import Pools

RANKS = 4
SHARDED = ("zero1", "zero2", "fsdp full", "fsdp grad_op")
# Sizes that 4 ranks divide into slices without padding, and buckets of which there are several
SIZES = {"n_embd": 64, "n_layer": 2, "block_size": 32, "global_batch_size": 8, "bucket_mb": 0.1}
ARMS: dict[str, dict[str, Any]] = {
    f"{mode}, {replicas} replicas, {accum} micro batches": MODES[mode]
    | {"replicas": replicas, "grad_accum_steps": accum}
    for mode in SHARDED
    for replicas in (1, 2)
    for accum in (1, 2)
}


def formula(order: dict[str, Any], own: dict[str, Any]) -> dict[str, float]:
    """Return the bytes of all tensors of a step, by axis and operation."""
    config = configuration(order, own, RANKS)
    layout = Layout.of(config, RANKS)
    batch = resolve_batch(config, layout.dp)
    job = job_of(config, VOCAB[config.tokenizer], batch.global_size, on_gpus=False)
    total = Counter[str]()
    for talk in talks_of(job, layout, batch.micro, 0):
        total[f"{talk.axis} {talk.op}"] += talk.times * talk.nbytes
    return dict(total)


def test_each_axis_carries_what_the_formula_says(pools: Pools) -> None:
    order = {
        "model": "gpt",
        "preset": "tiny",
        "overrides": SIZES,
        "arms": ARMS,
        "rounds": 1,
        "steps": 1,
    }
    seen = {}
    for event in pools(RANKS).run("nanoray.bench.strategies:time_rank", order):
        if "on_axes" in event:
            seen[event["arm"]] = event["on_axes"]
    assert seen.keys() == ARMS.keys()
    for arm, own in ARMS.items():
        # The norm is a sum of one number.
        carried = {key: size for key, size in seen[arm].items() if not key.endswith("all_reduce")}
        assert carried == pytest.approx(formula(order, own)), arm
        axes = {key.split()[0] for key in carried}
        assert axes == ({"dp"} if own["replicas"] == 1 else {"shard", "replica"}), arm

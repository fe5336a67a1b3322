"""What each axis of a real step carries, and what a rank keeps in a group, against the formulas."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from nanoray.bench.engine import COMMUNICATION, MEMORY_ENTRY, TIME_ENTRY, order_of
from nanoray.bench.predicted import VOCAB
from nanoray.bench.strategies import HYBRID, KEPT, MODES, configuration
from nanoray.cli.forecast.job import job_of
from nanoray.cli.forecast.traffic import talks_of
from nanoray.config import Config, resolve_batch
from nanoray.config.layout import Layout
from nanoray.models.costs import count_parameters
from nanoray.models.gpt import ModelShape
from tests.ranks.conftest import Pools

RANKS = 4
SHARDED = ("zero1", "zero2", "fsdp full", "fsdp grad_op")
# Sizes that 4 ranks divide into slices without padding, and buckets of which there are several
SIZES = {"n_embd": 64, "n_layer": 2, "block_size": 32, "global_batch_size": 8, "bucket_mb": 0.1}
ARMS: dict[str, dict[str, Any]] = {
    f"{mode}, {replicas} replicas, {accum} micro batches": MODES[mode]
    | {"replicas": replicas, "grad_accum_steps": accum}
    for mode in SHARDED
    for replicas, accum in ((1, 1), (2, 1), (2, 2))
}


def config_of(own: dict[str, Any]) -> Config:
    return configuration("tiny", SIZES, own, RANKS)


def formula(config: Config) -> dict[str, float]:
    """Return the bytes of all tensors of a step, by axis and operation."""
    layout = Layout.of(config, RANKS)
    batch = resolve_batch(config, layout.dp)
    job = job_of(config, VOCAB[config.tokenizer], batch.global_size, on_gpus=False)
    total = Counter[str]()
    for talk in talks_of(job, layout, batch.micro, 0):
        total[f"{talk.axis} {talk.op}"] += talk.times * talk.nbytes
    return dict(total)


def carried_on_axes(
    pools: Pools, arms: dict[str, dict[str, Any]]
) -> dict[str, tuple[dict[str, float], dict[str, float]]]:
    """Return for each arm the bytes of a step by axis and operation: traced, and by the formula."""
    configs = {arm: config_of(own) for arm, own in arms.items()}
    seen = {}
    for event in pools(RANKS).run(TIME_ENTRY, order_of(configs, measures=[COMMUNICATION])):
        if "on_axes" in event:
            seen[event["arm"]] = event["on_axes"]
    assert seen.keys() == arms.keys()
    return {arm: (seen[arm], formula(config)) for arm, config in configs.items()}


@pytest.mark.full
def test_each_axis_carries_what_the_formula_says(pools: Pools) -> None:
    both = carried_on_axes(pools, ARMS)
    for arm, own in ARMS.items():
        found, said = both[arm]
        # The norm is a sum of one number.
        carried = {key: size for key, size in found.items() if not key.endswith("all_reduce")}
        assert carried == pytest.approx(said), arm
        axes = {key.split()[0] for key in carried}
        assert axes == ({"dp"} if own["replicas"] == 1 else {"shard", "replica"}), arm


@pytest.mark.full
def test_a_rank_keeps_its_share_of_a_group(pools: Pools) -> None:
    """Weights, gradients and optimizer, by the storages that are alive at the end of a step."""
    for mode, own in HYBRID.items():
        (found,) = pools(RANKS).run(MEMORY_ENTRY, order_of({mode: config_of(own)}))
        formula = found["formula"]
        assert "mirror" not in formula
        held = found["held"][-1]
        for part in KEPT[:3]:
            assert held[part] == pytest.approx(formula[part], rel=0.02), (mode, part)
        # A rank of a group of two keeps half of what the mode shards.
        assert formula["optimizer"] == pytest.approx(8 * parameters_of_the_model() / 2, rel=0.02), (
            mode
        )


def parameters_of_the_model() -> int:
    """Return the parameters of the model."""
    config = config_of({})
    return count_parameters(ModelShape.of(config, VOCAB[config.tokenizer]))

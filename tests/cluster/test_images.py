"""A ResNet on Ray loses ranks, also while statistics are exchanged: its weights end as those of an
undisturbed run.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.cluster import (
    Cluster,
    assert_same_run,
    injected,
    launch,
    no_actors_left,
    reports,
    undisturbed,
    weights,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
RECIPE = """
model: {name: resnet, num_layers: 8}
training: {batch_size: 8, learning_rate: 0.05, optimizer: sgd}
dataset: cifar10-generated
momentum: 0.9
sync_batchnorm: true
max_steps: 24
warmup_steps: 2
log_every: 1
eval_every: 8
eval_samples: 60
checkpoint_every: 8
spares: 0
"""
FLAGS = ("--workers", "3", "--cpus_per_worker", "0.5", "--max_failures", "99")


@pytest.mark.full
def test_a_lost_rank_changes_no_bit_of_weights_and_statistics(
    cluster: Cluster, tmp_path: Path
) -> None:
    recipe = tmp_path / "images.yaml"
    recipe.write_text(RECIPE + f"data_dir: {tmp_path / 'cache'}\n")
    undisturbed(recipe, tmp_path / "clean", *FLAGS)
    plan = [
        ("backward", 4),
        ("exchange_statistics", 9),
        ("exchange_batchnorm", 14),
        ("optimizer", 19),
    ]
    faults = ";".join(
        f"kill@rank={i % 3},step={step},phase={phase}" for i, (phase, step) in enumerate(plan)
    )
    code, output = launch(cluster, recipe, tmp_path / "out", *FLAGS, "--faults", faults)
    assert code == 0, output
    assert [event["phase"] for event in injected(tmp_path / "out")] == [phase for phase, _ in plan]
    assert {report["recovery"] for report in reports(tmp_path / "out")} == {"in_place"}
    assert_same_run(tmp_path / "out", tmp_path / "clean")
    assert "blocks.1.norm2.running_var" in weights(tmp_path / "clean")
    assert no_actors_left(cluster)

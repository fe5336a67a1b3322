"""Ranks on Ray that run out of memory: the same processes do the same step again, with a smaller micro
batch; where they cannot meet again, all start again with it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nanoray.observe.faults import story
from tests.harness.cluster import (
    Cluster,
    assert_same_run,
    finish,
    fired,
    no_actors_left,
    reports,
    start,
    summary,
    undisturbed,
)
from tests.harness.ranks import only_run

pytestmark = pytest.mark.full  # tests/ranks/test_out_of_memory.py has the same without Ray


@pytest.mark.parametrize(
    ("mode", "flags"),
    [
        ("in place", ()),
        # No other rank has a rank's part of the state, which does not matter here
        ("in place", ("--tp", "2")),
        ("in place", ("--dp_mode", "fsdp", "--mirror", "off")),
        ("restart", ("--recovery", "restart")),
        ("restart", ("--allreduce", "ring")),
    ],
)
def test_the_step_is_done_again_by_the_same_ranks(
    cluster: Cluster, recipe: Path, tmp_path: Path, mode: str, flags: tuple[str, ...]
) -> None:
    """Twice in the first step, so that all losses are those of a quarter of the micro batch."""
    flags = (*flags, "--workers", "2", "--cpus_per_worker", "0.5", "--global_batch_size", "16")
    flags = (*flags, "--max_steps", "6", "--dropout", "0.1", "--max_failures", "0")
    replicas = 1 if "--tp" in flags else 2
    quarter = 16 // replicas // 4
    undisturbed(recipe, tmp_path / "clean", *flags, "--micro_batch_size", str(quarter))
    flags = (*flags, "--micro_batch_size", str(4 * quarter))
    plan = "no-memory@rank=1,step=1,phase=backward,times=2"
    out = tmp_path / "out"
    code, output = finish(start(cluster, recipe, out, *flags, "--faults", plan), 200)
    assert code == 0, output
    assert fired(out) == ["no-memory"] * 2
    assert_same_run(out, tmp_path / "clean")
    assert f"micro batch has at most {quarter} instead of {4 * quarter}" in str(
        story(only_run(out))
    )
    found = reports(out)
    if mode == "restart":
        assert [report["cause"] for report in found] == ["no_memory"] * 2
        assert [report["recovery"] for report in found] == ["restart"] * 2
        assert summary(out)["restarts"] == 2
    else:
        assert found == [], "no rank failed"
        assert summary(out)["restarts"] == 0
        assert f"micro batch {2 * quarter} -> {quarter}" in output
    assert (
        json.loads((only_run(out) / "config.json").read_text())["micro_batch_size"] == 4 * quarter
    )
    assert no_actors_left(cluster)


def test_where_no_smaller_micro_batch_helps_the_ranks_save_and_the_run_ends(
    cluster: Cluster, recipe: Path, tmp_path: Path
) -> None:
    """Each rank has a part of the weights that no other one has."""
    flags = ("--workers", "2", "--cpus_per_worker", "0.5", "--tp", "2", "--global_batch_size", "2")
    flags = (*flags, "--micro_batch_size", "1", "--max_steps", "6", "--checkpoint_every", "0")
    plan = "no-memory@rank=1,step=4,phase=backward"
    out = tmp_path / "out"
    code, output = finish(start(cluster, recipe, out, *flags, "--faults", plan), 200)
    assert code == 1, output
    assert "with 1 sequence at a time" in output
    assert "Saved at step 3" in output
    assert [path.name for path in (only_run(out) / "checkpoints").iterdir()] == ["step_00000003"]
    assert no_actors_left(cluster)

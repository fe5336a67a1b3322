"""`micro_batch_size auto` on Ray: the run is the one that is given the number."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harness.cluster import (
    Cluster,
    assert_same_run,
    finish,
    no_actors_left,
    start,
    undisturbed,
)

pytestmark = pytest.mark.full  # tests/unit/test_micro_batch.py has the launcher's part without Ray


def test_the_run_is_the_one_that_is_given_the_size(
    cluster: Cluster, recipe: Path, tmp_path: Path
) -> None:
    flags = ("--workers", "2", "--cpus_per_worker", "0.5", "--global_batch_size", "8")
    flags = (*flags, "--max_steps", "6", "--dropout", "0.1", "--data_dir", str(tmp_path / "data"))
    out = tmp_path / "out"
    code, output = finish(start(cluster, recipe, out, *flags, "--micro_batch_size", "auto"), 200)
    assert code == 0, output
    (search,) = out.glob("*_tune-*")
    search.rename(tmp_path / "search")
    (record,) = out.glob("*/run.json")
    values = json.loads(record.read_text())
    found = values["config"]["micro_batch_size"]
    assert values["origins"]["micro_batch_size"] == f"auto: tune chose {found}"
    assert not values["config"]["micro_batch_search"]
    undisturbed(recipe, tmp_path / "clean", *flags, "--micro_batch_size", str(found))
    assert_same_run(out, tmp_path / "clean")
    assert no_actors_left(cluster)

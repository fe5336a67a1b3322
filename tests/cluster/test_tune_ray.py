"""A search on Ray: a rank that is killed costs the block that it was in, and the search goes on."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.harness.cluster import Cluster, finish, no_actors_left, reports
from tests.harness.commands import Command, wait_for

pytestmark = pytest.mark.full  # tests/unit/test_tune.py goes on from a file without Ray


def test_a_killed_rank_costs_a_block(cluster: Cluster, recipe: Path, tmp_path: Path) -> None:
    flags = ["--workers", "2", "--cpus_per_worker", "0.5", "--budget_s", "15", "--out_dir"]
    env = cluster.env | {"CXX": "none"}  # compiling would take the whole budget
    command = Command("nanoray.lab.tune", str(recipe), *flags, str(tmp_path), env=env)
    command.cluster = cluster

    def blocks() -> list[str]:
        files = list(tmp_path.glob("*_tune-*/tune.jsonl"))
        return files[0].read_text().splitlines() if files else []

    wait_for(lambda: len(blocks()) > 2, process=command)
    before = blocks()
    (ledger,) = tmp_path.glob("*_tune-*/arms/logs/rank1.*.ledger")
    os.kill(int(ledger.stem.rpartition("-")[2]), signal.SIGKILL)
    code, output = finish(command, 200)
    assert code == 0, output
    assert [report["cause"] for report in reports(tmp_path)] == ["killed"]
    after = blocks()
    assert after[: len(before)] == before
    assert len(after) > len(before)
    # No block was measured twice.
    turns = [(str(line["choice"]), line.get("turn")) for line in map(json.loads, after)]
    assert len(turns) == len(set(turns))
    assert "tuned  " in output
    assert no_actors_left(cluster)

"""The benchmarks' ranks as Ray actors: on a cluster of two nodes, and on a local Ray."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness.cluster import Cluster, end_session, in_driver, no_actors_left
from tests.harness.commands import run, wait_for

TINY = (
    "--quick",
    "--max_bytes",
    "1024",
    "--ops",
    "all_reduce,broadcast",
    "--dtypes",
    "float32",
    "--device",
    "cpu",
)


def collectives(out: Path, *flags: str, env: dict[str, str], ranks: int) -> dict[str, Any]:
    """Run the benchmark in a process of its own; return its conditions once all came out right."""
    command = (
        "nanoray.bench",
        "communication",
        "collectives",
        *TINY,
        "--json",
        str(out),
    )
    done = run(*command, "--workers", str(ranks), *flags, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("OK  3 rows")
    assert not done.stdout.startswith("ray ")  # stdout is the report's
    report = json.loads(out.read_text())
    rows = [r for r in report["rows"] if "op" in r]
    assert [(r["op"], r["ranks"], r["wrong"]) for r in rows] == [
        ("all_reduce", ranks, 0),
        ("broadcast", ranks, 0),
    ]
    return report["conditions"]


@pytest.mark.full
def test_on_two_nodes_of_a_ray_cluster(cluster: Cluster, tmp_path: Path) -> None:
    """The head has two CPUs and the node one: with three ranks, one is on the node."""
    join = [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "start",
        f"--address={cluster.address}",
        "--block",
    ]
    ports = ["--min-worker-port=0", "--max-worker-port=0"]
    node = subprocess.Popen(
        [*join, *ports, "--num-cpus=1"],
        env=cluster.env,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    alive = "print(json.dumps(sum(node['Alive'] for node in ray.nodes())))"
    try:
        wait_for(lambda: in_driver(cluster, alive) == 2, 120)
        told = collectives(tmp_path / "c.json", "--ray_address", "auto", env=cluster.env, ranks=3)
        # Ranks are sorted by node id, which Ray draws: the head may come first or second.
        assert (told["ranks"]["started by"], told["ranks"]["on hosts"]) in [
            ("ray", "2 (2 + 1)"),
            ("ray", "2 (1 + 2)"),
        ]
        events, rank, message = in_driver(cluster, RAY_DEATH)
        assert (events, rank) == ([{"before": True}], 1)
        assert "break_down: its actor is gone: " in message
        assert no_actors_left(cluster)
    finally:
        end_session(node)
        wait_for(lambda: in_driver(cluster, alive) == 1, 120)


RAY_DEATH = """
from nanoray.bench.harness.rank_pool import RankPool, RankFailed, Where
ray.shutdown()
events = []
with RankPool(Where(2, "ray", "cpu", timeout_s=60)) as pool:
    try:
        for event in pool.run("tests.ranks.test_rank_pool:break_down", {"rank": 1, "how": "kill"}):
            events.append(event)
    except RankFailed as failed:
        found = [events, failed.rank, str(failed)]
print(json.dumps(found))
"""

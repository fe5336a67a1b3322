"""What test files of benchmarks on Ray share."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from nanoray.bench.harness import plan
from tests.harness.cluster import Cluster


@pytest.fixture
def shared_head(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let benchmarks that start a Ray head use the one of the tests."""
    process = SimpleNamespace(pid=cluster.session, poll=lambda: None)
    head = SimpleNamespace(process=process, tail=str, log=Path("/nowhere/ray.log"))
    env = {key: value for key, value in cluster.env.items() if key not in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")}
    monkeypatch.setattr(plan, "ray_head", lambda *_: nullcontext((cluster.address, head)))
    monkeypatch.setattr(plan, "arm_environment", lambda: env | {"PYTHONUNBUFFERED": "1"})

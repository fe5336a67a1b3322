"""The Ray heads that test files share. They end with this folder: an idle one takes a fiftieth of a
CPU.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from nanoray.bench import killed
from nanoray.bench.harness import trainings
from nanoray.machine import proc
from tests.harness.cluster import Cluster, processes_of_session, ray_head


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add what Ray itself said to the report of a test that failed: a worker that does not start
    shows only there.
    """
    report = yield
    if report.failed:
        for name, used in getattr(item, "funcargs", {}).items():
            if isinstance(used, Cluster):
                report.sections.append((f"Ray's logs, {name}", used.log()))
    return report


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    """A Ray head with two CPUs, for all tests that want nothing special of it."""
    with ray_head() as head:
        yield head


@pytest.fixture
def shared_head(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let benchmarks that start a Ray head use one of the tests.

    A benchmark knows the ranks of a Ray by its session. Those that were forked for it have sessions
    of their own, and are told to belong to it.
    """

    def stat_of(pid: int) -> list[str]:
        fields = proc.stat_of(pid)
        if fields and pid in processes_of_session(cluster.session):
            fields[3] = str(cluster.session)
        return fields

    monkeypatch.setattr(killed, "stat_of", stat_of)
    process = SimpleNamespace(pid=cluster.session, poll=lambda: None)
    head = SimpleNamespace(process=process, tail=str, log=Path("/nowhere/ray.log"))
    env = {
        key: value
        for key, value in cluster.env.items()
        if key not in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")
    }
    monkeypatch.setattr(trainings, "ray_head", lambda *_: nullcontext((cluster.address, head)))
    monkeypatch.setattr(trainings, "arm_environment", lambda: env | {"PYTHONUNBUFFERED": "1"})

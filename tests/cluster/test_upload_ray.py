"""Uploads on Ray: the driver's process sends the run, whatever happens to rank 0."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from nanoray.checkpoint.manifest import MANIFEST
from nanoray.machine.storage.store import Store
from tests.harness.cluster import (
    Cluster,
    assert_same_run,
    finish,
    injected,
    pid_of,
    start,
    undisturbed,
)
from tests.harness.commands import wait_for
from tests.harness.packages import needs
from tests.harness.ranks import only_run
from tests.harness.s3 import BUCKET, proxy_before, s3_server, secrets_in, variables

pytestmark = needs("s3fs", "moto")

FLAGS = ("--workers", "2", "--spares", "0", "--checkpoint_every", "10", "--dropout", "0.1")


def whole(store: Store) -> list[str]:
    """Return the names of all checkpoints below a URL that have a manifest."""
    return sorted(name.split("/")[2] for name in store.sizes("") if name.endswith(MANIFEST))


@pytest.mark.full
def test_rank_0_killed_during_an_upload_costs_the_upload_nothing(
    cluster: Cluster, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the run continues on a cluster of which no node has anything of it."""
    url = f"s3://{BUCKET}/ray runs"
    with s3_server() as server, proxy_before(server) as proxy:
        for name, value in variables(server.url).items():
            monkeypatch.setenv(name, value)
        there = Store(url)
        proxy.bytes_per_s = 40e3
        faults = "slow@rank=1,step=13,seconds=12"
        command = start(
            cluster,
            recipe,
            tmp_path / "a",
            *(*FLAGS, "--upload", url, "--stop_at", "24", "--faults", faults),
            **variables(proxy.url),
        )
        wait_for(lambda: any("step_00000010/" in name for name in there.sizes("")), process=command)
        assert whole(there) == []
        os.kill(pid_of(tmp_path / "a", 0, command), signal.SIGKILL)
        wait_for(lambda: "joins in" in command.output, process=command)
        assert whole(there) == [], "it was killed too late"
        proxy.bytes_per_s = float("inf")
        code, output = finish(command)
        assert code == 0, output
        assert [fault["kind"] for fault in injected(tmp_path / "a")] == ["slow"]
        assert "failure  rank 0 " in output
        assert whole(there) == ["step_00000010", "step_00000020", "step_00000024"]
        run = only_run(tmp_path / "a")
        assert f"upload   {url}/{run.name}: all is there, newest step_00000024" in output
        faults_there = Store(f"{url}/{run.name}").read("faults.jsonl")
        assert faults_there == (run / "faults.jsonl").read_bytes()
        assert secrets_in(run) == []

        # Elsewhere, from the URL alone.
        flags = ["--resume", f"{url}/{run.name}", "--stop_at", "0", "--faults", ""]
        resumed = start(
            cluster,
            Path(run / "config.json"),
            tmp_path / "b",
            *flags,
            **variables(server.url),
        )
        code, output = finish(resumed)
        assert code == 0, output
        assert f"step_00000024 fetched from {url}/{run.name}" in output
        undisturbed(recipe, tmp_path / "c", *FLAGS)
        assert_same_run(tmp_path / "b", tmp_path / "c")
        assert whole(there)[-1] == "step_00000030"

"""A real Prometheus scrapes a real run: each query of the dashboard answers, planted faults make
each alert fire.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from nanoray.faults.progress import ProgressFile
from nanoray.kube.render import KUBE_DIR
from tests.harness.cluster import Cluster, end_session, ends_with_tests, in_driver, ray_head, start
from tests.harness.commands import wait_for
from tests.harness.ports import free_port
from tests.harness.ranks import only_run

MANIFEST = KUBE_DIR / "components" / "monitoring" / "alerts.yaml"
RULE_FILE = yaml.safe_load(MANIFEST.read_text())["spec"]
ALERTS = {rule["alert"] for rule in RULE_FILE["groups"][0]["rules"]}
NEEDS_PEAK = "ray_nanoray_perf_mfu"  # no CPU has a known peak
# Steps of 0.3 s: both ranks sleep, then rank 1 alone. Then come a NaN, a kill, and a rank that
# hangs for good.
EVEN, SLOW, NAN, KILL, HANG = 80, 150, 90, 155, 220
PLAN = [f"slow@rank={rank},step={step},seconds=0.3" for step in range(2, EVEN) for rank in (0, 1)]
PLAN += [f"slow@rank=1,step={step},seconds=0.3" for step in range(EVEN, SLOW)]
PLAN += [
    f"slow@rank={rank},step={step},seconds=0.3" for step in range(SLOW, HANG) for rank in (0, 1)
]
PLAN += [f"nan@rank=1,step={NAN}", f"kill@rank=1,step={KILL}", f"hang@rank=1,step={HANG}"]


@contextmanager
def small_disk(path: Path) -> Iterator[None]:
    """Mount a file system of 256 MiB in memory at `path`; skip the test where that is not allowed."""
    path.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", path], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"cannot mount a small disk to fill: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", path], check=True)


class Prometheus:
    """Answers queries of a Prometheus of the tests' own."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def get(self, path: str, **asked: str) -> Any:
        query = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(asked)}"
        with urllib.request.urlopen(query, timeout=60) as answer:
            return json.load(answer)["data"]

    def ready(self) -> bool:
        try:
            return bool(self.get("query", query="up")["result"])
        except OSError:
            return False

    def ask(self, query: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get("query", query=query)["result"]
        return found

    def fired(self) -> set[str]:
        """The alerts that have fired so far, of any run."""
        return {
            found["metric"]["alertname"]
            for found in self.ask('max_over_time(ALERTS{alertstate="firing"}[1h])')
        }


@contextmanager
def prometheus(cluster: Cluster, folder: Path) -> Iterator[Prometheus]:
    """Scrape every second what Ray's file of addresses lists, with the rules' windows divided by
    60.
    """
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("prometheus is not on the PATH: apt-get install prometheus")
    session = in_driver(
        cluster, "print(json.dumps(ray._private.worker._global_node.get_session_dir_path()))"
    )
    addresses = Path(session).parent / "prom_metrics_service_discovery.json"
    wait_for(addresses.exists)
    rules = re.sub(r"\b(\d+)m\b", r"\1s", re.sub(r"\b1h\b", "60m", yaml.safe_dump(RULE_FILE)))
    (folder / "rules.yaml").write_text(rules)
    scrape = {
        "job_name": "ray",
        "file_sd_configs": [{"files": [str(addresses)], "refresh_interval": "1s"}],
    }
    every = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config = {"global": every, "rule_files": ["rules.yaml"], "scrape_configs": [scrape]}
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    port, log = free_port(), folder / "prometheus.log"
    command = [
        binary,
        f"--config.file={folder}/prometheus.yaml",
        f"--storage.tsdb.path={folder}/tsdb",
    ]
    with log.open("w") as stream:
        process = subprocess.Popen(
            [*command, f"--web.listen-address=127.0.0.1:{port}"],
            env=os.environ | {"GOMAXPROCS": "1"},
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=ends_with_tests,
        )
    try:
        server = Prometheus(port)
        wait_for(server.ready, process=process, said=log.read_text)
        yield server
    finally:
        end_session(process)


@pytest.mark.full
def test_planted_faults_make_each_alert_fire(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "disk"
    flags = {
        "max_steps": 100000,
        "log_every": 1,
        "eval_every": 20,
        "checkpoint_every": 20,
        "hang_timeout": 0,
    }
    flags |= {
        "timeout_s": 1200,
        "comm_trace": "every=1",
        "on_nan": "skip",
        "faults": ";".join(PLAN),
    }
    words = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
    with (
        small_disk(out),
        ray_head(RAY_metrics_report_interval_ms="2000") as cluster,
        prometheus(cluster, tmp_path) as server,
    ):
        process = start(cluster, recipe, out, *words)

        def step() -> int:
            position = (
                ProgressFile.read_all(only_run(out) / "logs" / "rank0.progress")
                if any(out.iterdir())
                else None
            )
            return position[0] if position else 0

        def wait(ready: Callable[[], object]) -> None:
            wait_for(
                ready,
                300.0,
                process,
                lambda: f"step {step()}, fired {server.fired()}: {process.output}",
            )

        wait(lambda: step() >= EVEN - 5)
        assert server.fired() == set(), "a run without faults fires none"

        with (out / "ballast").open("wb") as ballast:
            os.posix_fallocate(ballast.fileno(), 0, 240 << 20)
        wait(
            lambda: (
                {"NanorayLossNotFinite", "NanorayStraggler", "NanorayDiskNearlyFull"}
                <= server.fired()
            )
        )
        wait(lambda: step() >= KILL + 5)
        wait(lambda: "NanorayRankLost" in server.fired())
        assert not server.fired() & {"NanorayNoProgress", "NanorayCheckpointOld"}

        run = only_run(out).name
        for panel in json.loads((MANIFEST.parent / "dashboard.json").read_text())["panels"]:
            for target in panel["targets"]:
                found = server.ask(target["expr"].replace("$run", run))
                assert bool(found) != target["expr"].startswith(NEEDS_PEAK), target["expr"]
        wait(lambda: server.fired() == ALERTS)
        assert step() == HANG
        (group,) = server.get("rules")["groups"]
        assert {rule["health"] for rule in group["rules"]} == {"ok"}
        end_session(process)  # a rank hangs: it cannot be asked to stop

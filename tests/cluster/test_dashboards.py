"""A run in dashboards, in a real browser: TensorBoard with each of its tags, Ray's with its job and
actors.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nanoray.base.metrics import METRICS
from nanoray.bench.harness.processes import Child
from tests.cluster.test_launch import exported_metrics, submit
from tests.harness.browser import TEXT, browser, in_chromium
from tests.harness.cluster import TOKEN, Cluster, no_actors_left, trains
from tests.harness.commands import torchrun, wait_for
from tests.harness.ranks import only_run

pytestmark = [pytest.mark.full, in_chromium]

# Opens each group of cards once; returns the tags of the cards.
TAGS = """(() => {
  for (const group of document.querySelectorAll("div.card-group")) {
    if (!group.querySelector("card-view") && !group.dataset.opened) group.querySelector("button.group-toolbar").click();
    group.dataset.opened = "yes";
  }
  return [...document.querySelectorAll("card-view tb-truncated-path")].map(path => path.title);
})()"""


def recorded(run: Path) -> set[str]:
    """The metrics in a run's records."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {name for record in records for name in record if name in METRICS}


def test_tensorboard_shows_each_metric_of_a_run(text: Path, tmp_path: Path) -> None:
    flags = [
        "--preset=tiny",
        "--device=cpu",
        f"--dataset={text}",
        f"--data_dir={tmp_path}/data",
        "--comm_trace=always",
    ]
    flags += [
        f"--out_dir={tmp_path}/runs",
        "--max_steps=40",
        "--log_every=1",
        "--eval_every=5",
        "--checkpoint_every=10",
    ]
    for done in torchrun(2, "nanoray.train", *flags, "--name=shown", cwd=tmp_path):
        assert done.returncode == 0, done.stdout + done.stderr
    run, log = only_run(tmp_path / "runs"), tmp_path / "tensorboard.log"
    command = [
        sys.executable,
        "-m",
        "tensorboard.main",
        f"--logdir={run.parent}",
        "--port=0",
        "--host=127.0.0.1",
    ]
    with Child(command, os.environ | {"HOME": str(tmp_path)}, log), browser(tmp_path) as tab:
        wait_for(
            lambda: re.search(r"http://127\.0\.0\.1:\d+/", log.read_text()), said=log.read_text
        )
        (address,) = set(re.findall(r"http://127\.0\.0\.1:\d+/", log.read_text()))
        tab.open(f"{address}#timeseries", 3000, 6000)  # cards that are out of sight are not made
        expected = recorded(run)
        assert {"train/loss", "val/loss", "comm/exposed_share", "mem/peak_gib"} <= expected
        tab.wait_for(f"{TAGS}.length >= {len(expected)}")
        assert set(tab.evaluate(TAGS)) == expected
        tab.open(f"{address}?tagFilter=train/#timeseries")
        tab.wait_for(f"{TAGS}.includes('train/loss') && ({TEXT}).includes('Smoothed')")
        tab.picture("tensorboard")
        tab.open(f"{address}#text")
        tab.wait_for_text("config", "max_steps")


def test_rays_dashboard_shows_job_log_and_actors(
    cluster: Cluster, recipe: Path, tmp_path: Path
) -> None:
    """Jobs page, the job's page with its log, actors page with run and rank; and metrics are exported."""
    out = tmp_path / "runs"
    code, output = submit(
        cluster, recipe, out, "--max_steps", "100000", "--log_every", "10", wait=False
    )
    assert code == 0, output
    submission = re.findall(r"raysubmit_\w+", output)[0]
    try:
        wait_for(lambda: trains(out))
        run = only_run(out).name
        short = {sys.executable: "python", str(out): "runs", str(recipe): "words.yaml"}
        cookie: dict[str, Any] = {
            "name": "ray-authentication-token",
            "value": TOKEN,
            "url": cluster.dashboard,
        }
        with browser(tmp_path) as tab:
            tab.call("Network.setCookie", **cookie)
            for page, words in {
                "jobs": (submission, "RUNNING"),
                f"jobs/{submission}": ("step 10/100000 | loss ",),
                "actors": (f"{run}-rank0", f"{run}-rank1"),
            }.items():
                tab.open(f"{cluster.dashboard}/#/{page}")
                tab.wait_for_text(*words)
                if page == "actors":
                    tab.picture(f"ray-{page}", short)
        wait_for(lambda: f'run="{run}"' in exported_metrics(cluster))
        names = set(re.findall(r"^ray_nanoray_(\w+)\{", exported_metrics(cluster), re.M))
        assert names >= {name.replace("/", "_") for name in recorded(only_run(out)) - {"time"}}
    finally:  # else it would hold the CPUs of a cluster that other tests use
        stop = [sys.executable, "-m", "ray.scripts.scripts", "job", "stop", submission]
        subprocess.run(stop, env=cluster.env, check=True, capture_output=True, timeout=200)
    assert no_actors_left(cluster)

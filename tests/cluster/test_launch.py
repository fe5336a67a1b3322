"""The driver on a real Ray cluster: placement, ranks, faults, signals, jobs. One cluster serves
many tests.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from nanoray.launch.ray_compat import has_tokens
from tests.harness import leaks
from tests.harness.cluster import (
    ROOT,
    Cluster,
    assert_same_losses,
    finish,
    in_driver,
    launch,
    left_behind,
    losses,
    no_actors_left,
    processes_of_session,
    ray_head,
    ray_node,
    start,
    start_training,
    summary,
    trains,
)
from tests.harness.commands import wait_for
from tests.harness.ports import closed_port
from tests.harness.ranks import only_run


@pytest.fixture(scope="module")
def clean(
    cluster: Cluster, recipe: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    """A run without faults, and what it printed."""
    out = tmp_path_factory.mktemp("clean")
    code, output = launch(cluster, recipe, out, "--eval_every", "15", "--sample_tokens", "20")
    assert code == 0, output
    return out, output


def test_a_run_reports_what_it_came_to(clean: tuple[Path, str]) -> None:
    out, output = clean
    result, run = summary(out), only_run(out)
    assert (result["exit_reason"], result["steps"], result["world_size"], result["restarts"]) == (
        "finished",
        30,
        2,
        0,
    )
    assert (result["backend"], result["dataset"]) == ("gloo", "words")
    assert 0 < result["first_step_s"] < result["total_s"]
    assert result["val_loss"] < losses(out)[1]
    assert len(losses(out)) == 30
    names = {p.name for p in run.iterdir()}
    assert {
        "config.json",
        "run.json",
        "metrics.jsonl",
        "summary.json",
        "checkpoints",
        "tb",
        "logs",
    } <= names
    for rank in (0, 1):
        log = (run / "logs" / f"rank{rank}.log").read_text()
        assert f"rank={rank}" in log
        assert "threads=1" in log
    assert "2 rank(s) = dp 2 · backend gloo (CPU ranks)" in output
    assert re.search(r"step 30/30 \| loss \d", output)
    assert "sample" in output
    assert str(run) in output


def test_actors_carry_run_and_rank_and_nothing_is_left(
    cluster: Cluster, clean: tuple[Path, str]
) -> None:
    run = only_run(clean[0]).name
    actors = [actor for actor in cluster.states("actors") if str(actor["name"]).startswith(run)]
    names = sorted([actor["name"], actor["repr_name"]] for actor in actors)
    assert names == [[f"{run}-rank{r}", f"{run} rank {r}"] for r in (0, 1)]
    (namespace,) = {actor["ray_namespace"] for actor in actors}
    assert re.fullmatch(r"nanoray-\w{8}", namespace), (
        "its own, so that another run of this name is not in its way"
    )
    assert no_actors_left(cluster)


@pytest.mark.full
def test_stop_at_checkpoints_and_resume_auto_goes_on(
    cluster: Cluster, recipe: Path, clean: tuple[Path, str], tmp_path: Path
) -> None:
    code, output = launch(cluster, recipe, tmp_path, "--stop_at", "12")
    assert code == 0, output
    assert summary(tmp_path)["exit_reason"] == "stop_at"
    code, output = launch(cluster, recipe, tmp_path, "--resume", "auto")
    assert code == 0, output
    assert "resume  from step 12 of" in output
    assert_same_losses(tmp_path, clean[0])


@pytest.mark.parametrize(
    "local", [False, pytest.param(True, marks=pytest.mark.full)], ids=["cluster", "own ray"]
)
def test_ctrl_c_once_checkpoints_and_exits_130(
    cluster: Cluster, recipe: Path, tmp_path: Path, local: bool
) -> None:
    before = leaks.entries()
    process = start_training(
        None if local else cluster, recipe, tmp_path, "--max_steps", "100000", "--log_every", "10"
    )
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the whole foreground group
    code, output = finish(process)
    assert code == 130, output
    assert "stopping after this step; what is done is saved" in output
    result = summary(tmp_path)
    assert result["exit_reason"] == "stopped"
    assert [p.name for p in (only_run(tmp_path) / "checkpoints").iterdir()] == [
        f"step_{result['steps']:08d}"
    ]
    if local:
        log = (only_run(tmp_path) / "logs" / "rank0.log").read_text()
        assert "nice 0," in log, "Ray's own 15 would put training behind everything else"
        wait_for(lambda: not processes_of_session(process.pid), 60)
        assert left_behind(before) == []
    else:
        assert no_actors_left(cluster)


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_whole_group_spares_a_ray_of_ones_own_until_all_is_saved(
    recipe: Path, tmp_path: Path, forked_ray: dict[str, str], number: signal.Signals
) -> None:
    """As `timeout`, batch systems and closed terminals send it."""
    flags = ("--max_steps", "100000", "--log_every", "10")
    process = start_training(None, recipe, tmp_path, *flags, **forked_ray)
    group = [pid for pid in processes_of_session(process.pid) if os.getpgid(pid) == process.pid]
    assert group == [process.pid], (
        "Ray's head would end at once, and its ranks with it, saved or not"
    )
    os.killpg(process.pid, number)
    code, output = finish(process)
    assert code == 128 + number, output
    result = summary(tmp_path)
    assert result["exit_reason"] == "stopped"
    assert [p.name for p in (only_run(tmp_path) / "checkpoints").iterdir()] == [
        f"step_{result['steps']:08d}"
    ]
    wait_for(lambda: not processes_of_session(process.pid), 60)


@pytest.mark.full
def test_ctrl_c_twice_stops_now(cluster: Cluster, recipe: Path, tmp_path: Path) -> None:
    """The second one does not wait for a rank that hangs."""
    process = start(cluster, recipe, tmp_path, "--faults", "hang@rank=1,step=3")
    wait_for(lambda: list(tmp_path.glob("*/faults.jsonl")), process=process)
    process.send_signal(signal.SIGINT)
    wait_for(lambda: "stopping after this step" in process.output, process=process)
    time.sleep(1)
    assert process.poll() is None, "the first one waits for the step"
    process.send_signal(signal.SIGINT)
    code, _ = finish(process, 50)  # the rank would hang until hang_timeout = 60
    assert code == 130
    assert no_actors_left(cluster)


def test_a_request_that_never_fits_is_refused_with_a_table(
    cluster: Cluster, recipe: Path, tmp_path: Path
) -> None:
    now = "--placement_timeout_s", "4"
    code, output = launch(
        cluster, recipe, tmp_path, "--workers", "12", "--cpus_per_worker", "1", *now
    )
    assert code == 3
    assert "waited" not in output
    assert "asked for 12 × 1 CPU, but the cluster can never hold it; total per node:" in output
    assert " has 2 CPU" in output
    flags = "--workers", "2", "--device", "cuda", "--global_batch_size", "12"
    code, output = launch(cluster, recipe, tmp_path, *flags, *now)
    assert code == 3
    assert "asked for 2 × 1 GPU + 1 CPU, but the cluster can never hold it" in output
    assert not list(tmp_path.iterdir()), "nothing was started"


def test_bad_arithmetic_fails_before_ray(recipe: Path, tmp_path: Path) -> None:
    code, output = launch(None, recipe, tmp_path, "--workers", "5")
    assert code == 2
    assert "global_batch_size = 12 is not a multiple of" in output
    assert "ray " not in output


def test_no_cluster_at_the_address_says_so(recipe: Path, tmp_path: Path) -> None:
    with closed_port() as port:
        code, output = launch(None, recipe, tmp_path, "--ray_address", f"127.0.0.1:{port}")
    assert code == 3
    assert "cannot connect to Ray at 127.0.0.1:" in output
    assert "use --ray_address local" in output


def test_dry_run_takes_nothing(recipe: Path, tmp_path: Path) -> None:
    code, output = launch(None, recipe, tmp_path / "none", "--dry_run")
    assert code == 0, output
    for line in (
        "mesh ",
        "placement ",
        "batch ",
        "model ",
        "memory ",
        "dry run: nothing was started",
    ):
        assert line in output
    assert not (tmp_path / "none").exists()


def submit(
    cluster: Cluster, recipe: Path, out: Path, *flags: str, wait: bool = True
) -> tuple[int, str]:
    command = [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "job",
        "submit",
        "--working-dir",
        str(ROOT),
    ]
    command += [
        "--metadata-json",
        json.dumps({"owner": "test"}),
        *([] if wait else ["--no-wait"]),
        "--",
    ]
    command += [
        sys.executable,
        "examples/train_shakespeare.py",
        "--config",
        str(recipe),
        "--out_dir",
        str(out),
        *flags,
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=cluster.env | {"RAY_JOB_ALLOW_DRIVER_ON_WORKER_NODES": "0"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=400,
    )
    return done.returncode, done.stdout


def job(cluster: Cluster, submission: str) -> dict[str, Any]:
    return cluster.get(f"/api/jobs/{submission}")


def test_ray_job_submit_runs_the_example(
    cluster: Cluster, recipe: Path, clean: tuple[Path, str], tmp_path: Path
) -> None:
    code, output = submit(cluster, recipe, tmp_path, "--spares", "0")
    assert code == 0, output
    assert_same_losses(tmp_path, clean[0])
    assert "step 30/30" in output
    for rank in (0, 1):
        assert (only_run(tmp_path) / "logs" / f"rank{rank}.log").exists()
    (submission,) = set(re.findall(r"raysubmit_\w+", output))
    info = job(cluster, submission)
    assert (info["status"], info["driver_exit_code"]) == ("SUCCEEDED", 0)
    assert info["metadata"]["owner"] == "test"


@pytest.mark.full
def test_ray_job_stop_leaves_a_checkpoint_and_metrics_were_exported(
    cluster: Cluster, recipe: Path, tmp_path: Path
) -> None:
    code, output = submit(
        cluster, recipe, tmp_path, "--max_steps", "100000", "--log_every", "10", wait=False
    )
    assert code == 0, output
    submission = re.findall(r"raysubmit_\w+", output)[0]

    def said() -> str:
        return str(job(cluster, submission))

    try:
        wait_for(lambda: trains(tmp_path) and len(losses(tmp_path)) > 2, said=said)
        run = only_run(tmp_path).name
        wait_for(lambda: f'run="{run}"' in exported_metrics(cluster), said=said)
        sample = [
            line
            for line in exported_metrics(cluster).splitlines()
            if line.startswith("ray_nanoray_train_loss{")
        ]
        assert 'rank="0"' in sample[0]
    finally:  # else it would hold the CPUs of a cluster that other tests use
        stop = [sys.executable, "-m", "ray.scripts.scripts", "job", "stop", submission]
        subprocess.run(stop, env=cluster.env, check=True, capture_output=True, timeout=200)
    wait_for(lambda: job(cluster, submission)["status"] == "STOPPED", said=said)
    result = summary(tmp_path)
    assert result["exit_reason"] == "stopped"
    assert (
        only_run(tmp_path) / "checkpoints" / f"step_{result['steps']:08d}" / "manifest.json"
    ).exists()
    assert no_actors_left(cluster)


def exported_metrics(cluster: Cluster) -> str:
    """What the nodes' metrics agents export, as Prometheus would scrape it."""
    nodes = in_driver(
        cluster, "print(json.dumps([n['MetricsExportPort'] for n in ray.nodes() if n['Alive']]))"
    )
    texts = []
    for port in nodes:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=200) as answer:
            texts.append(answer.read().decode())
    return "\n".join(texts)


@pytest.mark.full
def test_ranks_are_sorted_by_node_and_spread_over_two(
    recipe: Path, tmp_path: Path, clean: tuple[Path, str], cluster: Cluster
) -> None:
    """A second node joins; --placement spread puts one rank on each, and nothing else changes."""
    with ray_node(cluster):
        code, output = launch(cluster, recipe, tmp_path, "--placement", "spread")
    assert code == 0, output
    logs = [(only_run(tmp_path) / "logs" / f"rank{r}.log").read_text() for r in (0, 1)]
    assert [
        re.findall(r"local_rank=(\d), local_world_size=(\d), node_rank=(\d)", t)[0] for t in logs
    ] == [
        ("0", "1", "0"),
        ("0", "1", "1"),
    ]
    assert_same_losses(tmp_path, clean[0])


SLICES = [f"MIG-{i:08d}-1111-2222-3333-444455556666" for i in range(3)]
MIG_DRIVER = """
from pathlib import Path
from nanoray.config import make_config
from nanoray.data.dataset import DatasetInfo
from nanoray.launch.recovery.actors import ActorPool
from nanoray.launch.placement import Placement
from nanoray.checkpoint.run_folder import RunSpec
config = make_config({"global_batch_size": 12, "device": "DEVICE"})
place = Placement.make(config)
data = DatasetInfo(**{f: None for f in DatasetInfo.__dataclass_fields__})
pool = ActorPool(RunSpec(config, data, Path("/none/run"), 0.0), place)
pool.create()
seen = [ray.get(a.ready.remote())["devices"] for a in pool.actors.values()]
pool.end()
print(json.dumps([place.kind, place.workers, seen]))
"""


@pytest.mark.full
def test_each_actor_sees_exactly_its_own_slice() -> None:
    """Made-up MIG UUIDs on a real Ray: each actor is bound to one, in order."""
    with ray_head(
        "--num-gpus=3", "--num-cpus=4", dashboard=False, CUDA_VISIBLE_DEVICES=",".join(SLICES)
    ) as cluster:
        kind, workers, seen = in_driver(cluster, MIG_DRIVER.replace("DEVICE", "mig"))
        assert (kind, workers) == ("mig", 3)
        assert seen == [[s] for s in SLICES]


@pytest.mark.full
def test_a_local_ray_is_closed_to_others_and_leaves_nothing(
    tmp_path: Path, forked_ray: dict[str, str]
) -> None:
    """The Ray that nanoray starts: its dashboard listens on loopback, the jobs API wants this run's
    token, and its processes and folders go with it. The next one of the same process has another token.
    While it lasts, SIGTERM is a stop: Ray's core has a handler of its own.
    """
    code = """
import contextlib, io, os, re, signal, socket, urllib.error, urllib.request
from nanoray.config import load_config
from nanoray.machine.slots import local_slots
from nanoray.launch.connection import connected
from nanoray.launch.signals import catch_signals
said = io.StringIO()
with contextlib.redirect_stdout(said), connected("local", local_slots("cpu", 1, [], 1.0)):
    url = re.search(r"http://[\\d.:]+", said.getvalue())[0]
    try:
        code = urllib.request.urlopen(url + "/api/jobs/", timeout=120).status
    except urllib.error.HTTPError as error:
        code = error.code
    inodes = set()
    port = int(url.rpartition(":")[2])
    for line in open("/proc/net/tcp").read().splitlines()[1:]:
        local, state = line.split()[1], line.split()[3]
        if state == "0A" and int(local.split(":")[1], 16) == port:
            inodes.add(local.split(":")[0])
with contextlib.redirect_stdout(said), connected("local", local_slots("cpu", 1, [], 1.0)):
    with catch_signals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop.exit_code == 143
print("cannot ask for a token" in said.getvalue(), code, sorted(inodes))
"""
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    env |= {"HOME": str(tmp_path)} | forked_ray
    before = leaks.entries()
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    # An old Ray has no tokens, and nanoray says so. 127.0.0.1 is as the kernel writes it.
    expected = "False 401 ['0100007F']" if has_tokens() else "True 200 ['0100007F']"
    assert output.splitlines()[-1] == expected
    assert not (tmp_path / ".ray").exists(), "no token is left in the user's home"
    wait_for(lambda: not processes_of_session(process.pid), 60)
    assert left_behind(before) == []

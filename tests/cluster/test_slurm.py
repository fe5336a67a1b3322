"""The scripts for SLURM in examples/scripts, on two nodes of a real SLURM.

Its daemons run on two hosts in namespaces (tests/harness/hosts.py), without munge.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.test_two_machines import STEPS, train_here, write_recipe
from tests.harness.cluster import assert_same_run
from tests.harness.commands import wait_for
from tests.harness.hosts import Hosts, run_on, start_on
from tests.harness.pods import missing
from tests.harness.ranks import only_run

pytestmark = pytest.mark.full

CONFIG = """
ClusterName=test
SlurmctldHost=alpha
AuthType=auth/none
CredType=cred/none
SlurmUser=root
StateSaveLocation=/tmp/slurmctld
SlurmdSpoolDir=/tmp/slurmd
SlurmctldPidFile=/tmp/slurmctld.pid
SlurmdPidFile=/tmp/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
ReturnToService=2
MpiDefault=none
PlugStackConfig=/dev/null
KillWait=5
PartitionName=all Nodes=alpha,beta Default=YES State=UP
"""
SCRIPTS = "/opt/nanoray/examples/scripts"


@pytest.fixture
def slurm(tmp_path: Path, text: Path) -> Iterator[Hosts]:
    """Two nodes that wait for jobs."""
    if reason := missing():
        pytest.skip(reason)
    daemons = [shutil.which(name, path="/usr/sbin:/usr/bin") for name in ("slurmctld", "slurmd")]
    if not all(daemons):
        pytest.skip("SLURM is not installed: apt-get install slurm-wlm")
    volume = tmp_path / "volume"
    volume.mkdir()
    write_recipe(volume, text)
    with Hosts(volume) as hosts:
        lines = CONFIG
        for name in ("alpha", "beta"):
            host = hosts.host(
                name, SLURM_CONF="/etc/nanoray/slurm.conf", PYTHON="/opt/venv/bin/python"
            )
            lines += f"NodeName={name} NodeAddr={host.address} CPUs=2 State=UNKNOWN\n"
        (hosts.config / "slurm.conf").write_text(lines)
        (hosts.config / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        alpha = hosts.pods["alpha"]
        controller = f"mkdir -p /tmp/slurmctld && exec {daemons[0]} -D"
        processes = [start_on(alpha, controller, tmp_path / "slurmctld.log")]
        for name in ("alpha", "beta"):
            daemon = f"mkdir -p /tmp/slurmd && exec {daemons[1]} -D -N {name}"
            processes.append(start_on(hosts.pods[name], daemon, tmp_path / f"slurmd-{name}.log"))
        wait_for(lambda: run_on(alpha, "sinfo -h -o %t%D").stdout.strip() == "idle2", 60)
        yield hosts
        for process in processes:
            process.kill()
            process.wait()


def submit(hosts: Hosts, script: str, *flags: str) -> subprocess.Popen[Any]:
    """Submit a script, and wait for its end in a process whose exit code is the job's."""
    words = ["sbatch", "--wait", f"{SCRIPTS}/{script}", "--config", "/data/recipe.yaml"]
    words += ["--out_dir", "/data/runs", *flags]
    log = hosts.volume / "sbatch.log"
    return start_on(hosts.pods["alpha"], f"cd /data && {shlex.join(words)}", log)


def output(hosts: Hosts) -> str:
    return "".join(path.read_text(errors="replace") for path in hosts.volume.glob("nanoray-*.out"))


def test_srun_starts_a_rank_on_each_node(slurm: Hosts, text: Path, tmp_path: Path) -> None:
    job = submit(slurm, "slurm_srun.sbatch")
    assert job.wait(150) == 0, output(slurm)
    said = output(slurm)
    assert "ranks  2 by SLURM (SLURM_PROCID, " in said
    assert "; they meet at alpha:" in said
    assert_same_run(slurm.volume / "runs", train_here(tmp_path / "here", text, 2))


def test_a_time_limit_saves_and_the_same_job_goes_on(
    slurm: Hosts, text: Path, tmp_path: Path
) -> None:
    """scancel sends what --signal sends before the time limit; then the script is submitted again."""
    # Steps that last, so that the signal comes before the end; the recipe and its bits stay.
    slow = ";".join(f"slow@rank=0,step={step},phase=data,seconds=0.3" for step in range(5, 40))
    job = submit(slurm, "slurm_srun.sbatch", "--faults", slow)
    wait_for(lambda: "step 12/" in output(slurm), 150, said=lambda: output(slurm))
    run_on(slurm.pods["alpha"], "scancel --signal=TERM --name=nanoray")
    assert job.wait(150) != 0
    run = only_run(slurm.volume / "runs")
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["exit_reason"], summary["exit_code"]) == ("stopped", 143), output(slurm)
    assert 12 <= summary["steps"] < STEPS

    assert submit(slurm, "slurm_srun.sbatch").wait(150) == 0, output(slurm)
    assert only_run(slurm.volume / "runs") == run, "the same run goes on"
    assert_same_run(slurm.volume / "runs", train_here(tmp_path / "here", text, 2))


def test_ray_in_a_job_replaces_a_lost_rank(slurm: Hosts, text: Path, tmp_path: Path) -> None:
    flags = ("--workers", "2", "--spares", "0", "--placement", "spread")
    job = submit(
        slurm, "slurm_ray.sbatch", *flags, "--faults", "kill@rank=1,step=20,phase=backward"
    )
    assert job.wait(200) == 0, output(slurm)
    said = output(slurm)
    assert "ray    cluster at alpha:2" in said
    assert "died in backward of step 20: killed by SIGKILL" in said
    assert "no step is repeated" in said
    run = only_run(slurm.volume / "runs")
    assert '"kind": "kill"' in (run / "faults.jsonl").read_text(), "the fault fired"
    assert_same_run(slurm.volume / "runs", train_here(tmp_path / "here", text, 2))

"""Ranks of launchers other than Ray: SLURM's variables, and a torchrun whose agent is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nanoray.checkpoint.resume import newest_valid
from nanoray.machine.proc import start_time, stat_of
from tests.harness.commands import Command, torchrun

ONE_THREAD = dict(os.environ) | {"OMP_NUM_THREADS": "1"}


def flags(recipe: Path, out_dir: Path) -> tuple[str, ...]:
    return ("--config", str(recipe), "--out_dir", str(out_dir), "--tensorboard", "false")


def only_run(out_dir: Path) -> Path:
    (folder,) = out_dir.iterdir()
    return folder


def test_two_tasks_of_srun_are_two_ranks_of_one_run(recipe: Path, tmp_path: Path) -> None:
    """SLURM's variables and no other, as `srun -n 2 nanoray train` sets them."""
    step = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "this[1-2]",
        "SLURM_NODEID": "0",
    }
    tasks = []
    for task in ("1", "0"):
        own = {"SLURM_PROCID": task, "SLURM_LOCALID": task}
        words = ("nanoray.train", *flags(recipe, tmp_path))
        tasks.append(Command(*words, env=ONE_THREAD | step | own))
    for task in tasks:
        output, _ = task.communicate(timeout=200)
        assert task.returncode == 0, output
    assert "ranks  2 by SLURM (SLURM_PROCID, SLURM_NTASKS); they meet at 127.0.0.1:" in output
    summary = json.loads((only_run(tmp_path) / "summary.json").read_text())
    assert summary["world_size"] == 2


@pytest.mark.full
def test_the_ranks_of_a_torchrun_that_was_killed_save_and_end(recipe: Path, tmp_path: Path) -> None:
    """They were still training 25 s later, with nobody to end them."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "nanoray.train", *flags(recipe, tmp_path / "runs")]
    command += ["--max_steps", "1000000", "--checkpoint_every", "0"]
    with (tmp_path / "output").open("wb") as output:
        agent = subprocess.Popen(command, env=ONE_THREAD, stdout=output, stderr=output)
    started: dict[int, str] = {}
    try:
        while agent.poll() is None and not list(tmp_path.glob("runs/*/metrics.jsonl")):
            time.sleep(0.1)
        children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        started = {int(pid): start_time(int(pid)) for pid in children}
        assert len(started) == 2, (tmp_path / "output").read_text()
        agent.kill()
        agent.wait()

        until = time.monotonic() + 60
        while any(stat_of(pid) for pid in started) and time.monotonic() < until:
            time.sleep(0.05)
        assert not [pid for pid in started if stat_of(pid)]
    finally:
        agent.kill()
        for pid, start in started.items():
            if start and start_time(pid) == start:
                os.kill(pid, signal.SIGKILL)

    run = only_run(tmp_path / "runs")
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["exit_reason"], summary["exit_code"]) == ("stopped", 143)
    newest, _ = newest_valid(run / "checkpoints")
    assert newest
    assert newest.state.meta["step"] == summary["steps"] > 0
    said = (tmp_path / "output").read_text()
    assert f"torchrun (pid {agent.pid}), which started this rank, is gone: stopping after" in said


def test_without_ray_a_lost_rank_ends_the_others_in_one_line(recipe: Path, tmp_path: Path) -> None:
    """torch's traceback goes to the log; the line names what to look at, and how to go on."""
    fault = ("--faults", "kill@rank=1,step=5")
    first, second = torchrun(2, "nanoray.train", *flags(recipe, tmp_path), *fault, env=ONE_THREAD)
    assert (first.returncode, second.returncode) == (1, -signal.SIGKILL)
    run = only_run(tmp_path)
    assert "Traceback" not in first.stderr
    last = first.stderr.strip().splitlines()[-1]
    assert last.startswith("error: rank 0 lost another rank ("), first.stderr
    assert last.endswith(f"start the command again with --resume {run}")
    assert "Traceback" in (run / "logs" / "rank0.log").read_text()

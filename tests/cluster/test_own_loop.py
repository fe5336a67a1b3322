"""A loop of its own in nanoray.launch(main), on Ray: what it finds, what a failure and a stop do."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.test_drained_nodes import drain
from tests.harness.cluster import (
    Cluster,
    finish,
    living_nodes,
    losses,
    no_actors_left,
    only_report,
    ray_head,
    ray_node,
    reports,
    summary,
)
from tests.harness.commands import Command, wait_for
from tests.harness.ranks import only_run

pytestmark = [pytest.mark.slow]
SCRIPT = """
import json, os, signal, sys, time
import torch
import torch.distributed as dist
import nanoray

def main(run, what):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR",
             "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID")
    print("variables", json.dumps({name: os.environ[name] for name in names}), flush=True)
    dist.init_process_group()
    saved = run.folder / "step"
    first = int(saved.read_text()) + 1 if saved.exists() else 1
    for step in range(first, 31):
        total = torch.tensor(float(step))
        dist.all_reduce(total)
        stop = torch.tensor(float(run.should_stop))
        dist.all_reduce(stop)
        run.log({"train/loss": total, "of the script": f"attempt {run.restarts}"}, step=step)
        dist.barrier()
        if run.rank == 0:
            saved.write_text(str(step))
        if what == "kill" and step == 12 and (run.rank, run.restarts) == (1, 0):
            os.kill(os.getpid(), signal.SIGKILL)
        while what == "wait" and step == 5 and run.restarts == 0 and not run.should_stop:
            time.sleep(0.05)
        if stop:
            break
    if what == "late" and run.rank == 1 and run.restarts == 0:
        time.sleep(4)  # longer than the driver needs to see that rank 0 has returned
        raise ValueError("of rank 1")

if __name__ == "__main__":
    config, what = json.loads(sys.argv[1]), sys.argv[2]
    raise SystemExit(nanoray.launch(lambda run: main(run, what), config))
"""


def started(cluster: Cluster, folder: Path, what: str, cpus: float = 0.5) -> Command:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    config = {
        "workers": 2,
        "cpus_per_worker": cpus,
        "out_dir": str(folder / "out"),
        "tensorboard": False,
        "placement_timeout_s": 60,
    }
    env = os.environ | cluster.env | {"RAY_ADDRESS": cluster.address}
    return Command(str(script), json.dumps(config), what, env=env)


def waits(out: Path) -> bool:
    """Whether the ranks wait in step 5 until they should stop."""
    return any(path.read_text() == "5" for path in out.glob("*/step"))


def variables(out: Path, rank: int) -> list[dict[str, Any]]:
    """The environment that a rank's function has printed, once for each attempt."""
    lines = (only_run(out) / "logs" / f"rank{rank}.log").read_text().splitlines()
    found = [line.removeprefix("variables ") for line in lines if line.startswith("variables ")]
    return [json.loads(text) for text in found]


def test_a_killed_rank_makes_all_ranks_start_again(cluster: Cluster, tmp_path: Path) -> None:
    """They have torchrun's variables, go on from what the script has saved, and repeat no record."""
    with started(cluster, tmp_path, "kill") as command:
        code, output = finish(command)
    out = tmp_path / "out"
    assert code == 0, output

    report = only_report(out, output)
    found = [report[key] for key in ("rank", "cause", "recovery", "step", "steps_repeated")]
    assert found == [1, "killed", "restart", 12, None], output
    assert "restart  1/3 all ranks call the script's function again\n" in output
    assert "replace  " not in output

    # (1 + 1) × the step, once for each step
    assert losses(out) == {step: 2.0 * step for step in range(1, 31)}
    lines = (only_run(out) / "metrics.jsonl").read_text().splitlines()
    attempts = [json.loads(line)["of the script"] for line in lines]
    assert attempts == ["attempt 0"] * 12 + ["attempt 1"] * 18
    for rank in (0, 1):
        for restarts, values in enumerate(variables(out, rank)):
            assert values["RANK"] == values["LOCAL_RANK"] == str(rank)
            assert values["WORLD_SIZE"] == values["LOCAL_WORLD_SIZE"] == "2"
            assert values["GROUP_RANK"] == "0"
            assert values["TORCHELASTIC_RESTART_COUNT"] == str(restarts)
            assert values["TORCHELASTIC_RUN_ID"] == only_run(out).name
        assert len(variables(out, rank)) == 2
    addresses = [[values["MASTER_PORT"] for values in variables(out, rank)] for rank in (0, 1)]
    assert addresses[0] == addresses[1]
    assert summary(out)["exit_reason"] == "finished"
    assert summary(out)["restarts"] == 1
    assert no_actors_left(cluster)


def test_a_run_is_over_when_all_ranks_have_returned(cluster: Cluster, tmp_path: Path) -> None:
    """Rank 1 raises after rank 0 has returned: that is a failure, and no warning."""
    with started(cluster, tmp_path, "late") as command:
        code, output = finish(command)
    assert code == 0, output
    # On a busy machine gloo may fail to connect the new ranks, which is a fault of its own.
    report = reports(tmp_path / "out")[0]
    assert (report["rank"], report["cause"], report["recovery"]) == (1, "exception", "restart")
    assert "failed in script of step 30: ValueError: of rank 1" in output
    assert 'raise ValueError("of rank 1")' in output
    assert "warning  " not in output
    assert no_actors_left(cluster)


def test_a_stop_is_seen_in_the_loop(cluster: Cluster, tmp_path: Path) -> None:
    """All ranks leave after the same step, and the exit code is that of the signal."""
    out = tmp_path / "out"
    with started(cluster, tmp_path, "wait") as command:
        wait_for(lambda: waits(out), process=command)
        command.send_signal(signal.SIGINT)
        code, output = finish(command)
    assert code == 130, output
    assert summary(out)["exit_reason"] == "stopped"
    assert max(losses(out)) == 6
    assert (only_run(out) / "step").read_text() == "6"
    assert not (only_run(out) / "faults.jsonl").exists()
    assert no_actors_left(cluster)


@pytest.mark.full
def test_a_loop_leaves_a_drained_node_and_goes_on_elsewhere(tmp_path: Path) -> None:
    """All ranks are asked to stop, as nanoray has no state with which one alone could move."""
    out = tmp_path / "out"
    with ray_head("--num-cpus=1") as head, ray_node(head):
        node = living_nodes(head)[1]
        with started(head, tmp_path, "wait", cpus=1.0) as command:
            wait_for(lambda: waits(out), process=command)
            with ray_node(head):
                drain(head, node)
                code, output = finish(command)
    assert code == 0, output
    report = only_report(out, output)
    assert (report["cause"], report["recovery"], report["node"]) == ("drained", "restart", node)
    assert losses(out) == {step: 2.0 * step for step in range(1, 31)}
    assert [values["TORCHELASTIC_RESTART_COUNT"] for values in variables(out, 0)] == ["0", "1"]

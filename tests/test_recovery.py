"""Faults on a real Ray cluster: the cause is named, the run goes on, and the losses are those of a run without them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoray.checkpoint import newest_valid
from nanoray.faults_cli import story
from nanoray.timeline import read_steps
from tests.cluster import (
    Cluster,
    end_session,
    finish,
    fired,
    in_driver,
    launch,
    losses,
    no_actors_left,
    only_run,
    processes_of_session,
    ray_head,
    start,
    summary,
    wait_for,
)

EVERY_FIVE = ("--eval_every", "5", "--checkpoint_every", "5")


@pytest.fixture(scope="module")
def clean(cluster: Cluster, recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Runs without faults at 2 and 3 ranks, the latter with dropout: masks follow from step and rank."""
    folders = {}
    for ranks in (2, 3):
        folders[ranks] = tmp_path_factory.mktemp(f"clean{ranks}")
        code, output = launch(cluster, recipe, folders[ranks], *EVERY_FIVE, *of(ranks))
        assert code == 0, output
    return folders


def of(ranks: int) -> tuple[str, ...]:
    return ("--workers", str(ranks), "--cpus_per_worker", "0.5", "--dropout", "0" if ranks == 2 else "0.1")


def trains(out: Path) -> bool:
    """Whether the run has completed a step."""
    return any(path.stat().st_size for path in out.glob("*/metrics.jsonl"))


def reports(out: Path) -> list[dict[str, Any]]:
    """The faults of a run, as the driver reported them."""
    lines = (only_run(out) / "faults.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == "fault"]


def weights(out: Path) -> dict[str, torch.Tensor]:
    newest, _ = newest_valid(only_run(out) / "checkpoints")
    assert newest is not None
    return newest.state.model


# Every phase of a step, both ranks, by signal, exit code and exception, in one run.
PLAN = [
    ("exit", 0, 4, "data"),
    ("kill", 1, 6, "forward"),
    ("kill", 0, 9, "backward"),
    ("raise", 1, 12, "backward"),
    ("exit", 1, 14, "optimizer"),
    ("kill", 0, 17, "log"),
    ("kill", 0, 20, "eval"),
    ("kill", 1, 25, "checkpoint"),
]
CAUSES = {"kill": "killed", "exit": "killed", "raise": "exception"}
HOW = {"kill": "killed by SIGKILL", "exit": "exited with code 3", "raise": "InjectedFault"}


@pytest.mark.parametrize(
    ("mode", "ranks", "flags"),
    [
        ("in_place", 2, ("--spares", "0")),
        ("in_place", 3, ("--spares", "0")),
        ("spare", 2, ("--spares", "1")),
        ("restart", 2, ("--recovery", "restart", "--checkpoint_mode", "sync")),
    ],
)
def test_every_phase_of_a_step(
    cluster: Cluster,
    recipe: Path,
    clean: dict[int, Path],
    tmp_path: Path,
    mode: str,
    ranks: int,
    flags: tuple[str, ...],
) -> None:
    """Eight faults in one run of 30 steps: each is named, and the run ends with the weights of a run without any."""
    plan = ";".join(f"{kind}@rank={rank},step={step},phase={phase}" for kind, rank, step, phase in PLAN)
    flags += (*EVERY_FIVE, *of(ranks), "--max_failures", "9", "--faults", plan)
    code, output = finish(start(cluster, recipe, tmp_path, *flags), 240)
    assert code == 0, output
    assert fired(tmp_path) == [kind for kind, *_ in PLAN], "each fired, once"
    found = reports(tmp_path)
    assert [(r["rank"], r["step"], r["phase"]) for r in found] == [tuple(place) for _, *place in PLAN]
    for (kind, *_), report in zip(PLAN, found, strict=True):
        assert report["cause"] == CAUSES[kind]
        assert HOW[kind] in report["title"]
        assert (report["signal"], report["exit_code"]) == {
            "kill": ("SIGKILL", None), "exit": (None, 3), "raise": (None, None)
        }[kind]  # fmt: skip
        assert (report["detect_s"] is None) == (kind == "raise")
        assert report["recover_s"] > 0
        expected = {"spare": {"spare", "in_place"}}.get(mode, {mode})  # the next spare may still be starting
        assert report["recovery"] in expected, report
    again = [repeated(step, phase) if mode == "restart" else 0 for _, _, step, phase in PLAN]
    assert [r["steps_repeated"] for r in found] == again
    if mode == "spare":
        assert [r["recovery"] for r in found].count("spare") >= 1
    assert losses(tmp_path) == losses(clean[ranks]), "bit for bit"
    ours, theirs = weights(tmp_path), weights(clean[ranks])
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert summary(tmp_path)["restarts"] == len(PLAN)
    assert f"total     {len(PLAN)} fault(s)" in story(only_run(tmp_path))[-1]
    assert no_actors_left(cluster)
    assert not sentinels(only_run(tmp_path))


def test_the_group_shrinks_and_grows_back(
    cluster: Cluster, recipe: Path, clean: dict[int, Path], tmp_path: Path
) -> None:
    """Rank 0 of three is lost, so another one writes the metrics until it is back; then rank 2.

    A slow step gives the new process the time that it needs; the faults come in a group of three again.
    """
    plan = "kill@rank=0,step=6,phase=backward;slow@rank=1,step=8,phase=data,seconds=12;"
    plan += "kill@rank=2,step=16,phase=optimizer;slow@rank=1,step=18,phase=data,seconds=12"
    flags = (*EVERY_FIVE, *of(3), "--dropout", "0", "--recovery", "shrink", "--replace_timeout", "0", "--faults", plan)
    code, output = finish(start(cluster, recipe, tmp_path, *flags), 120)
    assert code == 0, output
    assert fired(tmp_path) == ["kill", "slow", "kill", "slow"]
    assert [(r["rank"], r["recovery"], r["steps_repeated"]) for r in reports(tmp_path)] == [
        (0, "shrink", 0),
        (2, "shrink", 0),
    ]
    assert "shrink   1/3 3 -> 2 rank(s) with the same global batch, until rank 0 is back" in output
    assert output.count("grow     2 -> 3 ranks; no step is repeated") == 2
    assert losses(tmp_path) == pytest.approx(losses(clean[2]), rel=1e-4), "sums in another order, and no more"
    assert summary(tmp_path)["world_size"] == 3
    assert no_actors_left(cluster)


def repeated(step: int, phase: str) -> int:
    """Steps that a restart from the checkpoints at 5, 10, ... does again."""
    done = step if phase in ("log", "eval", "checkpoint") else step - 1
    saved = (step - 1) // 5 * 5
    return done - saved


def sentinels(run: Path) -> list[str]:
    """The processes that attend ranks of this run."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if b"sentinel.py" in command and str(run).encode() in command:
            found.append(pid)
    return found


def attempts(out: Path) -> dict[int, int]:
    """In which attempt each step's record was written."""
    lines = (only_run(out) / "metrics.jsonl").read_text().splitlines()
    return {record["step"]: record["attempt"] for record in map(json.loads, lines)}


def test_the_survivor_keeps_its_process_and_the_trace_its_order(
    cluster: Cluster, recipe: Path, clean: dict[int, Path], tmp_path: Path
) -> None:
    """SIGKILL of rank 0 while it saves step 15: only what follows the step's update is done again."""
    code, output = launch(
        cluster,
        recipe,
        tmp_path,
        *EVERY_FIVE,
        "--faults",
        "kill@rank=0,step=15,phase=checkpoint",
        "--comm_trace",
        "every=4",
    )
    assert code == 0, output
    assert fired(tmp_path) == ["kill"], "the fault did not fire"
    assert re.search(
        r"failure  rank 0 \(pid \d+, node [\d.]+\) died in checkpoint of step 15: killed by SIGKILL", output
    )
    assert re.search(r"replace  1/3 rank 0 \(pid \d+\) joins in [\d.]+ s; no step is repeated", output)
    assert re.search(r"recover  detected in 0.\d+ s, training again after [\d.]+ s, no steps repeated", output)
    assert losses(tmp_path) == losses(clean[2]), "bit for bit"
    assert next(step for step, attempt in attempts(tmp_path).items() if attempt) == 16
    survivor = (only_run(tmp_path) / "logs" / "rank1.log").read_text()
    assert "rejoin  from step" in survivor
    assert len(set(re.findall(r"attempt \d, pid (\d+)", survivor))) == 1, "the same process went on"
    traced = [s["step"] for s in read_steps(only_run(tmp_path))]
    wanted = [step for step in range(1, 31) if step % 4 in (3, 0)]
    assert traced == sorted(set(traced)), "each once, in order"
    assert set(wanted) - set(traced) <= {15, 16}, "but for notes that the lost group took with it"


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("hang@rank=1,step=15,phase=forward", r"rank 1 .* in forward of step 15 and is behind \(rank 0 in backward of"),
        ("stop@rank=0,step=15,phase=backward", r"rank 0 .* in backward of step 15 and does not answer \(rank 1 in"),
    ],
)
def test_a_hung_rank_is_named_and_replaced(
    cluster: Cluster, recipe: Path, clean: dict[int, Path], tmp_path: Path, fault: str, says: str
) -> None:
    """A rank that sleeps, and one that SIGSTOP froze: the others would wait for the collective's timeout."""
    flags = ("--eval_every", "5", "--checkpoint_every", "0", "--hang_timeout", "4", "--faults", fault)
    code, output = launch(cluster, recipe, tmp_path, *flags)
    assert code == 0, output
    assert fired(tmp_path) == [fault.partition("@")[0]], "the fault did not fire"
    silent = re.search(r"made no progress for (\d+) s", output)
    assert silent, output
    assert 4 <= int(silent[1]) <= 7
    assert re.search(says, output), output
    assert "replace  1/3" in output
    assert losses(tmp_path) == losses(clean[2])
    rank = int(fault[fault.index("rank=") + 5])
    stacks = (only_run(tmp_path) / "logs" / f"rank{rank if fault.startswith('hang') else 1 - rank}.log").read_text()
    (report,) = reports(tmp_path)
    assert (report["cause"], report["recovery"], report["steps_repeated"]) == ("hung", "in_place", 0)
    assert "no rank moves" in stacks
    assert 'faults.py", line' in stacks or "engine.py" in stacks, "where it is"
    assert no_actors_left(cluster)


def test_a_rank_frozen_before_the_ranks_have_met_is_named_and_replaced(
    cluster: Cluster, recipe: Path, clean: dict[int, Path], tmp_path: Path
) -> None:
    """Rank 0 serves the store: who asks a frozen server waits for ever, for no timeout counts while it is connected."""
    driver = start(cluster, recipe, tmp_path, *EVERY_FIVE, "--hang_timeout", "4")
    wait_for(lambda: any(tmp_path.glob("*/logs/rank0.log")), 60, driver)
    wait_for(lambda: "pid " in next(tmp_path.glob("*/logs/rank0.log")).read_text(), 60, driver)
    pid = int(re.findall(r"pid (\d+)", (only_run(tmp_path) / "logs" / "rank0.log").read_text())[0])
    os.kill(pid, signal.SIGSTOP)
    code, output = finish(driver, 90)
    assert code == 0, output
    assert re.search(
        rf"rank 0 \(pid {pid}, .*\) made no progress for \d+ s in \w+ of step \d+ and does not answer", output
    )
    assert losses(tmp_path) == losses(clean[2])
    assert no_actors_left(cluster)


def test_nobody_left_means_a_restart_from_the_checkpoint(
    cluster: Cluster, recipe: Path, clean: dict[int, Path], tmp_path: Path
) -> None:
    plan = "kill@rank=0,step=15,phase=forward;kill@rank=1,step=15,phase=forward"
    flags = ("--eval_every", "5", "--checkpoint_every", "10", "--faults", plan)
    code, output = launch(cluster, recipe, tmp_path, *flags)
    assert code == 0, output
    assert "restart  1/3 from the newest checkpoint" in output
    assert losses(tmp_path) == losses(clean[2])


def test_a_killed_worker_costs_nothing(cluster: Cluster, recipe: Path, clean: dict[int, Path], tmp_path: Path) -> None:
    """--recovery restart: SIGKILL at step 15, after the checkpoint of step 10: every loss as if nothing had been.

    The run is traced, the clean one is not; the steps that were done again stand in the trace once.
    """
    phase = "backward"
    flags = ("--eval_every", "5", "--checkpoint_every", "10", "--faults", f"kill@rank=1,step=15,phase={phase}")
    flags += ("--recovery", "restart", "--checkpoint_mode", "sync")
    code, output = launch(cluster, recipe, tmp_path, *flags, "--comm_trace", "every=4")
    assert code == 0, output
    assert fired(tmp_path) == ["kill"], "the fault did not fire"
    assert re.search(rf"failure  rank 1 \(pid \d+, node [\d.]+\) died in {phase} of step 15: killed", output)
    assert "fault plan fires" in output, "the dead rank's last log lines"
    assert "restart  1/3 from the newest checkpoint" in output
    assert summary(tmp_path)["restarts"] == 1
    assert losses(tmp_path) == losses(clean[2]), "bit for bit"
    traced = {s["step"]: s["attempt"] for s in read_steps(only_run(tmp_path))}
    assert list(traced) == [step for step in range(1, 31) if step % 4 in (3, 0)]
    assert [attempt for step, attempt in traced.items() if step > 10] == [1] * 10
    assert summary(tmp_path)["comm"]["traced_steps"] == 10  # of the last attempt


def test_an_exception_is_the_cause_and_twice_is_enough(cluster: Cluster, recipe: Path, tmp_path: Path) -> None:
    plan = "raise@rank=1,step=5,phase=forward;raise@rank=1,step=5,phase=forward,attempt=1"
    code, output = launch(cluster, recipe, tmp_path, "--faults", plan)
    assert code == 1
    assert "InjectedFault: fault plan: raise on rank 1 at step 5 in forward" in output
    assert "deterministic: it failed 2 times in the same way at the same step" in output
    assert summary(tmp_path)["exit_reason"].startswith("failed: rank 1")


def test_divergence_is_not_retried_and_keeps_its_exit_code(cluster: Cluster, recipe: Path, tmp_path: Path) -> None:
    flags = ("--optimizer", "sgd", "--grad_clip", "0", "--lr", "1e30", "--warmup_steps", "0")
    code, output = launch(cluster, recipe, tmp_path, *flags)
    assert code == 5, output
    assert "TrainingDiverged: at step 2 the loss is nan" in output
    assert "Gave up: a restart cannot cure that" in output
    result = summary(tmp_path)
    assert result["exit_code"] == 5
    assert result["exit_reason"].startswith("failed: rank ")


def test_max_failures_0_gives_up_at_once(cluster: Cluster, recipe: Path, tmp_path: Path) -> None:
    code, output = launch(cluster, recipe, tmp_path, "--max_failures", "0", "--faults", "kill@rank=0,step=3")
    assert code == 1
    assert "max_failures = 0 are used up" in output
    assert no_actors_left(cluster)


def test_a_rank_that_dies_at_the_same_place_again_and_again_is_given_up(
    cluster: Cluster, recipe: Path, tmp_path: Path
) -> None:
    plan = ";".join(f"exit@rank=1,step=5,attempt={attempt}" for attempt in range(3))
    code, output = launch(cluster, recipe, tmp_path, "--max_failures", "9", "--faults", plan)
    assert code == 1
    assert "Gave up: deterministic: it failed 3 times in the same way at the same step" in output
    assert [r["recovery"] for r in reports(tmp_path)] == ["in_place", "in_place", "none"]
    assert no_actors_left(cluster)


def test_a_rank_that_is_lost_during_a_stop_does_not_cost_the_checkpoint(
    cluster: Cluster, recipe: Path, tmp_path: Path
) -> None:
    """SIGTERM, as before a node is taken away, and then one of the ranks is gone: the other one still saves."""
    plan = "slow@rank=0,step=10,phase=data,seconds=5;kill@rank=1,step=11,phase=backward"
    driver = start(cluster, recipe, tmp_path, "--checkpoint_every", "0", "--faults", plan)
    wait_for(lambda: any(tmp_path.glob("*/faults.jsonl")), 60, driver)
    driver.terminate()
    asked = time.monotonic()
    code, output = finish(driver, 60)
    assert fired(tmp_path) == ["slow", "kill"]
    assert code == 143, output
    assert "stop     1 rank(s) are left; they finish the step and save" in output
    assert time.monotonic() - asked < 30, "not the patience that a rank in a collective gets"
    result = summary(tmp_path)
    assert (result["exit_reason"], result["world_size"]) == ("stopped", 1)
    assert (only_run(tmp_path) / "checkpoints" / f"step_{result['steps']:08d}" / "manifest.json").exists()
    assert result["steps"] == 11
    assert no_actors_left(cluster)


def test_a_driver_that_is_killed_leaves_nothing_and_the_run_goes_on(
    cluster: Cluster, recipe: Path, clean: dict[int, Path], tmp_path: Path
) -> None:
    """SIGKILL of the driver: Ray ends its actors within two seconds; `--resume auto` continues the run."""
    driver = start(cluster, recipe, tmp_path, *EVERY_FIVE, "--faults", "slow@rank=0,step=12,phase=data,seconds=60")
    wait_for(lambda: any(tmp_path.glob("*/faults.jsonl")), 60, driver)
    pids = [int(re.findall(r"pid (\d+)", log.read_text())[0]) for log in only_run(tmp_path).glob("logs/rank*.log")]
    assert len(pids) == 2
    os.kill(driver.pid, signal.SIGKILL)
    killed = time.monotonic()
    wait_for(lambda: not any(alive(pid) for pid in pids), 10)
    assert time.monotonic() - killed < 2.5
    driver.communicate()
    assert not sentinels(only_run(tmp_path))
    code, output = launch(cluster, recipe, tmp_path, *EVERY_FIVE, "--resume", "auto")
    assert code == 0, output
    assert losses(tmp_path) == losses(clean[2])
    assert no_actors_left(cluster)


def test_ranks_without_a_driver_stop_with_a_checkpoint(cluster: Cluster, recipe: Path, tmp_path: Path) -> None:
    """A frozen driver (its node, or the network to it) asks nobody anything: after 20 s the ranks stop."""
    driver = start(cluster, recipe, tmp_path, "--max_steps", "100000", "--log_every", "100", "--sample_tokens", "0")
    wait_for(lambda: trains(tmp_path), 60, driver)
    pids = [int(re.findall(r"pid (\d+)", log.read_text())[0]) for log in only_run(tmp_path).glob("logs/rank*.log")]
    os.kill(driver.pid, signal.SIGSTOP)
    try:
        frozen = time.monotonic()
        wait_for(lambda: not any(alive(pid) for pid in pids), 60)
        assert 15 < time.monotonic() - frozen < 45
        newest, damaged = newest_valid(only_run(tmp_path) / "checkpoints")
        assert newest is not None
        assert newest.state.meta["step"] > 0
        assert not damaged
    finally:
        os.kill(driver.pid, signal.SIGKILL)
        driver.communicate()
    wait_for(lambda: no_actors_left(cluster), 15)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@contextlib.contextmanager
def second_node(cluster: Cluster) -> Iterator[subprocess.Popen[Any]]:
    """A node of one CPU that joins the cluster."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={cluster.address}", "--block"]
    node = subprocess.Popen(
        [*command, "--num-cpus=1"], env=cluster.env, stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        wait_for(lambda: len(living_nodes(cluster)) == 2, 30)
        yield node
    finally:
        end_session(node)
        wait_for(lambda: len(living_nodes(cluster)) == 1, 60)


def living_nodes(cluster: Cluster) -> list[str]:
    """The ids of the nodes, the head first."""
    code = """
nodes = [n for n in ray.nodes() if n["Alive"]]
nodes.sort(key=lambda n: "node:__internal_head__" not in n["Resources"])
print(json.dumps([n["NodeID"] for n in nodes]))"""
    return list(in_driver(cluster, code))


def test_a_drained_node_ends_the_run_with_a_checkpoint(cluster: Cluster, recipe: Path, tmp_path: Path) -> None:
    with second_node(cluster):
        flags = ("--placement", "spread", "--max_steps", "100000", "--log_every", "100")
        driver = start(cluster, recipe, tmp_path, *flags)
        wait_for(lambda: trains(tmp_path), 60, driver)
        command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", f"--address={cluster.address}"]
        command += [f"--node-id={living_nodes(cluster)[1]}", "--reason=DRAIN_NODE_REASON_PREEMPTION"]
        command += ["--reason-message=test", "--deadline-remaining-seconds=20"]
        drained = subprocess.run(command, env=cluster.env, capture_output=True, text=True, timeout=60, check=False)
        assert drained.returncode == 0, drained.stdout + drained.stderr
        asked = time.monotonic()
        code, output = finish(driver, 30)
        assert time.monotonic() - asked < 20, "before the deadline"
    assert code == 143, output
    assert re.search(r"stop     node \w{8} is being drained, \d+ s left: stopping after this step", output)
    result = summary(tmp_path)
    assert result["exit_reason"] == "stopped"
    assert (only_run(tmp_path) / "checkpoints" / f"step_{result['steps']:08d}" / "manifest.json").exists()


FAST_HEALTH = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}


def test_a_lost_node_shrinks_the_group_and_a_new_one_lets_it_grow(recipe: Path, tmp_path: Path) -> None:
    """Two nodes with room for one rank each; one is killed, and later another one joins."""
    with ray_head("--num-cpus=1", **FAST_HEALTH) as cluster:
        flags = ("--placement", "spread", "--recovery", "shrink", "--replace_timeout", "1", "--max_steps", "6000")
        flags += ("--log_every", "20", "--cpus_per_worker", "1", "--spares", "0")
        with second_node(cluster) as node:
            driver = start(cluster, recipe, tmp_path, *flags)
            wait_for(lambda: trains(tmp_path), 60, driver)
            for pid in processes_of_session(node.pid):  # raylet, agents and the rank
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            died = time.monotonic()
            wait_for(lambda: (only_run(tmp_path) / "faults.jsonl").exists(), 30, driver)
            shrunk = time.monotonic() - died
        with second_node(cluster):
            code, output = finish(driver, 120)
        assert code == 0, output
    (report,) = reports(tmp_path)
    lost = f"until rank {report['rank']} is back"  # either may have sat there
    assert f"shrink   1/3 2 -> 1 rank(s) with the same global batch, {lost}" in output
    assert "grow     1 -> 2 ranks; no step is repeated" in output
    assert (report["recovery"], report["steps_repeated"]) == ("shrink", 0)
    assert shrunk < 10, "five seconds to know, one to wait for a replacement"
    assert sorted(losses(tmp_path)) == [1, *range(20, 6001, 20)]


def gcs_server(cluster: Cluster) -> int:
    """The pid of the head's server."""
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in processes_of_session(cluster.session)}
    (found,) = [pid for pid, command in commands.items() if b"/gcs_server\0" in command]
    return found


def test_a_head_that_does_not_answer_stops_the_run_with_a_checkpoint(recipe: Path, tmp_path: Path) -> None:
    """Ray itself would end the driver after a minute, without a word and without a checkpoint."""
    with ray_head() as cluster:
        driver = start(cluster, recipe, tmp_path, "--max_steps", "100000", "--log_every", "100")
        wait_for(lambda: trains(tmp_path), 60, driver)
        os.kill(gcs_server(cluster), signal.SIGSTOP)
        stopped = time.monotonic()
        wait_for(lambda: (only_run(tmp_path) / "summary.json").exists(), 60, driver)
        assert time.monotonic() - stopped < 40
        code, output = finish(driver, 60)
        assert code == 143, output
        assert "the cluster's head has not answered for 15 s: stopping after this step, with a checkpoint" in output
        result = summary(tmp_path)
        assert result["exit_reason"] == "stopped"
        assert (only_run(tmp_path) / "checkpoints" / f"step_{result['steps']:08d}" / "manifest.json").exists()


def test_a_head_that_dies_with_its_ranks_is_the_cause(recipe: Path, tmp_path: Path) -> None:
    """`ray start --block` takes the head's ranks along. Whoever asked for new actors now would wait for ever."""
    with ray_head() as cluster:
        driver = start(cluster, recipe, tmp_path, "--max_steps", "100000", "--log_every", "100")
        wait_for(lambda: trains(tmp_path), 60, driver)
        os.kill(gcs_server(cluster), signal.SIGKILL)
        code, output = finish(driver, 60)
        assert code == 1, output
        assert "Gave up: the cluster's head is gone; start it again, and this run with --resume auto" in output


def test_a_rank_that_takes_too_much_memory_is_named(recipe: Path, tmp_path: Path) -> None:
    total, available = memory_bytes()
    threshold = (total - available + (3 << 30)) / total
    if threshold > 0.95:
        pytest.skip(f"{available >> 30} GiB of {total >> 30} are free: too little to let a rank take 4")
    with ray_head(RAY_memory_usage_threshold=f"{threshold:.3f}", RAY_memory_monitor_refresh_ms="100") as cluster:
        plan = "oom@rank=1,step=9,mib=6000"
        code, output = launch(cluster, recipe, tmp_path, "--faults", plan, "--recovery", "restart")
        assert code == 0, output
        assert fired(tmp_path) == ["oom"]
        (report,) = reports(tmp_path)
        assert report["cause"] == "out_of_memory"
        assert "was ended by Ray's memory monitor" in output or "ended by Ray's memory monitor" in report["title"]
        assert "Memory on the node" in output, "who used how much"


def memory_bytes() -> tuple[int, int]:
    """Total and available memory of this machine."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return tuple(int(lines[key].split()[0]) << 10 for key in ("MemTotal", "MemAvailable"))  # type: ignore[return-value]

"""The driver on a real Ray cluster: placement, ranks, faults, signals, jobs. One cluster serves many tests."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nanoray.timeline import read_steps
from tests.ranks import TINY

ROOT = Path(__file__).resolve().parent.parent
TOKEN = "nanoray-test-token-nanoray-test-token"


@dataclass
class Cluster:
    """A running `ray start --head` of the tests' own."""

    address: str
    dashboard: str
    env: dict[str, str]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextmanager
def ray_head(*flags: str, **env: str) -> Iterator[Cluster]:
    """Start a Ray head with its own ports, token and temporary folder; end its whole session afterwards."""
    port, dashboard = free_port(), free_port()
    base = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    base |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "RAY_USAGE_STATS_ENABLED": "0"} | env
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus=2"]
    command += [
        f"--port={port}",
        f"--dashboard-port={dashboard}",
        "--dashboard-host=127.0.0.1",
        "--node-ip-address=127.0.0.1",
    ]
    with tempfile.TemporaryDirectory(prefix="nr-", dir="/tmp", ignore_cleanup_errors=True) as temp:
        head = subprocess.Popen(
            [*command, f"--temp-dir={temp}", *flags],
            env=base | {"TMPDIR": temp},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
        )
        try:
            wait_for(lambda: answers(dashboard), 60, head)
            address = f"127.0.0.1:{port}"
            client = base | {"RAY_ADDRESS": address, "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard}"}
            client.pop("CUDA_VISIBLE_DEVICES", None)
            yield Cluster(address, f"http://127.0.0.1:{dashboard}", client)
        finally:
            end_session(head)


def end_session(leader: subprocess.Popen[Any]) -> None:
    """End a process that a test started as a session leader, and what is left of its session."""
    leader.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        leader.wait(3)
    for pid in processes_of_session(leader.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    leader.wait(5)


def processes_of_session(session: int) -> list[int]:
    """Return the live processes of a session that a test started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


def answers(port: int) -> bool:
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


def wait_for(ready: Any, seconds: float, process: subprocess.Popen[str] | None = None) -> None:
    end = time.monotonic() + seconds
    while not ready():
        if process is not None and process.poll() is not None:
            raise AssertionError(f"ended with {process.returncode}: {process.stdout.read() if process.stdout else ''}")
        assert time.monotonic() < end, f"not ready after {seconds} s"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with ray_head() as head:
        yield head


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """The tiny recipe as a YAML file on the test text."""
    folder = tmp_path_factory.mktemp("recipe")
    values = TINY | {"dataset": str(text), "data_dir": str(folder / "cache"), "max_steps": 30, "tensorboard": True}
    path = folder / "words.yaml"
    path.write_text("".join(f"{key}: {value}\n" for key, value in values.items() if key != "name"))
    return path


def start(cluster: Cluster | None, recipe: Path, out: Path, *flags: str, **env: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "nanoray.launch", "--config", str(recipe), "--out_dir", str(out), *flags]
    base = cluster.env if cluster else {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=base | {"RAY_USAGE_STATS_ENABLED": "0"} | env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], seconds: float = 90) -> tuple[int, str]:
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"no end after {seconds} s:\n{output}")
    return process.returncode, output


def launch(cluster: Cluster | None, recipe: Path, out: Path, *flags: str) -> tuple[int, str]:
    return finish(start(cluster, recipe, out, *flags))


def only_run(out: Path) -> Path:
    (run,) = [p for p in out.iterdir() if p.is_dir()]
    return run


def summary(out: Path) -> dict[str, Any]:
    return json.loads((only_run(out) / "summary.json").read_text())


def losses(out: Path) -> dict[int, float]:
    lines = (only_run(out) / "metrics.jsonl").read_text().splitlines()
    return {r["step"]: r["train/loss"] for r in map(json.loads, lines)}


def fired(out: Path) -> list[str]:
    """The kinds of the planned faults that fired."""
    lines = (only_run(out) / "faults.jsonl").read_text().splitlines()
    return [event["kind"] for event in map(json.loads, lines) if event["event"] == "injected"]


def in_driver(cluster: Cluster, code: str) -> Any:
    """Run code in a driver process of its own connected to the cluster; return what it prints as JSON."""
    head = (
        "import json, os, ray\nray.init(address=os.environ['RAY_ADDRESS'], namespace='nanoray', log_to_driver=False)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", head + code], cwd=ROOT, env=cluster.env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def no_actors_left(cluster: Cluster) -> bool:
    code = """
from ray.util.state import list_actors
from ray.util.placement_group import placement_group_table
groups = [g["state"] for g in placement_group_table().values()]
print(json.dumps([a.name for a in list_actors() if a.state != "DEAD"] + [g for g in groups if g != "REMOVED"]))"""
    return in_driver(cluster, code) == []


@pytest.fixture(scope="module")
def clean(cluster: Cluster, recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run without faults, and what it printed."""
    out = tmp_path_factory.mktemp("clean")
    code, output = launch(cluster, recipe, out, "--eval_every", "15", "--sample_tokens", "20")
    assert code == 0, output
    return out, output


def test_a_run_reports_what_it_came_to(clean: tuple[Path, str]) -> None:
    out, output = clean
    result, run = summary(out), only_run(out)
    assert (result["exit_reason"], result["steps"], result["world_size"], result["restarts"]) == ("finished", 30, 2, 0)
    assert (result["backend"], result["dataset"]) == ("gloo", "words")
    assert 0 < result["first_step_s"] < result["total_s"]
    assert result["val_loss"] < losses(out)[1]
    assert len(losses(out)) == 30
    names = {p.name for p in run.iterdir()}
    assert {"config.json", "run.json", "metrics.jsonl", "summary.json", "checkpoints", "tb", "logs"} <= names
    for rank in (0, 1):
        log = (run / "logs" / f"rank{rank}.log").read_text()
        assert f"rank={rank}" in log
        assert "nice 0," in log, "Ray's default of 15 would put training behind everything else"
        assert "threads=1" in log
    assert "2 rank(s) = dp 2 · backend gloo (CPU ranks)" in output
    assert re.search(r"step 30/30 \| loss \d", output)
    assert "sample" in output
    assert str(run) in output


def test_actors_carry_run_and_rank_and_nothing_is_left(cluster: Cluster, clean: tuple[Path, str]) -> None:
    run = only_run(clean[0]).name
    code = f"""
from ray.util.state import list_actors
actors = [a for a in list_actors(detail=True) if a.name.startswith({run!r})]
print(json.dumps([[a.name, a.repr_name, a.ray_namespace] for a in actors]))"""
    actors = sorted(in_driver(cluster, code))
    assert actors == [[f"{run}-rank{r}", f"{run} rank {r}", "nanoray"] for r in (0, 1)]
    assert no_actors_left(cluster)


def attempts(out: Path) -> dict[int, int]:
    """In which attempt each step's record was written."""
    lines = (only_run(out) / "metrics.jsonl").read_text().splitlines()
    return {record["step"]: record["attempt"] for record in map(json.loads, lines)}


@pytest.mark.parametrize(("rank", "phase"), [(0, "optimizer"), (1, "eval"), (0, "checkpoint")])
def test_a_killed_worker_is_replaced_in_place(
    cluster: Cluster, recipe: Path, clean: tuple[Path, str], tmp_path: Path, rank: int, phase: str
) -> None:
    """SIGKILL at step 15, five steps after a checkpoint: the other rank keeps its process, and no step is repeated."""
    flags = ("--eval_every", "15", "--checkpoint_every", "5", "--faults", f"kill@rank={rank},step=15,phase={phase}")
    code, output = launch(cluster, recipe, tmp_path, *flags, "--comm_trace", "every=4")
    assert code == 0, output
    assert fired(tmp_path) == ["kill"], "the fault did not fire"
    assert re.search(rf"failure  rank {rank} \(pid \d+, node [\d.]+\) died in {phase} of step 15: killed", output)
    assert re.search(rf"replace  1/3 rank {rank} \(pid \d+\) joins in [\d.]+ s; no step is repeated", output)
    assert losses(tmp_path) == losses(clean[0]), "bit for bit"
    after = phase in ("eval", "checkpoint")  # the step's update was done: only what follows it is done again
    assert next(step for step, attempt in attempts(tmp_path).items() if attempt) == (16 if after else 15)
    survivor = (only_run(tmp_path) / "logs" / f"rank{1 - rank}.log").read_text()
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
    cluster: Cluster, recipe: Path, clean: tuple[Path, str], tmp_path: Path, fault: str, says: str
) -> None:
    """A rank that sleeps, and one that SIGSTOP froze: the others would wait for the collective's timeout."""
    flags = ("--eval_every", "15", "--checkpoint_every", "0", "--hang_timeout", "4", "--faults", fault)
    code, output = launch(cluster, recipe, tmp_path, *flags)
    assert code == 0, output
    assert fired(tmp_path) == [fault.partition("@")[0]], "the fault did not fire"
    silent = re.search(r"made no progress for (\d+) s", output)
    assert silent, output
    assert 4 <= int(silent[1]) <= 7
    assert re.search(says, output), output
    assert "replace  1/3" in output
    assert losses(tmp_path) == losses(clean[0])
    rank = int(fault[fault.index("rank=") + 5])
    stacks = (only_run(tmp_path) / "logs" / f"rank{rank if fault.startswith('hang') else 1 - rank}.log").read_text()
    assert "no rank moves" in stacks
    assert 'faults.py", line' in stacks or "engine.py" in stacks, "where it is"
    assert no_actors_left(cluster)


def test_two_ranks_lost_one_after_the_other_of_three_with_dropout(
    cluster: Cluster, recipe: Path, tmp_path: Path
) -> None:
    """Three ranks: the order of sums counts, and a survivor can wait for another. Dropout: masks follow the step."""
    flags = ("--workers", "3", "--cpus_per_worker", "0.5", "--dropout", "0.1", "--max_steps", "24")
    flags += ("--eval_every", "10", "--checkpoint_every", "0", "--log_every", "1")
    plan = "kill@rank=2,step=10,phase=eval;kill@rank=0,step=17,phase=backward"
    assert launch(cluster, recipe, tmp_path / "clean", *flags)[0] == 0
    code, output = launch(cluster, recipe, tmp_path / "faulty", *flags, "--faults", plan)
    assert code == 0, output
    assert fired(tmp_path / "faulty") == ["kill", "kill"], "both faults fired"
    assert "replace  1/3 rank 2" in output
    assert "replace  2/3 rank 0" in output
    assert losses(tmp_path / "faulty") == losses(tmp_path / "clean"), "bit for bit, with no checkpoint before the end"


def test_nobody_left_means_a_restart_from_the_checkpoint(
    cluster: Cluster, recipe: Path, clean: tuple[Path, str], tmp_path: Path
) -> None:
    plan = "kill@rank=0,step=15,phase=forward;kill@rank=1,step=15,phase=forward"
    flags = ("--eval_every", "15", "--checkpoint_every", "10", "--faults", plan)
    code, output = launch(cluster, recipe, tmp_path, *flags)
    assert code == 0, output
    assert "restart  1/3 from the newest checkpoint" in output
    assert losses(tmp_path) == losses(clean[0])


def test_a_killed_worker_costs_nothing(cluster: Cluster, recipe: Path, clean: tuple[Path, str], tmp_path: Path) -> None:
    """--recovery restart: SIGKILL at step 15, after the checkpoint of step 10: every loss as if nothing had been.

    The run is traced, the clean one is not; the steps that were done again stand in the trace once.
    """
    phase = "backward"
    flags = ("--eval_every", "15", "--checkpoint_every", "10", "--faults", f"kill@rank=1,step=15,phase={phase}")
    flags += ("--recovery", "restart")
    code, output = launch(cluster, recipe, tmp_path, *flags, "--comm_trace", "every=4")
    assert code == 0, output
    assert fired(tmp_path) == ["kill"], "the fault did not fire"
    assert re.search(rf"failure  rank 1 \(pid \d+, node [\d.]+\) died in {phase} of step 15: killed", output)
    assert "fault plan fires" in output, "the dead rank's last log lines"
    assert "restart  1/3 from the newest checkpoint" in output
    assert summary(tmp_path)["restarts"] == 1
    assert losses(tmp_path) == losses(clean[0]), "bit for bit"
    traced = {s["step"]: s["attempt"] for s in read_steps(only_run(tmp_path))}
    assert list(traced) == [step for step in range(1, 31) if step % 4 in (3, 0)]
    assert [attempt for step, attempt in traced.items() if step > 10] == [1] * 10
    assert summary(tmp_path)["comm"]["traced_steps"] == 10  # of the last attempt


def test_an_exception_is_the_cause_and_twice_is_enough(cluster: Cluster, recipe: Path, tmp_path: Path) -> None:
    plan = "raise@rank=1,step=5,phase=forward;raise@rank=1,step=5,phase=forward,attempt=1"
    code, output = launch(cluster, recipe, tmp_path, "--faults", plan)
    assert code == 1
    assert "InjectedFault: fault plan: raise on rank 1 at step 5 in forward" in output
    assert "it failed twice in the same way at the same step" in output
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
    assert "max_failures = 0 restart(s) are used up" in output
    assert no_actors_left(cluster)


def test_stop_at_checkpoints_and_resume_auto_goes_on(
    cluster: Cluster, recipe: Path, clean: tuple[Path, str], tmp_path: Path
) -> None:
    code, output = launch(cluster, recipe, tmp_path, "--stop_at", "12")
    assert code == 0, output
    assert summary(tmp_path)["exit_reason"] == "stop_at"
    code, output = launch(cluster, recipe, tmp_path, "--resume", "auto")
    assert code == 0, output
    assert "resume  from step 12 of" in output
    assert losses(tmp_path) == losses(clean[0])


@pytest.mark.parametrize("local", [False, True], ids=["cluster", "own ray"])
def test_ctrl_c_once_checkpoints_and_exits_130(cluster: Cluster, recipe: Path, tmp_path: Path, local: bool) -> None:
    before = temporary_folders()
    process = start(None if local else cluster, recipe, tmp_path, "--max_steps", "100000", "--log_every", "10")
    wait_for(lambda: list(tmp_path.glob("*/metrics.jsonl")) and losses(tmp_path), 60, process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the whole foreground group
    code, output = finish(process, 30)
    assert code == 130, output
    assert "stopping after this step, with a checkpoint" in output
    result = summary(tmp_path)
    assert result["exit_reason"] == "stopped"
    assert [p.name for p in (only_run(tmp_path) / "checkpoints").iterdir()] == [f"step_{result['steps']:08d}"]
    if local:
        assert temporary_folders() <= before, "a temporary folder was left behind"
        wait_for(lambda: not processes_of_session(process.pid), 10)
    else:
        assert no_actors_left(cluster)


def temporary_folders() -> set[Path]:
    """Ours, and those of Python's multiprocessing, which Ray's dashboard uses."""
    return {path for pattern in ("nanoray-*", "pymp-*") for path in Path("/tmp").glob(pattern)}


def test_ctrl_c_twice_stops_now(cluster: Cluster, recipe: Path, tmp_path: Path) -> None:
    """The second one does not wait for a rank that hangs."""
    process = start(cluster, recipe, tmp_path, "--faults", "hang@rank=1,step=3")
    wait_for(lambda: list(tmp_path.glob("*/faults.jsonl")), 60, process)
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert process.poll() is None, "the first one waits for the step"
    process.send_signal(signal.SIGINT)
    code, _ = finish(process, 15)
    assert code == 130
    assert no_actors_left(cluster)


def test_a_request_that_never_fits_is_refused_with_a_table(cluster: Cluster, recipe: Path, tmp_path: Path) -> None:
    begin = time.monotonic()
    code, output = launch(cluster, recipe, tmp_path, "--workers", "12", "--cpus_per_worker", "1")
    assert code == 3
    assert "asked for 12 × 1 CPU, but the cluster can never hold it; total per node:" in output
    assert " has 2 CPU" in output
    code, output = launch(cluster, recipe, tmp_path, "--workers", "2", "--device", "cuda", "--global_batch_size", "12")
    assert code == 3
    assert "asked for 2 × 1 GPU + 1 CPU, but the cluster can never hold it" in output
    assert time.monotonic() - begin < 20
    assert not list(tmp_path.iterdir()), "nothing was started"


def test_a_busy_cluster_is_an_error_in_time(cluster: Cluster, recipe: Path, tmp_path: Path) -> None:
    hold = start(cluster, recipe, tmp_path / "a", "--max_steps", "100000")
    wait_for(lambda: list(tmp_path.glob("a/*/metrics.jsonl")), 60, hold)
    code, output = launch(cluster, recipe, tmp_path / "b", "--placement_timeout_s", "2")
    hold.send_signal(signal.SIGTERM)
    assert code == 3
    assert "asked for 2 × 1 CPU, not free within 2 s" in output
    assert re.search(r"available per node: [\d.]+ has nothing; wait for other jobs, or raise --placement", output)
    assert finish(hold)[0] == 143


def test_bad_arithmetic_fails_before_ray(recipe: Path, tmp_path: Path) -> None:
    code, output = launch(None, recipe, tmp_path, "--workers", "5")
    assert code == 2
    assert "global_batch_size = 12 is not a multiple of" in output
    assert "ray " not in output


def test_no_cluster_at_the_address_says_so(recipe: Path, tmp_path: Path) -> None:
    code, output = launch(None, recipe, tmp_path, "--ray_address", f"127.0.0.1:{free_port()}")
    assert code == 3
    assert "cannot connect to Ray at 127.0.0.1:" in output
    assert "use --ray_address local" in output


def test_dry_run_takes_nothing(recipe: Path, tmp_path: Path) -> None:
    code, output = launch(None, recipe, tmp_path / "none", "--dry_run")
    assert code == 0, output
    for line in ("mesh ", "placement ", "batch ", "model ", "memory ", "dry run: nothing was started"):
        assert line in output
    assert not (tmp_path / "none").exists()


def submit(cluster: Cluster, recipe: Path, out: Path, *flags: str, wait: bool = True) -> tuple[int, str]:
    command = [sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--working-dir", str(ROOT)]
    command += ["--metadata-json", json.dumps({"owner": "test"}), *([] if wait else ["--no-wait"]), "--"]
    command += [sys.executable, "examples/train_shakespeare.py", "--config", str(recipe), "--out_dir", str(out), *flags]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=cluster.env | {"RAY_JOB_ALLOW_DRIVER_ON_WORKER_NODES": "0"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=120,
    )
    return done.returncode, done.stdout


def job(cluster: Cluster, submission: str) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{cluster.dashboard}/api/jobs/{submission}", headers={"Authorization": f"Bearer {TOKEN}"}
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.loads(answer.read())


def test_ray_job_submit_runs_the_example(
    cluster: Cluster, recipe: Path, clean: tuple[Path, str], tmp_path: Path
) -> None:
    code, output = submit(cluster, recipe, tmp_path)
    assert code == 0, output
    assert losses(tmp_path) == losses(clean[0])
    assert "step 30/30" in output
    for rank in (0, 1):
        assert (only_run(tmp_path) / "logs" / f"rank{rank}.log").exists()
    (submission,) = set(re.findall(r"raysubmit_\w+", output))
    info = job(cluster, submission)
    assert (info["status"], info["driver_exit_code"]) == ("SUCCEEDED", 0)
    assert info["metadata"]["owner"] == "test"


def test_a_failing_job_has_its_exit_code(cluster: Cluster, recipe: Path, tmp_path: Path) -> None:
    code, output = submit(cluster, recipe, tmp_path, "--n_head", "3")
    assert code != 0
    assert "n_embd = 32 is not a multiple of n_head = 3" in output
    (submission,) = set(re.findall(r"raysubmit_\w+", output))
    assert (job(cluster, submission)["status"], job(cluster, submission)["driver_exit_code"]) == ("FAILED", 2)


def test_ray_job_stop_leaves_a_checkpoint_and_metrics_were_exported(
    cluster: Cluster, recipe: Path, tmp_path: Path
) -> None:
    code, output = submit(cluster, recipe, tmp_path, "--max_steps", "100000", "--log_every", "10", wait=False)
    assert code == 0, output
    submission = re.findall(r"raysubmit_\w+", output)[0]
    wait_for(lambda: list(tmp_path.glob("*/metrics.jsonl")) and len(losses(tmp_path)) > 2, 60)
    run = only_run(tmp_path).name
    wait_for(lambda: f'run="{run}"' in exported_metrics(cluster), 30)
    sample = [line for line in exported_metrics(cluster).splitlines() if line.startswith("ray_nanoray_train_loss{")]
    assert 'rank="0"' in sample[0]
    stop = [sys.executable, "-m", "ray.scripts.scripts", "job", "stop", submission]
    subprocess.run(stop, env=cluster.env, check=True, capture_output=True, timeout=60)
    wait_for(lambda: job(cluster, submission)["status"] == "STOPPED", 30)
    result = summary(tmp_path)
    assert result["exit_reason"] == "stopped"
    assert (only_run(tmp_path) / "checkpoints" / f"step_{result['steps']:08d}" / "manifest.json").exists()
    assert no_actors_left(cluster)


def exported_metrics(cluster: Cluster) -> str:
    """What the nodes' metrics agents export, as Prometheus would scrape it."""
    nodes = in_driver(cluster, "print(json.dumps([n['MetricsExportPort'] for n in ray.nodes()]))")
    texts = []
    for port in nodes:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            texts.append(answer.read().decode())
    return "\n".join(texts)


def test_ranks_are_sorted_by_node_and_spread_over_two(
    recipe: Path, tmp_path: Path, clean: tuple[Path, str], cluster: Cluster
) -> None:
    """A second node joins; --placement spread puts one rank on each, and nothing else changes."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={cluster.address}", "--block"]
    node = subprocess.Popen(
        [*command, "--num-cpus=1"], env=cluster.env, stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        wait_for(lambda: len(in_driver(cluster, "print(json.dumps(list(ray.nodes())))")) == 2, 30)
        code, output = launch(cluster, recipe, tmp_path, "--placement", "spread")
        assert code == 0, output
        logs = [(only_run(tmp_path) / "logs" / f"rank{r}.log").read_text() for r in (0, 1)]
        assert [re.findall(r"local_rank=(\d), local_world_size=(\d), node_rank=(\d)", t)[0] for t in logs] == [
            ("0", "1", "0"),
            ("0", "1", "1"),
        ]
        assert losses(tmp_path) == losses(clean[0])
    finally:
        end_session(node)


SLICES = [f"MIG-{i:08d}-1111-2222-3333-444455556666" for i in range(3)]
MIG_DRIVER = """
from pathlib import Path
from nanoray.config import make_config
from nanoray.data import DatasetInfo
from nanoray.launch import Gang
from nanoray.placement import Placement
from nanoray.run import RunSpec
config = make_config({"global_batch_size": 12, "device": "DEVICE"})
place = Placement.make(config)
data = DatasetInfo(**{f: None for f in DatasetInfo.__dataclass_fields__})
gang = Gang(RunSpec(config, data, Path("/none/run"), 0.0), place)
gang.create()
seen = [ray.get(a.describe.remote())["devices"] for a in gang.actors]
gang.end()
print(json.dumps([place.kind, place.workers, seen]))
"""


def test_each_actor_sees_exactly_its_own_slice() -> None:
    """Made-up MIG UUIDs on a real Ray: each actor is bound to one, in order."""
    with ray_head("--num-gpus=3", "--num-cpus=4", CUDA_VISIBLE_DEVICES=",".join(SLICES)) as cluster:
        kind, workers, seen = in_driver(cluster, MIG_DRIVER.replace("DEVICE", "mig"))
        assert (kind, workers) == ("mig", 3)
        assert seen == [[s] for s in SLICES]


def test_whole_gpus_are_not_taken_for_slices() -> None:
    with ray_head("--num-gpus=2", CUDA_VISIBLE_DEVICES="0,1") as cluster:
        kind, workers, seen = in_driver(cluster, MIG_DRIVER.replace("DEVICE", "auto"))
        assert (kind, workers, seen) == ("cuda", 2, [["0"], ["1"]])
        attempt = """try:
    Placement.make(config)
except Exception as error:
    print(json.dumps(str(error)))
    raise SystemExit(0)"""
        code = MIG_DRIVER.replace("DEVICE", "mig").replace("place = Placement.make(config)", attempt)
        text = in_driver(cluster, code)
        assert "device = mig, but Ray handed out ['0000', '0001']" in text
        assert "start Ray with CUDA_VISIBLE_DEVICES set to the slices' MIG- UUIDs" in text


def test_a_local_ray_is_closed_to_others(tmp_path: Path) -> None:
    """The Ray that nanoray starts: its dashboard listens on loopback, and the jobs API wants this run's token."""
    code = """
import contextlib, io, re, socket, urllib.error, urllib.request
from nanoray.config import load_config
from nanoray.devices import local_slots
from nanoray.placement import connected
said = io.StringIO()
with contextlib.redirect_stdout(said), connected("local", local_slots("cpu", 1, [], 1.0), load_config(None, "tiny")):
    url = re.search(r"http://[\\d.:]+", said.getvalue())[0]
    try:
        code = urllib.request.urlopen(url + "/api/jobs/", timeout=10).status
    except urllib.error.HTTPError as error:
        code = error.code
    inodes = set()
    port = int(url.rpartition(":")[2])
    for line in open("/proc/net/tcp").read().splitlines()[1:]:
        local, state = line.split()[1], line.split()[3]
        if state == "0A" and int(local.split(":")[1], 16) == port:
            inodes.add(local.split(":")[0])
print(code, sorted(inodes))
"""
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | {"HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "401 ['0100007F']", "127.0.0.1, as the kernel writes it"
    assert not (tmp_path / ".ray").exists(), "no token is left in the user's home"

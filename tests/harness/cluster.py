"""A Ray cluster of the tests' own, and runs of nanoray.launch on it."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nanoray.bench.harness.processes import HEAD_ENV, current_cluster, head_command
from nanoray.checkpoint.resume import newest_valid
from nanoray.launch.ray_compat import ray_version
from nanoray.train.guard import state_hashes
from tests.harness import leaks
from tests.harness.commands import ROOT, START_S, Command, torchrun, wait_for
from tests.harness.ports import free_port
from tests.harness.ranks import only_run
from tests.harness.ray_workers import forked_workers, workers_of

TOKEN = "nanoray-test-token-nanoray-test-token"
started: list[Command] = []  # runs of the present test, and of fixtures that outlive it
# Of what a Ray starts for itself, what no test needs: each takes a second of a CPU.
LESS = ("--include-log-monitor=false",)
# Without them a run that only waits for its end takes the CPUs of the tests beside it.
SLOW_STEPS = ";".join(f"slow@rank=0,step={step},phase=data,seconds=0.25" for step in range(11, 300))
ENDLESS = ("--max_steps", "100000", "--faults", SLOW_STEPS)
# A step that is under way when something happens; see start_slow_step.
SLOW_STEP = "slow@rank=0,step=12,phase=data"
# Two ranks whose state is in memory only, with dropout: masks follow from step and rank.
TWO_RANKS = ("--workers", "2", "--spares", "0", "--dropout", "0.1", "--checkpoint_every", "0")


_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1  # prctl(2)


def ends_with_tests() -> None:
    """Let this process get SIGTERM when the tests end without ending it, as after Ctrl-C."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def goes_first(nice: int = -10, pid: int | str = "self") -> None:
    """Give this session's processes the CPU before other sessions; 0 undoes it.

    Ray gives a node 30 s to start. The kernel shares the CPUs among sessions (sched(7), autogroups)
    and heeds the nice value of a process only within its session. Without the right to do this
    nothing changes.
    """
    with contextlib.suppress(OSError), Path(f"/proc/{pid}/autogroup").open("w") as group:
        group.write(str(nice))


def _first_in_new_session() -> None:
    ends_with_tests()
    goes_first()


@dataclass
class Cluster:
    """A running `ray start --head` of the tests' own."""

    address: str
    dashboard: str  # its URL; empty when it was started without
    env: dict[str, str]
    session: int  # of all its processes
    folder: Path  # its temporary files, which go with it

    @property
    def runs(self) -> bool:
        return bool(processes_of_session(self.session))

    def log(self) -> str:
        """Return its processes and their states, and the ends of its raylets' and GCS' logs."""
        found = [
            f"{pid} {process_state(pid)} {_command_of(pid)}"
            for pid in processes_of_session(self.session)
        ]
        for path in sorted(self.folder.glob("session_*/logs/*")):
            if (
                path.name.startswith(("raylet", "gcs_server"))
                and not path.is_symlink()
                and path.stat().st_size
            ):
                said = path.read_text(errors="replace").splitlines()
                events = [
                    line for line in said if line.startswith("[20") and "[state-dump]" not in line
                ]
                found += [f"--- {path.name}", *events[-60:]]
        return "\n".join(found)

    def get(self, path: str) -> Any:
        """Ask the dashboard for JSON; again where a busy machine did not answer in time."""
        request = urllib.request.Request(
            self.dashboard + path, headers={"Authorization": f"Bearer {TOKEN}"}
        )
        for tries_left in (2, 1, 0):
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    return json.load(answer)
            except OSError:
                if not tries_left:
                    raise
        return None

    def states(self, kind: str, **equal: str) -> list[dict[str, Any]]:
        """Return Ray's `actors`, `nodes`, `placement_groups` or `tasks` with these values."""
        query = [("limit", "10000"), ("detail", "true"), ("timeout", "60")]
        for key, value in equal.items():
            query += [("filter_keys", key), ("filter_predicates", "="), ("filter_values", value)]
        return self.get(f"/api/v0/{kind}?{urllib.parse.urlencode(query)}")["data"]["result"][
            "result"
        ]


@contextmanager
def ray_head(
    *flags: str, dashboard: bool = True, forked: bool = True, **env: str
) -> Iterator[Cluster]:
    """Start a Ray head with its own ports, token and temporary folder; end its session afterwards.

    Without a dashboard it starts three times as fast; then there are no jobs and no
    `Cluster.states`. With `forked` the workers of this head and of nodes that join it are forked:
    see ray_workers.py.
    """
    with (
        forked_workers() if forked else nullcontext({}) as more,
        _ray_head(*flags, dashboard=dashboard, **more, **env) as cluster,
    ):
        yield cluster


@contextmanager
def _ray_head(*flags: str, dashboard: bool, **env: str) -> Iterator[Cluster]:
    base = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    base |= (
        {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "RAY_USAGE_STATS_ENABLED": "0"}
        | HEAD_ENV
        | env
    )
    flags = (*LESS, "--no-monitor", *flags)
    if ray_version() < (2, 60):
        # Ray 2.50 announces another port of its agent than the free one that it took, so the head
        # cannot read a job's log, and `ray job submit` returns 0 while the job runs.
        flags = (f"--dashboard-agent-listen-port={free_port()}", *flags)
    flags = (
        ("--num-cpus=2", *flags)
        if dashboard
        else ("--num-cpus=2", "--include-dashboard=false", *flags)
    )
    with tempfile.TemporaryDirectory(prefix="nr-", dir="/tmp", ignore_cleanup_errors=True) as temp:
        log = Path(temp, "start.log")

        def start() -> tuple[subprocess.Popen[Any], Callable[[], object]]:
            with log.open("w") as stream:
                process = subprocess.Popen(
                    head_command(Path(temp), *flags),
                    env=base | {"TMPDIR": temp},
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=_first_in_new_session,
                )
            return process, lambda: "Ray runtime started" in log.read_text()

        head = _started(start, log.read_text)
        try:
            address = current_cluster(Path(temp))
            url = re.search(r"RAY_API_SERVER_ADDRESS='(http://[^']+)'", log.read_text())
            client = (
                base
                | {"RAY_ADDRESS": address}
                | ({"RAY_API_SERVER_ADDRESS": url[1]} if url else {})
            )
            client.pop("CUDA_VISIBLE_DEVICES", None)
            yield Cluster(address, url[1] if url else "", client, head.pid, Path(temp))
        finally:
            end_session(head)


def _started(
    start: Callable[[], tuple[subprocess.Popen[Any], Callable[[], object]]],
    said: Callable[[], str] = str,
) -> subprocess.Popen[Any]:
    """Start a Ray until it is ready; again if the machine was too busy for Ray's 30 s.

    `start` returns the process, and what tells whether it is ready. `said`: what it has written,
    for errors.
    """
    for tries_left in (2, 1, 0):
        process, ready = start()
        try:
            wait_for(ready, START_S, process, said)
            goes_first(0, process.pid)
            break
        except BaseException as error:
            end_session(process)
            if not tries_left or not isinstance(error, AssertionError):
                raise
    return process


@contextmanager
def ray_node(
    cluster: Cluster, *flags: str, before: tuple[str, ...] = ()
) -> Iterator[subprocess.Popen[Any]]:
    """Let a node of one CPU join the cluster; at the end it leaves, and the cluster knows.

    `before`: the words of a command that its own command is given to.
    """
    command = [
        *before,
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "start",
        f"--address={cluster.address}",
        "--block",
    ]
    ports = ("dashboard-agent-listen-port", "min-worker-port", "max-worker-port")
    command += ["--num-cpus=1", *(f"--{port}=0" for port in ports), *LESS, *flags]
    here = set[str]()  # ids: a node that was here may leave while this one joins

    def start() -> tuple[subprocess.Popen[Any], Callable[[], object]]:
        here.update(living_nodes(cluster))
        process = subprocess.Popen(
            command,
            env=cluster.env,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_first_in_new_session,
        )
        return process, lambda: set(living_nodes(cluster)) - here

    node = _started(start)
    joined = set(living_nodes(cluster)) - here
    try:
        yield node
    finally:
        end_session(node, grace_s=10.0)
        if cluster.runs:  # else the head is gone as well
            wait_for(lambda: not joined & set(living_nodes(cluster)), START_S)


def living_nodes(cluster: Cluster) -> list[str]:
    """The ids of the nodes, the head first."""
    nodes = [node for node in cluster.states("nodes") if node["state"] == "ALIVE"]
    return [node["node_id"] for node in sorted(nodes, key=lambda node: not node["is_head_node"])]


def end_session(leader: subprocess.Popen[Any] | Command, grace_s: float = 0.0) -> None:
    """End a process that a test started as a session leader, and what is left of its session."""
    if grace_s:
        leader.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            leader.wait(grace_s)
    while pids := processes_of_session(leader.pid):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    leader.wait(30)


def processes_of_session(session: int) -> list[int]:
    """Return the live processes of a session, and the workers that were forked for it."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found + [pid for pid in workers_of(found) if alive(pid)]


def start(cluster: Cluster | None, recipe: Path, out: Path, *flags: str, **env: str) -> Command:
    """Start `python -m nanoray.launch` on a recipe."""
    base = (
        cluster.env
        if cluster
        else {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    )
    base = base | {"RAY_USAGE_STATS_ENABLED": "0"} | env
    command = Command(
        "nanoray.launch", "--config", str(recipe), "--out_dir", str(out), *flags, env=base
    )
    command.cluster = cluster
    started.append(command)
    return command


def start_training(
    cluster: Cluster | None, recipe: Path, out: Path, *flags: str, **env: str
) -> Command:
    """Start a run on Ray, and return when it has completed a step."""
    command = start(cluster, recipe, out, *flags, **env)
    wait_for(lambda: trains(out), process=command)
    return command


def start_slow_step(
    cluster: Cluster, recipe: Path, out: Path, *flags: str, seconds: int = 8
) -> Command:
    """Start a run on Ray, and return when its step 12 is under way, which takes some seconds."""
    command = start(cluster, recipe, out, *flags, "--faults", f"{SLOW_STEP},seconds={seconds}")
    wait_for(lambda: fired(out) == ["slow"], process=command)
    return command


def finish(process: Command, seconds: float = START_S) -> tuple[int, str]:
    """Wait for the end of a run; return its exit code and output."""
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"no end after {seconds} s:\n{output}")
    return int(process.returncode or 0), output


@contextmanager
def commands_end_here(grace_s: float = 20.0) -> Iterator[None]:
    """End the runs that `start` starts meanwhile and that still run, as after a failed assertion.

    SIGTERM, and after `grace_s` SIGKILL to its session. Then the clusters that they used are waited
    for: the next run finds them as this one did. What they had printed is printed.
    """
    earlier = list(started)
    try:
        yield
    finally:
        left = [command for command in started if command not in earlier and command.poll() is None]
        started[:] = earlier
        for command in left:
            command.terminate()
        clusters = []
        for command in left:
            end_session(command, grace_s)
            print(
                f"ended {' '.join(command.args)} (pid {command.pid}), which had "
                f"printed:\n{command.output}"
            )
            if command.cluster and command.cluster.runs and command.cluster not in clusters:
                clusters.append(command.cluster)
        for cluster in clusters:
            assert not cluster.dashboard or no_actors_left(cluster, 60.0), (
                "an ended run left actors behind"
            )


def launch(cluster: Cluster | None, recipe: Path, out: Path, *flags: str) -> tuple[int, str]:
    """Run `python -m nanoray.launch` on a recipe."""
    return finish(start(cluster, recipe, out, *flags))


def undisturbed(recipe: Path, out: Path, *flags: str) -> None:
    """Train a recipe without Ray and without faults, on the number of ranks in the flags, or two.

    What a run on Ray has to equal to the bit. It takes a tenth of the time. Its ranks compute with
    as many threads as on the tests' nodes of two CPUs: this machine may have more.
    """
    ranks = [int(value) for flag, value in pairwise(flags) if flag == "--workers"] or [2]
    if "--cpus_per_worker" not in flags:
        flags += ("--cpus_per_worker", str(max(1, 2 // ranks[-1])))
    for done in torchrun(
        ranks[-1], "nanoray.train", "--config", str(recipe), "--out_dir", str(out), *flags
    ):
        assert done.returncode == 0, done.stdout + done.stderr


def weights(out: Path) -> dict[str, Tensor]:
    """The weights in the newest checkpoint of the run under `out`."""
    newest, _ = newest_valid(only_run(out) / "checkpoints")
    assert newest is not None
    return newest.state.model


def computed_with(run: Path) -> dict[str, set[Any]]:
    """What the bits of a run depend on besides its recipe and its ranks: one value each.

    Another number of threads adds in another order, which some kernels hide on some CPUs.
    """
    groups = state_hashes.read(run).groups
    assert groups, f"{run} has no record of its groups"
    keys = ("threads", "hardware", "kernels", "torch")
    return {key: {group[key] for group in groups} for key in keys}


def assert_same_losses(ours: Path, theirs: Path) -> None:
    """Two runs logged the same losses, to the bit."""
    assert computed_with(only_run(ours)) == computed_with(only_run(theirs)), "not comparable"
    assert losses(ours) == losses(theirs)


def assert_same_weights(ours: Path, theirs: Path) -> None:
    """Two runs ended with the same weights, to the bit."""
    found = weights(ours)
    expected = weights(theirs)
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


def assert_same_run(ours: Path, theirs: Path) -> None:
    """Two runs logged the same losses and ended with the same weights, to the bit."""
    assert_same_losses(ours, theirs)
    assert_same_weights(ours, theirs)


def pid_of(out: Path, rank: int, driver: Command | None = None) -> int:
    """The process of a rank, by the newest attempt in its log."""
    wait_for(lambda: any(out.glob(f"*/logs/rank{rank}.log")), process=driver)
    log = only_run(out) / "logs" / f"rank{rank}.log"
    wait_for(lambda: "pid " in log.read_text(), process=driver)
    return int(re.findall(r"pid (\d+)", log.read_text())[-1])


def thaw(driver: Command, out: Path, rank: int, method: str, since: float) -> None:
    """Let a rank that a `stop` fault froze go on as soon as the others have their orders.

    The orders are a call of `method` (pause, stop) that has ended in a rank's actor after `since`
    (Unix seconds).
    """
    cluster: Cluster = driver.cluster
    pid, run = pid_of(out, rank, driver), only_run(out).name
    wait_for(lambda: process_state(pid) == "T", process=driver)

    def told() -> bool:
        actors = [a["actor_id"] for a in cluster.states("actors") if str(a["name"]).startswith(run)]
        calls = [
            call
            for actor in actors
            for call in cluster.states("tasks", actor_id=actor, state="FINISHED")
        ]
        return any(
            call["name"].endswith(f".{method}") and call["end_time_ms"] > 1e3 * since
            for call in calls
        )

    def actors() -> str:
        return "\n".join(
            f"{a['name']}: {a['state']}, pid {a['pid']}" for a in cluster.states("actors")
        )

    wait_for(told, process=driver, said=actors)
    os.kill(pid, signal.SIGCONT)


def process_state(pid: int) -> str:
    """The letter of /proc for a process: T frozen, Z dead; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return ""


def _command_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")[:150]
    return ""


def alive(pid: int) -> bool:
    return process_state(pid) not in ("", "Z")


def trains(out: Path) -> bool:
    """Whether the run has completed a step."""
    return any(path.stat().st_size for path in out.glob("*/metrics.jsonl"))


def reports(out: Path) -> list[dict[str, Any]]:
    """The faults of a run, as the driver reported them."""
    lines = whole_lines(only_run(out) / "faults.jsonl")
    return [event for event in map(json.loads, lines) if event["event"] == "fault"]


def only_report(out: Path, output: str) -> dict[str, Any]:
    """Return the one fault of a run. `output`: the driver's, for the message of a failure."""
    found = reports(out)
    assert len(found) == 1, f"{found}\n{output}"
    return found[0]


def summary(out: Path) -> dict[str, Any]:
    return json.loads((only_run(out) / "summary.json").read_text())


def whole_lines(path: Path) -> list[str]:
    """Return the lines of a file of a run that may be writing the last one.

    Unlike read_json_lines, which leaves out any line that is damaged: here that is an error.
    """
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def losses(out: Path) -> dict[int, float]:
    lines = whole_lines(only_run(out) / "metrics.jsonl")
    return {r["step"]: r["train/loss"] for r in map(json.loads, lines)}


def injected(out: Path) -> list[dict[str, Any]]:
    """The planned faults that fired."""
    if not any(out.glob("*/faults.jsonl")):
        return []
    lines = whole_lines(only_run(out) / "faults.jsonl")
    return [event for event in map(json.loads, lines) if event["event"] == "injected"]


def fired(out: Path) -> list[str]:
    """The kinds of the planned faults that fired."""
    return [event["kind"] for event in injected(out)]


def left_behind(before: set[str]) -> list[str]:
    """Return unused temporary folders of nanoray and multiprocessing that came after `before`."""
    return [
        path
        for path in leaks.abandoned(before)
        if Path(path).name.startswith(("nanoray-", "pymp-"))
    ]


def in_driver(cluster: Cluster, code: str) -> Any:
    """Run code in a new driver process connected to the cluster; return its JSON output.

    Ray itself logs to stdout too, also after the last line of the code: the newest line that is
    JSON counts.
    """
    head = (
        "import json, os, ray\nray.init(address=os.environ['RAY_ADDRESS'], namespace='nanoray', "
        "log_to_driver=False)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", head + code],
        cwd=ROOT,
        env=cluster.env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    for line in reversed(done.stdout.splitlines()):
        with contextlib.suppress(ValueError):
            return json.loads(line)
    raise AssertionError(f"it printed no JSON: {done.stdout}{done.stderr}")


def no_actors_left(cluster: Cluster, seconds: float = 60.0) -> bool:
    """Whether all actors and placement groups are gone; killed ones may be listed for a moment."""
    end = time.monotonic() + seconds
    while left := _left(cluster):
        if time.monotonic() > end:
            print(f"left: {left}")
            return False
        time.sleep(0.1)
    return True


def _left(cluster: Cluster) -> list[str]:
    """Return the actors and placement groups, without those that Ray itself leaves on a cluster."""
    actors = [actor for actor in cluster.states("actors") if actor["state"] != "DEAD"]
    names = [str(actor["name"] or actor["class_name"]) for actor in actors]
    others = ("AutoscalingCoordinator", "PlacementGroupCleaner", "datasets_stats_actor")
    names = [name for name in names if name not in others]
    return names + [
        str(g["name"]) for g in cluster.states("placement_groups") if g["state"] != "REMOVED"
    ]

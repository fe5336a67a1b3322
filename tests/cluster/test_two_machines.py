"""Two and three machines: hosts with own addresses, names and file systems, on a network that is cut.

What stands in: network, mount and process namespaces of this machine (tests/harness/hosts.py). What
is real: torchrun, Ray, gloo between addresses, the training.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from nanoray.kube.render import KUBE_DIR
from tests.harness.cluster import TOKEN, assert_same_run
from tests.harness.commands import torchrun, wait_for
from tests.harness.hosts import Hosts, commands_on, start_on
from tests.harness.manifests import build
from tests.harness.pods import RunningPod, missing
from tests.harness.ranks import TINY, only_run

STEPS = 40
RECIPE: dict[str, Any] = {k: v for k, v in TINY.items() if k != "name"} | {
    "dataset": "/data/words.txt",
    "max_steps": STEPS,
    "eval_every": 0,
    "checkpoint_every": 10,
    "log_every": 1,
    "tensorboard": False,
    "cpus_per_worker": 1,
    "device": "cpu",
}
# One step that lasts long enough to cut the network in it
PAUSE = "slow@rank=0,step=20,phase=data,seconds=1"
TORCHRUN = "python -m torch.distributed.run --nproc-per-node 1 --master-addr alpha"
TRAIN = "-m nanoray.train --config /data/recipe.yaml --out_dir /data/runs"
# Ray finds a lost node in seconds, instead of a minute.
HEALTH = {"initial_delay_ms": 1000, "period_ms": 500, "timeout_ms": 1000, "failure_threshold": 3}
RAY = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": TOKEN,
    "RAY_ADDRESS": "alpha:6379",
    **{f"RAY_health_check_{name}": str(value) for name, value in HEALTH.items()},
}


@pytest.fixture
def hosts(tmp_path: Path, text: Path) -> Iterator[Hosts]:
    """A network without hosts; /data of each that is started has the recipe and its text."""
    if reason := missing():
        pytest.skip(reason)
    volume = tmp_path / "volume"
    volume.mkdir()
    write_recipe(volume, text)
    with Hosts(volume) as hosts:
        yield hosts


def write_recipe(folder: Path, text: Path) -> None:
    (folder / "words.txt").write_text(text.read_text())
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """The runs of the same recipe on two ranks of this machine alone."""
    return train_here(tmp_path_factory.mktemp("here"), text, 2)


def train_here(folder: Path, text: Path, ranks: int) -> Path:
    folder.mkdir(exist_ok=True)
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(RECIPE | {"dataset": str(text)}))
    flags = ("--config", str(recipe), "--out_dir", str(folder / "runs"))
    for done in torchrun(ranks, "nanoray.train", *flags):
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "runs"


class Ranks:
    """Two hosts with one rank each, and what they print."""

    def __init__(self, hosts: Hosts, folder: Path, *flags: str, torchrun: bool = True) -> None:
        """Start them by torchrun, or with the variables alone that a script or a pod sets."""
        self.logs = [folder / f"torchrun-{i}.log" for i in range(2)]
        self._processes = []
        for i, name in enumerate(("alpha", "beta")):
            starter = f"{TORCHRUN} --nnodes 2 --node-rank {i} --master-port 29500"
            if not torchrun:
                variables = f"RANK={i} WORLD_SIZE=2 MASTER_ADDR=alpha MASTER_PORT=29500"
                starter = f"{variables} python"
            command = f"{starter} {TRAIN} {shlex.join(flags)}"
            self._processes.append(start_on(hosts.pods[name], command, self.logs[i]))

    def output(self, i: int = 0) -> str:
        return self.logs[i].read_text(errors="replace")

    def wait_for(self, line: str) -> None:
        wait_for(lambda: line in self.output(), 120, self._processes[0], self.output)

    def finish(self, seconds: float = 120) -> list[int]:
        """Return the exit codes."""
        try:
            return [process.wait(seconds) for process in self._processes]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end: {self.output(0)}\n{self.output(1)}") from None


def ray_on(hosts: Hosts, *names: str) -> None:
    """Start a Ray of one CPU a host, its head on alpha."""
    role = "--head --include-dashboard=false"
    for name in names:
        command = f"ray start {role} --block --num-cpus=1"
        host = hosts.host(name, command, **RAY)
        wait_for_ray(host)
        role = "--address=alpha:6379"


def wait_for_ray(host: RunningPod) -> None:
    wait_for(lambda: "Ray runtime started" in host.log, 120, said=lambda: host.log)


def launch(hosts: Hosts, *flags: str) -> tuple[subprocess.Popen[Any], Path]:
    """Start `nanoray.launch` of two ranks on alpha; return it and its log."""
    log = hosts.volume / "launch.log"
    command = TRAIN.replace("nanoray.train", "nanoray.launch")
    asked = f"--workers 2 --spares 0 --placement spread {shlex.join(flags)}"
    return start_on(hosts.pods["alpha"], f"python {command} {asked}", log), log


def wait_for_end(process: subprocess.Popen[Any], log: Path) -> str:
    """Return what a run that ends well has printed."""
    code = process.wait(150)
    output = log.read_text()
    assert code == 0, output
    return output


def hosts_with_ranks(hosts: Hosts) -> list[str]:
    """The hosts on which an actor of the run lives."""
    found = []
    for name, host in hosts.pods.items():
        if any(command.startswith("ray::Worker") for command in commands_on(host)):
            found.append(name)
    return found


def events(runs: Path) -> list[dict[str, Any]]:
    lines = (only_run(runs) / "faults.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def steps_of(runs: Path) -> list[int]:
    lines = (only_run(runs) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


# ---- torchrun ------------------------------------------------------------------------------------


@pytest.mark.full
def test_torchrun_on_two_hosts_and_a_cut_that_heals_in_time(
    hosts: Hosts, here: Path, tmp_path: Path
) -> None:
    """Debian's names, a Docker bridge, and a network that is gone for 3 s."""
    for name in ("alpha", "beta"):
        hosts.host(name)
    ranks = Ranks(hosts, tmp_path, "--faults", PAUSE)
    ranks.wait_for("step 19/")
    hosts.net.cut("beta")
    time.sleep(3)
    hosts.net.heal("beta")
    assert ranks.finish() == [0, 0], ranks.output() + ranks.output(1)

    assert [event["kind"] for event in events(hosts.volume / "runs")] == ["slow"]
    assert "over eth0: this host's own name is a loopback address" in ranks.output()
    assert_same_run(hosts.volume / "runs", here)
    assert not any(
        "ray" in command for name in hosts.pods for command in commands_on(hosts.pods[name])
    )


@pytest.mark.full
def test_hosts_without_a_shared_folder_say_so_at_once_on_both(tmp_path: Path, text: Path) -> None:
    if reason := missing():
        pytest.skip(reason)
    with Hosts(tmp_path, shared=False) as hosts:
        for name in ("alpha", "beta"):
            hosts.host(name)
            write_recipe(hosts.data(name), text)
        began = time.monotonic()
        ranks = Ranks(hosts, tmp_path, "--init_timeout_s", "300", torchrun=False)
        assert ranks.finish() == [3, 2]
        assert time.monotonic() - began < 150, "rank 0 did not wait for its time to be up"
    why = "rank 1 on beta does not see the run's folder /data/runs/"
    assert f"error: rank 1 of 2 cannot take part: {why}" in ranks.output(0)
    assert f"error: {why}" in ranks.output(1)
    assert "give an --out_dir on storage that all nodes share" in ranks.output(1)


@pytest.mark.full
def test_a_cut_that_outlasts_the_timeouts_ends_both_and_a_resume_goes_on(
    hosts: Hosts, here: Path, tmp_path: Path
) -> None:
    for name in ("alpha", "beta"):
        hosts.host(name)
    ranks = Ranks(hosts, tmp_path, "--faults", PAUSE, "--timeout_s", "5")
    ranks.wait_for("step 19/")
    hosts.net.cut("beta")
    codes = ranks.finish()
    hosts.net.heal("beta")
    assert codes == [1, 1]
    for rank in range(2):
        said = [line for line in ranks.output(rank).splitlines() if line.startswith("error: rank")]
        assert len(said) == 1, ranks.output(rank)
        assert f"error: rank {rank} had no answer from another rank for timeout_s = 5 s" in said[0]
        assert "that rank hangs, or the network between the hosts is cut" in said[0]
    run = f"/data/runs/{only_run(hosts.volume / 'runs').name}"
    again = Ranks(hosts, tmp_path, "--resume", run, "--timeout_s", "5")
    assert again.finish() == [0, 0], again.output()
    # hashes.jsonl lists both commands' groups; the losses are those of an unbroken run.
    assert_same_run(hosts.volume / "runs", here)
    assert steps_of(hosts.volume / "runs") == list(range(1, STEPS + 1))


# ---- Ray -----------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("cut_s", [2, 30])
def test_a_host_with_a_rank_is_cut_off_and_comes_back(hosts: Hosts, here: Path, cut_s: int) -> None:
    """For less than Ray's 3 checks nothing happens. Later its rank is replaced on the third host, no
    step is repeated, and nothing that the old rank still does is in the run.

    2 s: after a cut of 4 s TCP waits for some more before it sends again, too long for the checks.
    """
    ray_on(hosts, "alpha", "beta", "gamma")
    process, log = launch(hosts, "--faults", PAUSE, "--timeout_s", "300", "--hang_timeout", "0")
    wait_for(lambda: "step 19/" in log.read_text(), 120, process, log.read_text)
    (with_rank, *_) = [name for name in hosts_with_ranks(hosts) if name != "alpha"]
    hosts.net.cut(with_rank)
    time.sleep(cut_s)
    hosts.net.heal(with_rank)
    output = wait_for_end(process, log)

    found = [event.get("kind") or event["cause"] for event in events(hosts.volume / "runs")]
    if cut_s < 10:
        assert found == ["slow"], output
    else:
        assert found == ["slow", "node_lost"], output
        assert "Ray has lost its node: terminated unexpectedly" in output
        assert " no step is repeated" in output
    assert steps_of(hosts.volume / "runs") == list(range(1, STEPS + 1))
    assert_same_run(hosts.volume / "runs", here)


# A program of two files that asks for all that is around it; its rank on the other host fails once
PROJECT = {
    "train.py": """
import os, sys
import torch, torch.distributed as dist
from helpers.speak import speak
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
speak(open("conf/words.txt").read(), sys.argv, os.getcwd(), int(total))
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise ValueError("a bad value")
dist.barrier()
dist.destroy_process_group()
""",
    "helpers/speak.py": "def speak(*words): print('said', *words)",
    "conf/words.txt": "hello",
    ".env": "SECRET=1",
    "__pycache__/old.pyc": "",
}


@pytest.mark.full
def test_a_folder_that_one_host_has_travels_and_the_logs_come_back(tmp_path: Path) -> None:
    if reason := missing():
        pytest.skip(reason)
    with Hosts(tmp_path, shared=False) as hosts:
        ray_on(hosts, "alpha", "beta")
        for name, text in PROJECT.items():
            file = hosts.data("alpha") / "mine" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        flags = "--workers 2 --device cpu --placement spread --out_dir /data/runs"
        log = tmp_path / "run.log"
        command = f"cd /data/mine; python -m nanoray run {flags} train.py --lr 1"
        output = wait_for_end(start_on(hosts.pods["alpha"], command, log), log)

        here, there = (only_run(hosts.data(name) / "runs") for name in ("alpha", "beta"))
        assert "send   /data/mine: 3 files, 0.4 KiB, to " in output, output
        assert "failed: ValueError: a bad value" in output
        copied = {p.relative_to(there / "code").as_posix() for p in (there / "code").rglob("*.*")}
        assert copied & PROJECT.keys() == {"conf/words.txt", "helpers/speak.py", "train.py"}
        (away,) = [path.name for path in (there / "logs").glob("*.log")]
        for rank in range(2):
            text = (here / "logs" / f"rank{rank}.log").read_text()
            folder, script = "/data/mine", "/data/mine/train.py"
            if away == f"rank{rank}.log":
                assert text == (there / "logs" / away).read_text()
                folder, script = f"/data/runs/{there.name}/code", "train.py"
            said = f"said hello ['{script}', '--lr', '1'] {folder} 2"
            assert text.splitlines().count(said) == 2, text


# ---- Kubernetes without Ray ----------------------------------------------------------------------


@pytest.mark.full
def test_the_statefulset(hosts: Hosts, text: Path, tmp_path: Path) -> None:
    """Its command and environment."""
    (thing,) = [o for o in build(KUBE_DIR / "statefulset") if o["kind"] == "StatefulSet"]
    container = thing["spec"]["template"]["spec"]["containers"][0]
    flags = "--config /data/recipe.yaml --out_dir /data/runs"
    command = container["args"][0].replace("--preset shakespeare-cpu", flags)
    pods: list[RunningPod] = []
    for ordinal in range(3):
        env = {item["name"]: item.get("value", str(ordinal)) for item in container["env"]}
        name = f"{thing['metadata']['name']}-{ordinal}"
        aliases = (f"{name}.{thing['spec']['serviceName']}",)
        pods.append(hosts.start(name, command, env, 2**28, aliases))
    said = lambda: "\n".join(pod.log for pod in pods)  # noqa: E731
    wait_for(lambda: all("done; idle" in pod.log for pod in pods), 200, said=said)
    (folder,) = {path.parent.parent for path in hosts.volume.glob("runs/**/metrics.jsonl")}
    assert_same_run(folder, train_here(tmp_path / "three", text, 3))

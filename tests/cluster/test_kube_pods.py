"""The manifests, run: pods as namespaces of this machine, the operator's own `ray start`, a job
over HTTP, a lost pod.

What stands in: Kubernetes' API server (`ApiServer`), the operator and the kubelet (`Operator`),
containers (`Machine`). What is real: the manifests, `nanoray kube`, Ray, gloo between network
addresses, the training.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from nanoray.kube.render import KUBE_DIR
from tests.cluster.kuberay import Operator
from tests.harness import commands
from tests.harness.cluster import computed_with
from tests.harness.commands import torchrun
from tests.harness.kube_server import ApiServer
from tests.harness.manifests import build
from tests.harness.pods import Machine, RunningPod, missing
from tests.harness.ranks import TINY

RECIPE: dict[str, Any] = {k: v for k, v in TINY.items() if k != "name"} | {
    "max_steps": 60,
    "eval_every": 0,
    "checkpoint_every": 10,
    "log_every": 1,
    "tensorboard": False,
}


@pytest.fixture(scope="module")
def world(
    tmp_path_factory: pytest.TempPathFactory, text: Path
) -> Iterator[tuple[ApiServer, Machine, Operator, Path]]:
    if reason := missing():
        pytest.skip(reason)
    volume = tmp_path_factory.mktemp("volume")
    (volume / "words.txt").write_text(text.read_text())
    with (
        ApiServer(volume) as server,
        Machine(volume) as machine,
        Operator(server, machine) as operator,
    ):
        os.environ["KUBECONFIG"] = str(server.kubeconfig(tmp_path_factory.mktemp("home")))
        yield server, machine, operator, volume
        del os.environ["KUBECONFIG"]


def assert_as_here(run: Path, folder: Path, recipe: dict[str, Any], ranks: int) -> None:
    """Train the same recipe on this machine, as torchrun would start it: to the bit the same losses.

    With as many threads as the ranks in the pods had. There a rank counts the CPUs of its pod, here
    it shares this machine's.
    """
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe))
    (threads,) = computed_with(run)["threads"]
    flags = ("--config", str(file), "--out_dir", str(folder / "runs"), "--device", "cpu")
    flags += ("--cpus_per_worker", str(threads))
    for done in torchrun(ranks, "nanoray.train", *flags, env=os.environ | {"OMP_NUM_THREADS": "1"}):
        assert done.returncode == 0, done.stdout + done.stderr
    (here,) = (folder / "runs").iterdir()
    assert computed_with(run) == computed_with(here), "not comparable"
    assert losses(run) == losses(here)


def losses(run: Path) -> list[float]:
    return [
        json.loads(line)["train/loss"] for line in (run / "metrics.jsonl").read_text().splitlines()
    ]


class Command:
    """`nanoray kube ...` as a process whose output can be waited for."""

    def __init__(self, *args: str, cwd: Path = commands.ROOT) -> None:
        self._process = commands.Command("nanoray", "kube", *args, cwd=cwd)

    @property
    def lines(self) -> list[str]:
        return self._process.output.splitlines()

    def wait_for(self, pattern: str, seconds: float) -> str:
        end = time.monotonic() + seconds
        while True:
            for line in self.lines:
                if re.search(pattern, line):
                    return line
            assert self._process.poll() is None or time.monotonic() < end - seconds + 2, "\n".join(
                self.lines
            )
            assert time.monotonic() < end, f"no {pattern!r} in:\n" + "\n".join(self.lines)
            time.sleep(0.1)

    def finish(self, seconds: float) -> int:
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"not over after {seconds} s:\n" + "\n".join(self.lines[-60:])
            ) from None
        finally:
            self._process.kill()


def run(*args: str) -> tuple[int, str]:
    command = Command(*args)
    return command.finish(200), "\n".join(command.lines)


def until(ready: Callable[[], bool], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, what
        time.sleep(0.2)


@pytest.mark.full
def test_submit_survives_a_lost_pod_and_a_lost_log(
    world: tuple[ApiServer, Machine, Operator, Path], tmp_path: Path
) -> None:
    """Rendered, applied, trained; a worker pod is lost in mid-run, and the log's stream: same
    losses to the bit.
    """
    server, machine, operator, volume = world
    recipe = RECIPE | {"dataset": str(volume / "words.txt")}
    file = tmp_path / "words.yaml"
    freeze = "stop@rank=0,step=15,phase=forward"  # until a pod is lost
    file.write_text(yaml.safe_dump(RECIPE | {"dataset": "/data/words.txt"}))
    submit = Command(
        "submit",
        "--config",
        str(file),
        "--workers",
        "2",
        "--device",
        "cpu",
        "--faults",
        freeze,
        "--timeout_s",
        "300",
    )
    submit.wait_for(r"^apply +RayJob words$", 100)
    submit.wait_for(r"^ray +cluster at", 300)
    # A frozen rank tells no more of its steps.
    until(
        lambda: any(pod.frozen() for pod in list(machine.pods.values())),
        200,
        "the fault did not fire",
    )
    victim = next(name for name in list(machine.pods) if "worker-1" in name)
    server.drop_ray = 2
    machine.pods[victim].kill()
    for pid in [pid for pod in list(machine.pods.values()) if pod.alive for pid in pod.frozen()]:
        os.kill(pid, signal.SIGCONT)
    code = submit.finish(300)
    output = "\n".join(submit.lines)
    assert code == 0, output + str(operator.errors)
    # A pod takes its node with it: replaced in place where its peer learns of it in time, else from
    # the checkpoint.
    assert re.search(
        r"replace +1/3 rank \d .* no step is repeated|restart +1/3 from the newest", output
    ), output
    assert "log    out of reach, trying again" in output
    assert submit.lines[-1].startswith("job    Complete/SUCCEEDED"), output
    assert len([line for line in submit.lines if re.search(r"step +60/60", line)]) == 1, (
        "each line once"
    )
    (folder,) = (volume / "runs").glob("words-*/*")
    assert '"kind": "stop"' in (folder / "faults.jsonl").read_text(), "the fault fired"
    assert_as_here(folder, tmp_path, recipe, 2)
    assert operator.errors == []

    code, output = run("status", "words")
    assert (code, "job    words Complete/SUCCEEDED" in output) == (0, True), output
    assert output.count("on this-machine") == 3
    code, output = run("logs", "words")
    assert (code, "step 60/60" in output) == (0, True), output

    tensorboard = {"name": "tb", "labels": {"app.kubernetes.io/name": "nanoray-tensorboard"}}
    server.objects["pods", "nanoray", "tb"] = {
        "metadata": tensorboard,
        "spec": {},
        "status": {"phase": "Running"},
    }
    code, output = run("fetch", "words", "--out_dir", str(tmp_path / "here"))
    assert code == 0, output
    (copy,) = (tmp_path / "here").iterdir()
    assert losses(copy) == losses(folder)
    assert sorted(p.name for p in copy.rglob("*")) == sorted(p.name for p in folder.rglob("*"))
    code, output = run("fetch", "words", "--out_dir", str(tmp_path / "here"))
    assert (code, "is there already" in output) == (4, True), output


@pytest.mark.full
def test_a_deleted_worker_pod_costs_only_its_rank(
    world: tuple[ApiServer, Machine, Operator, Path], tmp_path: Path
) -> None:
    """`kubectl delete pod` in mid-run: Ray drains its node, the operator makes another pod, and the
    job goes on.

    The same RayJob, the same attempt, no repeated step, and the losses of an undisturbed run.
    """
    _, machine, operator, volume = world
    recipe = RECIPE | {"dataset": str(volume / "words.txt")}
    file = tmp_path / "deleted.yaml"
    file.write_text(yaml.safe_dump(RECIPE | {"dataset": "/data/words.txt"}))
    slow = "slow@rank=0,step=15,phase=data,seconds=97"  # until little of the notice is left
    flags = (
        "--spares",
        "0",
        "--replace_timeout",
        "120",
        "--timeout_s",
        "300",
        "--hang_timeout",
        "0",
    )
    submit = Command(
        "submit",
        "--config",
        str(file),
        "--workers",
        "2",
        "--device",
        "cpu",
        "--faults",
        slow,
        *flags,
    )
    submit.wait_for(r"^apply +RayJob deleted$", 100)
    submit.wait_for(r"step +14/60", 300)
    victim = next(
        name for name in list(machine.pods) if name.startswith("deleted") and "worker-1" in name
    )
    seconds = operator.delete_pod(victim)
    assert 90 < seconds < 115, (
        "after the notice of 100 s and within the grace period of 120 s, without SIGKILL"
    )
    code = submit.finish(300)
    output = "\n".join(submit.lines)
    assert code == 0, output + str(operator.errors)
    assert re.search(r"drain +node \w{8} .* is being drained, \d+ s left", output), output
    assert re.search(r"replace +0/3 rank \d .* no step is repeated", output), output
    assert "restart " not in output
    assert submit.lines[-1].startswith("job    Complete/SUCCEEDED"), output
    (folder,) = (volume / "runs").glob("deleted-*/*")
    events = [json.loads(line) for line in (folder / "faults.jsonl").read_text().splitlines()]
    assert [event.get("kind") or event["cause"] for event in events] == ["slow", "drained"]
    assert (events[1]["recovery"], events[1]["steps_repeated"]) == ("in_place", 0)
    assert_as_here(folder, tmp_path, recipe, 2)
    assert operator.errors == []
    assert run("stop", "deleted", "--delete")[0] == 0


@pytest.mark.full
def test_pods_that_a_drain_has_emptied_end_and_are_replaced(
    world: tuple[ApiServer, Machine, Operator, Path], tmp_path: Path
) -> None:
    """Both worker pods are deleted at once: no rank elsewhere has the state, so all save and leave.

    The run's bundles stay reserved in these pods, but the pods do not stay for their notice of 100 s.
    """
    _, machine, operator, volume = world
    recipe = RECIPE | {"dataset": str(volume / "words.txt")}
    file = tmp_path / "emptied.yaml"
    file.write_text(yaml.safe_dump(RECIPE | {"dataset": "/data/words.txt"}))
    # 90 s of the notice are left when the ranks get the order to save.
    flags = ["--faults", "slow@rank=0,step=15,phase=data,seconds=15", "--timeout_s", "300"]
    flags += ["--spares", "0", "--placement_timeout_s", "300", "--hang_timeout", "0"]
    flags += ["--workers", "2", "--device", "cpu"]
    submit = Command("submit", "--config", str(file), *flags)
    submit.wait_for(r"^apply +RayJob emptied$", 100)
    submit.wait_for(r"step +14/60", 300)
    pods = [name for name in list(machine.pods) if re.match(r"emptied-.*-worker-", name)]
    with ThreadPoolExecutor() as threads:
        seconds = list(threads.map(operator.delete_pod, pods))
    assert len(seconds) == 2
    assert max(seconds) < 60, f"{seconds}: they waited for the end of their notice"
    code = submit.finish(300)
    output = "\n".join(submit.lines)
    assert code == 0, output + str(operator.errors)
    assert re.search(r"left after step \d+: its node is being drained, \d+ s left", output), output
    assert "restart  0/3 from the newest checkpoint" in output
    (folder,) = (volume / "runs").glob("emptied-*/*")
    events = [json.loads(line) for line in (folder / "faults.jsonl").read_text().splitlines()]
    drained = [event for event in events if event.get("cause") == "drained"]
    assert [(e["recovery"], e["steps_repeated"]) for e in drained] == [("restart", 0)], events
    assert_as_here(folder, tmp_path, recipe, 2)
    assert operator.errors == []
    assert run("stop", "emptied", "--delete")[0] == 0


@pytest.mark.full
def test_a_plain_script_and_its_folder_run_in_pods(
    world: tuple[ApiServer, Machine, Operator, Path], tmp_path: Path
) -> None:
    """`nanoray kube submit -- train.py`: the losses that torchrun prints, and what it writes stays."""
    _, _, operator, volume = world
    (tmp_path / "mine").mkdir()
    script = tmp_path / "mine" / "train.py"
    script.write_text("import plain_ddp\nplain_ddp.__name__ = '__main__'\nplain_ddp.main()\n")
    plain = commands.ROOT / "tests" / "harness" / "plain_ddp.py"
    (tmp_path / "mine" / "plain_ddp.py").write_text(
        plain.read_text().replace(
            "    dist.destroy", "    open('saved', 'a').write('x')\n    dist.destroy"
        )
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    here = subprocess.run([*torchrun, str(plain)], capture_output=True, text=True, timeout=240)

    flags = ["--workers", "2", "--device", "cpu", "--name", "mine"]
    words = ["train.py", "--epochs", "2", "--fault", "raise"]
    submit = Command("submit", *flags, "--", *words, cwd=script.parent)
    code = submit.finish(300)
    output = "\n".join(submit.lines)
    assert code == 0, output + str(operator.errors)
    assert "2 files, " in next(line for line in submit.lines if line.startswith("send   "))
    assert "restart  1 of 3: all ranks" in output, "rank 1 has failed once"
    epochs = [line for line in submit.lines if line.startswith("epoch")]
    assert epochs[-2:] == [line for line in here.stdout.splitlines() if line.startswith("epoch")]

    (saved,) = volume.glob("code/mine-*/saved")
    assert saved.read_text() == "xx"
    (logs,) = volume.glob("runs/mine-*/*/logs")
    assert sorted(path.name for path in logs.glob("*.log")) == ["rank0.log", "rank1.log"]
    assert run("stop", "mine", "--delete")[0] == 0
    assert operator.errors == []


def statefulset(
    tmp_path: Path, text: Path, recipe: dict[str, Any]
) -> tuple[str, dict[str, Any], Path]:
    """The manifest's command with another recipe, the manifest, and a volume with the recipe and
    its text.
    """
    if reason := missing():
        pytest.skip(reason)
    (thing,) = [o for o in build(KUBE_DIR / "statefulset") if o["kind"] == "StatefulSet"]
    container = thing["spec"]["template"]["spec"]["containers"][0]
    assert container["command"] == ["/bin/bash", "-c"]
    flags = "--config /data/recipe.yaml --dataset /data/words.txt"
    command = container["args"][0].replace("--preset shakespeare-cpu", flags)
    assert command != container["args"][0]
    volume = tmp_path / "volume"
    volume.mkdir()
    (volume / "words.txt").write_text(text.read_text())
    (volume / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return command, thing, volume


def start_ranks(machine: Machine, command: str, thing: dict[str, Any]) -> list[RunningPod]:
    """One pod per ordinal, with the manifest's environment."""
    container = thing["spec"]["template"]["spec"]["containers"][0]
    for ordinal in range(thing["spec"]["replicas"]):
        env = {item["name"]: item.get("value", str(ordinal)) for item in container["env"]}
        name = f"{thing['metadata']['name']}-{ordinal}"
        machine.start(name, command, env, 2**28, (f"{name}.{thing['spec']['serviceName']}",))
    return list(machine.pods.values())


@pytest.mark.full
def test_the_statefulset_trains_without_ray(tmp_path: Path, text: Path) -> None:
    """Three pods with the manifest's command and environment; ranks from ordinals, rank 0 by its
    name.
    """
    recipe = RECIPE | {"max_steps": 12}
    command, thing, volume = statefulset(tmp_path, text, recipe)
    with Machine(volume) as machine:
        pods = start_ranks(machine, command, thing)
        until(lambda: all("done; idle" in p.log for p in pods), 300, "\n".join(p.log for p in pods))
        (folder,) = (volume / "runs" / "statefulset").iterdir()
        assert_as_here(folder, tmp_path, recipe | {"dataset": str(volume / "words.txt")}, 3)
        assert pods[0].terminate(grace_s=60) < 60, "an idle pod ends at once"


# What the operator would generate for the other overlays, without starting it.

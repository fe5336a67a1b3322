"""kuberay/torchrun, run: one pod in which torchrun starts three ranks; trained to the end, and
stopped by a SIGTERM.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from nanoray.kube.kustomize import quantity
from nanoray.kube.render import KUBE_DIR
from tests.cluster.test_kube_pods import RECIPE, assert_as_here, until
from tests.harness.manifests import build
from tests.harness.pods import Machine, RunningPod, missing


def start(machine: Machine, text: Path, recipe: dict[str, Any]) -> RunningPod:
    """Start the Job's pod with its own command, environment and /dev/shm, and another recipe."""
    objects = build(KUBE_DIR / "torchrun")
    (job,) = [o for o in objects if o["metadata"]["name"] == "nanoray-torchrun"]
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    env = {item["name"]: item["value"] for item in container["env"]}
    for source in container["envFrom"]:
        (values,) = [
            o["data"] for o in objects if o["metadata"]["name"] == source["configMapRef"]["name"]
        ]
        env |= values
    (machine.volume / "words.txt").write_text(text.read_text())
    (machine.volume / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    words = [*container["command"], *container["args"]]
    i = words.index("--preset=shakespeare-cpu")
    words[i : i + 1] = ["--config=/data/recipe.yaml", "--dataset=/data/words.txt"]
    shm = next(v["emptyDir"]["sizeLimit"] for v in pod["volumes"] if "emptyDir" in v)
    return machine.start("torchrun", f"exec {shlex.join(words)}", env, int(quantity(shm)))


@pytest.fixture
def machine(tmp_path: Path) -> Any:
    if reason := missing():
        pytest.skip(reason)
    volume = tmp_path / "volume"
    volume.mkdir()
    with Machine(volume) as machine:
        yield machine


def ranks_of(pod: RunningPod) -> list[int]:
    """The pids, on this machine, of the pod's processes with a rank."""
    found, own = [], os.readlink(f"/proc/{pod.init}/ns/pid")
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (
                os.readlink(folder / "ns" / "pid") == own
                and b"\0RANK=" in (folder / "environ").read_bytes()
            ):
                words = (folder / "cmdline").read_bytes().split(b"\0")
                found += [int(folder.name)] if b"nanoray.train" in words else []
        except OSError:
            continue
    return found


@pytest.mark.full
def test_three_ranks_in_one_pod_train_and_a_killed_one_costs_a_restart(
    machine: Machine, text: Path, tmp_path: Path
) -> None:
    """A rank is killed in mid-run: torchrun restarts all three from the newest checkpoint, and no
    loss changes.
    """
    recipe = RECIPE | {"max_steps": 40, "faults": "kill@rank=1,step=25,phase=forward"}
    pod = start(machine, text, recipe)
    until(lambda: not pod.alive, 200, pod.log)
    assert pod._process.returncode == 0, pod.log
    assert "3 rank(s) = dp 3 · backend gloo" in pod.log
    (folder,) = (machine.volume / "runs" / "torchrun").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["exit_reason"], summary["restarts"]) == ("finished", 1)
    assert '"kind": "kill"' in (folder / "faults.jsonl").read_text(), "the fault fired"
    plain = RECIPE | {"max_steps": 40, "dataset": str(machine.volume / "words.txt")}
    assert_as_here(folder, tmp_path, plain, 3)


@pytest.mark.full
def test_the_pod_checkpoints_at_sigterm(machine: Machine, text: Path) -> None:
    """The kubelet's SIGTERM reaches torchrun, which is the container's first process, and through
    it every rank.
    """
    pod = start(
        machine, text, RECIPE | {"max_steps": 100000, "checkpoint_every": 0, "log_every": 10}
    )
    until(lambda: "step     50/" in pod.log, 200, pod.log)
    assert len(ranks_of(pod)) == 3
    os.kill(pod.init, signal.SIGTERM)
    until(lambda: not pod.alive, 100, pod.log)
    (folder,) = (machine.volume / "runs" / "torchrun").iterdir()
    assert json.loads((folder / "summary.json").read_text())["exit_code"] == 143
    (checkpoint,) = (folder / "checkpoints").iterdir()
    assert int(re.sub(r"\D", "", checkpoint.name)) > 50

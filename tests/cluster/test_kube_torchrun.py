"""kuberay/torchrun, run: one pod in which torchrun starts three ranks; trained to the end, and
stopped by a SIGTERM.
"""

from __future__ import annotations

import json
import shlex
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
    objects = build(KUBE_DIR / "namespace") + build(KUBE_DIR / "torchrun")
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

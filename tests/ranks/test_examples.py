"""The examples on CIFAR-10 run as they are, on generated images, shortened by flags."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.harness.commands import run

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "examples" / "scripts").glob("*.sh"))
SHORT = (
    "--resnet_depth",
    "8",
    "--global_batch_size",
    "32",
    "--max_steps",
    "4",
    "--warmup_steps",
    "1",
)
SHORT += (
    "--eval_every",
    "4",
    "--eval_samples",
    "50",
    "--dataset",
    "cifar10-generated",
    "--log_every",
    "1",
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def scripts() -> list[Any]:
    """Without `full`, the script that trains with fsdp; the others differ in that flag alone."""
    found = []
    for path in SCRIPTS:
        marks = () if "fsdp" in path.stem else pytest.mark.full
        found.append(pytest.param(path, marks=marks, id=path.stem))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("script", scripts())
def test_a_script_trains_two_ranks_under_torchrun(
    script: Path, cache: Path, tmp_path: Path, forked: dict[str, str]
) -> None:
    env = (
        {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | forked | {"RANKS": "2"}
    )
    command = ["bash", str(script), *SHORT, "--device", "cpu", "--data_dir", str(cache)]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 rank(s) = dp 2 · backend gloo" in done.stdout
    assert "cifar10-generated: patterns of 10 classes under noise" in done.stdout
    assert "16 images × 1 accum × 2 dp = 32 images/step" in done.stdout
    assert re.search(r"step 4/4 \| loss \d\.\d+ \| val \d\.\d+ \| accuracy \d+\.\d %", done.stdout)
    assert "nanoray.sample" not in done.stdout, "a resnet makes no text"
    (folder,) = (tmp_path / "runs").iterdir()
    config = json.loads((folder / "config.json").read_text())
    assert config["dp_mode"] == "ddp" if "ddp" in script.stem else config["dp_mode"] != "ddp"
    assert config["nesterov"] is True
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["samples_per_sec"] > 0
    assert summary["tok_per_sec"] is None
    sampled = run("nanoray.sample", str(folder), cwd=tmp_path)
    assert sampled.returncode != 0
    assert "this checkpoint is of a resnet, which classifies images" in sampled.stderr


@pytest.mark.slow
def test_train_cifar10_plans_its_epochs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On no machine: a dry run of the whole recipe, without a network."""
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    script = str(ROOT / "examples" / "train_cifar10.py")
    done = run(
        script,
        "--dry_run",
        "--device",
        "cpu",
        "--workers",
        "2",
        "--ray_address",
        "10.0.0.1:6379",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "(CIFAR-10 is not cached and the download failed: " in done.stdout
    assert (
        "64 images × 1 accum × 2 dp = 128 images/step, 3,907 steps = 500,096 images" in done.stdout
    )
    assert "269,722 parameters" in done.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_is_executable_and_stops_at_an_error(script: Path) -> None:
    assert os.access(script, os.X_OK)
    assert "set -euo pipefail" in script.read_text()

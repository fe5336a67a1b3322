"""The examples on CIFAR-10 and on GPT-2 run as they are, shortened by flags."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanoray.cli.checkpoint import main as checkpoint
from nanoray.cli.weights import main as weights
from tests.harness.commands import run
from tests.harness.foreign import written_gpt2

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "examples" / "scripts").glob("*.sh"))
SHORT = (
    "--resnet_depth",
    "8",
    "--micro_batch_size",
    "16",
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


@pytest.mark.full
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
    assert "nanoray sample" not in done.stdout, "a resnet makes no text"
    (folder,) = (tmp_path / "runs").iterdir()
    config = json.loads((folder / "config.json").read_text())
    assert config["dp_mode"] == "ddp" if "ddp" in script.stem else config["dp_mode"] != "ddp"
    assert config["nesterov"] is True
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["samples_per_sec"] > 0
    assert summary["tok_per_sec"] is None
    sampled = run("nanoray", "sample", str(folder), cwd=tmp_path)
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


def gpt2_and_tokens(folder: Path) -> None:
    """Make weights of a GPT-2, small and random but of the real vocabulary, and a folder of tokens:
    GPT-2's tokenizer would be a download.
    """
    written_gpt2(folder / "gpt2", vocab_size=50257)
    assert weights([str(folder / "gpt2"), "--out", str(folder / "gpt2.safetensors")]) == 0
    tokens = np.random.default_rng(0).integers(0, 50257, 4000).astype(np.uint16)
    data = folder / "data"
    data.mkdir()
    for split in ("train", "val"):
        tokens.tofile(data / f"{split}.bin")
    meta = {"tokenizer": {"kind": "gpt2"}, "dtype": "uint16"}
    (data / "meta.json").write_text(json.dumps(meta))


FINETUNE = str(ROOT / "examples" / "finetune_gpt2.py")


@pytest.mark.slow
def test_finetune_gpt2_plans_its_run(tmp_path: Path) -> None:
    gpt2_and_tokens(tmp_path)
    flags = ("--dataset", "data", "--workers", "2", "--device", "cpu", "--dry_run")
    done = run(FINETUNE, *flags, "--block_size", "16", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"init   the weights of {tmp_path / 'gpt2.safetensors'}: 2 layers" in done.stdout
    assert "the first 16 of 24 positions" in done.stdout

    # Without the file: what to do, and nothing started
    done = run(FINETUNE, "--init_from", "gpt2-medium", cwd=tmp_path)
    assert done.returncode == 2
    assert "make one: `nanoray checkpoint import PATH --out FILE.safetensors`" in done.stderr


@pytest.mark.full
def test_finetune_gpt2_trains_on_ray_and_gives_the_weights_back(
    tmp_path: Path, forked_ray: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    gpt2_and_tokens(tmp_path)
    flags = ["--dataset", "data", "--max_steps", "2", "--eval_every", "2", "--block_size", "16"]
    flags += ["--sample_tokens", "0", "--global_batch_size", "4", "--tensorboard", "false"]
    env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    done = run(
        FINETUNE, *flags, "--workers", "2", "--device", "cpu", cwd=tmp_path, env=env | forked_ray
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"init   the weights of {tmp_path / 'gpt2.safetensors'}: 2 layers" in done.stdout
    (folder,) = (tmp_path / "runs").iterdir()
    config = json.loads((folder / "config.json").read_text())
    assert (config["gelu"], config["bias"], config["n_embd"]) == ("tanh", True, 32)
    assert config["init_from"] == str(tmp_path / "gpt2.safetensors")
    # The commands that its text shows
    out = tmp_path / "finetuned"
    assert checkpoint(["export", str(folder), "--format", "huggingface", "--out", str(out)]) == 0
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == 50256

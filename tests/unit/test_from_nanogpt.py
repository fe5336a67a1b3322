"""examples/from_nanogpt.py: a configuration of nanoGPT becomes a YAML file that nanoray takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from nanoray.config import Config, load_config, resolve_batch

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "from_nanogpt.py"

# What such files look like: a comment, arithmetic, settings of the tracker
CHAR = """
# a small model of characters
import time
out_dir = 'out-char'
eval_interval = 250  # often
eval_iters = 200
log_interval = 10
always_save_checkpoint = False
wandb_log = False
wandb_run_name = 'chars-' + str(time.time())
dataset = 'shakespeare_char'
gradient_accumulation_steps = 2 * 2
batch_size = 64
block_size = 256
n_layer = 6
n_head = 6
n_embd = 6 * 64
dropout = 0.2
learning_rate = 1e-3
max_iters = 5000
lr_decay_iters = max_iters
min_lr = learning_rate / 10
beta2 = 0.99
warmup_iters = 100
"""


def convert(tmp_path: Path, text: str) -> subprocess.CompletedProcess[str]:
    file = tmp_path / "train_char.py"
    file.write_text(text)
    command = [sys.executable, str(SCRIPT), str(file)]
    return subprocess.run(command, capture_output=True, text=True)


def load(tmp_path: Path, text: str) -> Config:
    done = convert(tmp_path, text)
    assert done.returncode == 0, done.stderr
    yaml = tmp_path / "train_char.yaml"
    yaml.write_text(done.stdout)
    return load_config(str(yaml))


def test_each_setting_has_its_counterpart(tmp_path: Path) -> None:
    config = load(tmp_path, CHAR)
    wanted: dict[str, Any] = {
        "name": "train_char",
        "out_dir": "out-char",
        "dataset": "shakespeare",
        "tokenizer": "char",
        "n_layer": 6,
        "n_head": 6,
        "n_embd": 384,
        "block_size": 256,
        "dropout": 0.2,
        "bias": False,
        "micro_batch_size": 64,
        "global_batch_size": 256,
        "max_steps": 5000,
        "stop_at": 0,
        "lr": 1e-3,
        "min_lr": 1e-4,
        "schedule": "cosine",
        "warmup_steps": 100,
        "weight_decay": 0.1,
        "beta1": 0.9,
        "beta2": 0.99,
        "grad_clip": 1.0,
        "eval_every": 250,
        "eval_samples": 200 * 64,
        "checkpoint_every": 250,
        "log_every": 10,
        # Chosen for the device, which the file does not name
        "precision": "auto",
        "compile": False,
        "device": "auto",
    }
    assert {key: getattr(config, key) for key in wanted} == wanted
    # As there, a step has as many sequences on one rank and on four
    batches = [resolve_batch(config, ranks) for ranks in (1, 2, 4)]
    assert batches == [(64, 4, 1), (64, 2, 2), (64, 1, 4)]
    printed = convert(tmp_path, CHAR).stdout
    assert "# always_save_checkpoint = False has no counterpart\n" in printed
    assert "# wandb_run_name = 'chars-" in printed

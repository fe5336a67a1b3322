"""Print a configuration of nanoGPT as a YAML file for nanoray.

    python examples/from_nanogpt.py config/train_gpt2.py > run.yaml
    nanoray train --config run.yaml

The file is run, as nanoGPT's train.py runs it. What it does not set has nanoGPT's default. Settings
that have no counterpart are comments at the end.
"""

import runpy
import sys
from typing import Any

import yaml

# Settings that mean the same in both: nanoGPT's name, ours, and nanoGPT's default
SAME = {
    "out_dir": ("out_dir", "out"),
    "n_layer": ("n_layer", 12),
    "n_head": ("n_head", 12),
    "n_embd": ("n_embd", 768),
    "bias": ("bias", False),
    "block_size": ("block_size", 1024),
    "dropout": ("dropout", 0.0),
    "batch_size": ("micro_batch_size", 12),
    "learning_rate": ("lr", 6e-4),
    "weight_decay": ("weight_decay", 0.1),
    "beta1": ("beta1", 0.9),
    "beta2": ("beta2", 0.95),
    "grad_clip": ("grad_clip", 1.0),
    "log_interval": ("log_every", 1),
    "eval_interval": ("eval_every", 2000),
}
# Settings that are translated below, and nanoGPT's defaults
OTHERS = {
    "gradient_accumulation_steps": 40,
    "max_iters": 600_000,
    "lr_decay_iters": 600_000,
    "warmup_iters": 2000,
    "min_lr": 6e-5,
    "decay_lr": True,
    "eval_iters": 200,
    "eval_only": False,
    "dataset": "openwebtext",
    "init_from": "scratch",
    "wandb_log": False,
}
# Settings of the machine: nanoray chooses for this machine what the file does not set
MACHINE = ("device", "dtype", "compile", "backend")
PRECISION = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}

# Texts that nanoray has itself, and the tokenizers of nanoGPT's prepare.py
TEXTS = {"shakespeare_char": "char", "shakespeare": "gpt2"}


def main() -> None:
    """Print the YAML file."""
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    found = settings_of(sys.argv[1])
    keys = translate(found)
    print(yaml.safe_dump(keys, sort_keys=False), end="")
    for name, value in found.items():
        if name not in SAME and name not in OTHERS and name not in MACHINE:
            print(f"# {name} = {value!r} has no counterpart")


def settings_of(path: str) -> dict[str, Any]:
    """Run a configuration, and return the numbers and texts that it sets."""
    values = runpy.run_path(path)
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, bool | int | float | str) and not name.startswith("_")
    }


def translate(found: dict[str, Any]) -> dict[str, Any]:
    """Return keys of nanoray for the settings of a file."""
    defaults: dict[str, Any] = {name: default for name, (_, default) in SAME.items()}
    settings = defaults | OTHERS | found
    if settings["eval_only"]:
        raise SystemExit("eval_only = True trains nothing")
    keys = {key: settings[name] for name, (key, _) in SAME.items()}

    # nanoGPT divides gradient_accumulation_steps by the number of ranks
    keys["global_batch_size"] = settings["batch_size"] * settings["gradient_accumulation_steps"]
    # It evaluates random samples, and saves after an evaluation
    keys["eval_samples"] = settings["eval_iters"] * settings["batch_size"]
    keys["checkpoint_every"] = settings["eval_interval"]
    if settings["wandb_log"]:
        keys["track"] = "wandb"
    keys |= schedule(settings)
    keys |= machine(found)

    # Data: a text that nanoray has, or the folder of nanoGPT's prepare.py
    name = settings["dataset"]
    keys["dataset"] = f"data/{name}"
    if name in TEXTS:
        keys |= {"dataset": "shakespeare", "tokenizer": TEXTS[name]}

    # Weights decide the sizes
    start = settings["init_from"]
    if start == "resume":
        keys["resume"] = "auto"
    elif start != "scratch":
        for size in ("n_layer", "n_head", "n_embd", "bias"):
            del keys[size]
        if "block_size" not in found:
            del keys["block_size"]
        # Of `nanoray checkpoint import gpt2 --out gpt2.safetensors`
        keys["init_from"] = f"{start}.safetensors"
    return keys


def schedule(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of the learning rate, and of the length of the run."""
    steps = settings["max_iters"]
    if not settings["decay_lr"]:
        return {"max_steps": steps, "schedule": "constant", "warmup_steps": 0, "min_lr": 0.0}
    decay = settings["lr_decay_iters"]
    if decay < steps:
        raise SystemExit(
            f"lr_decay_iters = {decay} is below max_iters = {steps}, and a schedule of nanoray ends "
            "with its run; make them equal"
        )
    keys = {
        "max_steps": decay,
        "schedule": "cosine",
        "warmup_steps": settings["warmup_iters"],
        "min_lr": settings["min_lr"],
    }
    # The learning rate may still fall when the run ends
    if steps < decay:
        keys["stop_at"] = steps
    return keys


def machine(found: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of the machine that a file sets."""
    keys: dict[str, Any] = {name: found[name] for name in ("compile", "backend") if name in found}
    if "dtype" in found:
        keys["precision"] = PRECISION[found["dtype"]]
    if "device" in found:
        # Of cuda:0, a rank chooses its own GPU
        keys["device"] = found["device"].partition(":")[0]
    # On a CPU nanoGPT computes in float32, whatever dtype says
    if keys.get("device") == "cpu":
        keys["precision"] = "fp32"
    return keys


if __name__ == "__main__":
    main()

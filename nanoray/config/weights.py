"""A file of weights that a run begins with: what its header says, read without torch.

`nanoray checkpoint import` and `nanoray checkpoint export` write such files.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from nanoray.errors import ConfigError

_MAKE = (
    "make one: `nanoray checkpoint import PATH --out FILE.safetensors` of a GPT-2 of Hugging Face or "
    "nanoGPT, `nanoray checkpoint export RUN --out FILE.safetensors` of a run"
)


@dataclass(frozen=True)
class WeightsFile:
    """Weights on disk, described without reading them."""

    path: Path  # absolute
    shape: dict[str, Any]  # as ModelShape.to_dict
    tokenizer: dict[str, Any]  # of the tokens that they were trained on; {}: not known

    @property
    def keys(self) -> dict[str, Any]:
        """The keys of the configuration that the weights fix."""
        shape = self.shape
        keys = {key: shape[key] for key in ("n_layer", "n_head", "n_embd", "block_size", "bias")}
        keys["gelu"] = shape.get("gelu", "exact")
        keys["positions"] = "rotary" if shape.get("rotary") else "learned"
        keys["experts"] = shape.get("experts", 0)
        if keys["experts"]:
            for key in ("experts_per_token", "expert_hidden", "shared_experts"):
                keys[key] = shape[key]
        return keys


def find(text: str) -> WeightsFile:
    """Return what the value of init_from names. Raises ConfigError."""
    path = Path(os.path.abspath(os.path.expanduser(text)))
    if not path.exists():
        raise ConfigError(f"init_from = {text}: there is no such file; {_MAKE}")
    if not path.is_file():
        raise ConfigError(f"init_from = {text} is a folder, and weights are one file; {_MAKE}")
    try:
        with safe_open(path, "np") as file:
            header = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"init_from = {text} cannot be read ({error}); {_MAKE}") from None
    # A script's own model has another shape, or none
    shape = json.loads(header.get("model_shape") or "{}")
    if "n_layer" not in shape:
        raise ConfigError(f"init_from = {text} has no shape of a gpt in its header; {_MAKE}")
    return WeightsFile(path, shape, json.loads(header.get("tokenizer", "{}")))

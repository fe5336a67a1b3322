"""nanoray: train nanoGPT on many accelerators with raw PyTorch DDP on Ray, nothing hidden."""

from typing import Any

__version__ = "0.1.0"

# The public names, and the modules that define them. Those import torch.
_EXPORTED = {
    "RuntimeEngine": "nanoray.train.own.engine",
    "Callback": "nanoray.train.own.callbacks",
    "Run": "nanoray.train.own.run",
    "Config": "nanoray.config",
    "Weighted": "nanoray.models.weighted",
    "ShardStream": "nanoray.data.stream",
}


def __getattr__(name: str) -> Any:
    """Import the public names on first use, so that `import nanoray` needs no torch and no ray."""
    from importlib import import_module

    if name in _EXPORTED:
        return getattr(import_module(_EXPORTED[name]), name)
    if name == "launch":  # a package that is also callable: nanoray.launch(...)
        return import_module("nanoray.launch")
    raise AttributeError(f"module nanoray has no attribute {name}")

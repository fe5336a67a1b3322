"""The devices that Ray has given to this process. Imports nothing of nanoray: each rank's actor waits for it."""

from __future__ import annotations

import os
from typing import Any

import ray


def bound_devices(api: Any = ray) -> list[str]:
    """Return the ids of this process's GPUs or MIG slices; without any, hide every GPU from it."""
    ids = [str(i) for i in api.get_gpu_ids()]
    if not ids:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # otherwise an actor without GPUs sees all of them
    return ids

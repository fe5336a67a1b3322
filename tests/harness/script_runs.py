"""What the tests of a script's own model share: a small run, and what it has saved."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nanoray.checkpoint.run_folder import RunSpec
from tests.harness.axes import final

SETTINGS: dict[str, Any] = {
    "global_batch_size": 12,
    "micro_batch_size": 0,
    "log_every": 1,
    "tensorboard": False,
    "checkpoint_every": 0,
    "timeout_s": 20,
    "init_timeout_s": 20,
}


def final_tensors(spec: RunSpec) -> dict[str, Tensor]:
    """Return weights and optimizer state of a run's newest checkpoint; none is damaged."""
    state = final(spec)
    return state.model | state.optimizer

"""The record of a logged step, and the outcome of a run, as plain data."""

from __future__ import annotations

import math
import resource
import sys
from dataclasses import dataclass
from typing import Any

import torch

from nanoray.checkpoint.run_folder import RunSpec, disk_used
from nanoray.checkpoint.state.train_state import TrainState
from nanoray.models.precision import LossScaler
from nanoray.models.workload import Workload
from nanoray.observe.watch.observers import now
from nanoray.parallel.mesh import Mesh
from nanoray.train.guard.guards import Guards


@dataclass(frozen=True)
class StepRecorder:
    """Collects the values of a logged step that need no instrument."""

    spec: RunSpec
    mesh: Mesh
    state: TrainState
    guards: Guards
    scaler: LossScaler
    workload: Workload

    def values(
        self, loss: float, lr: float | None, grad_norm: float, regular: bool
    ) -> dict[str, Any]:
        """Return the record of the newest step; see docs/metrics.md for its keys.

        `regular` is False for the first or last step of a command between two regular records: its
        loss stays out of the moving average. Raises TrainingDiverged when the fp16 loss scale is
        exhausted.
        """
        state = self.state
        values: dict[str, Any] = {
            "step": state.step,
            "attempt": self.spec.attempt,
            "fault/restarts": self.spec.attempt,
            "time": now(),
            self.workload.total_name: state.samples * self.workload.tokens_per_sample,
            "mem/peak_gib": peak_memory_bytes(self.mesh.device) / 2**30,
        }
        if lr is not None:  # some optimizers have none
            values["train/lr"] = lr
        values |= disk_used(self.spec.folder)
        values |= self.guards.metrics()
        if self.scaler.enabled:
            scale = self.scaler.read(state.step)
            values["train/loss_scale"] = scale.scale
            values["train/skipped_steps"] = scale.skipped
            values["train/good_steps"] = scale.good

        # JSON has no word for NaN: such a loss is left out of the record.
        if math.isfinite(loss):
            state.see_loss(loss, smooth=regular)
            values["train/loss"] = loss
        if state.scalars.loss_ema is not None:
            values["train/loss_ema"] = state.scalars.loss_ema

        # With fp16 an overflow is normal, and its norm is recorded as 0.
        if math.isfinite(grad_norm):
            values["train/grad_norm"] = grad_norm
        elif self.scaler.enabled:
            values["train/grad_norm"] = 0.0
        return values


def outcome(
    mesh: Mesh,
    state: TrainState,
    precision: str,
    resumed_from: str,
    exit_reason: str,
    summary: dict[str, Any],
) -> dict[str, Any]:
    """Return the results of a run. `summary` contains the values of the instruments."""
    return {
        "exit_reason": exit_reason,
        "step": state.step,
        "train_loss": state.scalars.loss,
        "loss_ema": state.scalars.loss_ema,
        "val_loss": state.scalars.val_loss,
        "train_s": state.scalars.train_s,
        "first_step_s": state.session.first_step_s,
        "world_size": mesh.world_size,
        "backend": mesh.backend,
        "backend_reason": mesh.backend_reason,
        "device": str(mesh.device),
        "precision": precision,
        "resumed_from": resumed_from or None,
        "steps_before": state.session.begun,
        "comm": None,  # of a run that traces its collectives: see watch/tracing.py
        # torch has a class for its version; to unpickle that the driver would import torch.
        "torch": str(torch.__version__),
        **summary,
    }


def peak_memory_bytes(device: torch.device) -> int:
    """Return the largest memory so far: allocated on a GPU, or resident on the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # macOS counts bytes, Linux KiB.
    return peak if sys.platform == "darwin" else peak * 1024

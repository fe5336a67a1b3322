"""Training speed: the time between two logged steps, without evaluations and checkpoints."""

from __future__ import annotations

import time
from typing import Any

from nanoray.checkpoint.state.train_state import TrainState
from nanoray.data.tokens import MicroBatches
from nanoray.machine.metrics import mfu_percent
from nanoray.models.workload import Workload


class Throughput:
    """Times windows of steps. A window ends at each logged step.

    The window that ends with the first step of a command is not counted: that step is slower.
    """

    def __init__(self, workload: Workload, batches: MicroBatches, state: TrainState) -> None:
        """Measure in the units of `workload`; without its peak_flops there is no MFU."""
        self._workload = workload
        self._batches = batches
        self._state = state
        self._tokens_per_step = batches.batch.global_size * workload.tokens_per_sample
        self._rate = f"{workload.unit}_per_sec"
        self._begin_window()

    def _begin_window(self) -> None:
        self._since = time.perf_counter()
        self._first_step = self._state.step
        self._data_s = self._batches.seconds  # the time spent on reading data so far

    def begin_run(self) -> None:
        """Begin a window: warm-up and recovery are no training time."""
        self._begin_window()

    def pause(self, seconds: float) -> None:
        """Leave `seconds` out of the window."""
        self._since += seconds

    def left_out(self) -> None:
        """Begin a new window: a step without an update may have gone back to a checkpoint."""
        self._begin_window()

    def measured(self) -> dict[str, Any]:
        """End the window, add it to the run's clock, and return its metrics."""
        elapsed_s = time.perf_counter() - self._since
        steps = self._state.step - self._first_step
        waited_s = self._batches.seconds - self._data_s
        self._begin_window()
        if self._state.session.first_step_s is None:
            return {}

        scalars = self._state.scalars
        scalars.train_s += elapsed_s
        scalars.timed_steps += steps

        tokens_per_s = self._tokens_per_step * steps / elapsed_s
        speed = {
            "time/step_ms": 1e3 * elapsed_s / steps,
            "time/data_ms": 1e3 * waited_s / steps,
            "time/train_s": scalars.train_s,
            f"perf/{self._rate}": tokens_per_s,
        }
        flops = self._workload.flops_per_token
        peak = self._workload.peak_flops
        if flops and peak:
            speed["perf/mfu"] = mfu_percent(tokens_per_s, flops, peak)
        return speed

    def summary(self) -> dict[str, Any]:
        """Return tok_per_sec (or samples_per_sec) and step_ms over all timed steps of the run."""
        scalars = self._state.scalars
        if not scalars.train_s:
            return {self._rate: None, "step_ms": None}
        return {
            self._rate: self._tokens_per_step * scalars.timed_steps / scalars.train_s,
            "step_ms": 1e3 * scalars.train_s / scalars.timed_steps,
        }

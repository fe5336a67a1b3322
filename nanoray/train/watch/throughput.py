"""Training speed: the time between two logged steps, without the pauses for evaluation and
checkpoints.
"""

from __future__ import annotations

import time

from nanoray.metrics import mfu_percent
from nanoray.state import Scalars


class Throughput:
    """Times windows of steps. A window ends at each logged step; the first one, which also warms
    up, is not counted.
    """

    def __init__(
        self,
        tokens_per_step: int,
        flops_per_token: float | None,
        peak_flops: float | None,
        unit: str = "tok",
    ) -> None:
        """`peak_flops` is that of all ranks together; None for an unknown device, which has no MFU.

        With the unit `samples` a sample counts as one token, and the metrics say so.
        """
        self._tokens, self._flops, self._peak = tokens_per_step, flops_per_token, peak_flops
        self.rate_name = f"perf/{unit}_per_sec"
        self.total_name = "train/samples" if unit == "samples" else "train/tokens"
        self.restart(0.0)

    def restart(self, data_s: float) -> None:
        """Begin a window now. `data_s` is the time spent on reading data so far."""
        self._since, self._steps, self._data_s = time.perf_counter(), 0, data_s

    def step(self) -> None:
        """Count a completed step."""
        self._steps += 1

    def pause(self, seconds: float) -> None:
        """Leave `seconds` out of the window."""
        self._since += seconds

    def window(self, scalars: Scalars, data_s: float, counted: bool) -> dict[str, float]:
        """End the window, add it to the run's clock and return its metrics; an empty dict unless
        `counted`.
        """
        elapsed_s, steps, waited_s = (
            time.perf_counter() - self._since,
            self._steps,
            data_s - self._data_s,
        )
        self.restart(data_s)
        if not counted:
            return {}
        scalars.train_s, scalars.timed_steps = (
            scalars.train_s + elapsed_s,
            scalars.timed_steps + steps,
        )
        tok_per_sec = self._tokens * steps / elapsed_s
        speed = {
            "time/step_ms": 1e3 * elapsed_s / steps,
            "time/data_ms": 1e3 * waited_s / steps,
            "time/train_s": scalars.train_s,
            self.rate_name: tok_per_sec,
        }
        if self._peak and self._flops:
            speed["perf/mfu"] = mfu_percent(tok_per_sec, self._flops, self._peak)
        return speed

    def of_run(self, scalars: Scalars) -> dict[str, float | None]:
        """Return tok_per_sec (or samples_per_sec) and step_ms over all timed steps of the run, for
        its summary.
        """
        rate = self.rate_name.removeprefix("perf/")
        if not scalars.train_s:
            return {rate: None, "step_ms": None}
        return {
            rate: self._tokens * scalars.timed_steps / scalars.train_s,
            "step_ms": 1e3 * scalars.train_s / scalars.timed_steps,
        }

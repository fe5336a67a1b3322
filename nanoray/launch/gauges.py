"""The gauges of a run in Ray's metrics, which Prometheus reads."""

from __future__ import annotations

import time
from typing import Any

from ray.util.metrics import Gauge

from nanoray.machine.metrics import METRICS

HOLD_S = 1.0  # Ray exports a gauge every 10 s, but only if it was set since the last export


class RayMetrics:
    """Exports the run's metrics as gauges `ray_nanoray_<name>` with tags run and rank."""

    def __init__(self, run_name: str, rank: int) -> None:
        self._tags = {"run": run_name, "rank": str(rank)}
        self._gauges: dict[str, Gauge] = {}
        self._newest: dict[str, float] = {}
        self._set_at = 0.0

    def set(self, record: dict[str, Any]) -> None:
        """Set the gauge of each metric in a record of metrics.jsonl."""
        for name in METRICS.keys() & record.keys():
            if name not in self._gauges:
                metric = METRICS[name]
                self._gauges[name] = Gauge(
                    "nanoray_" + name.replace("/", "_"),
                    description=f"{metric.meaning} [{metric.unit}]",
                    tag_keys=("run", "rank"),
                )
            self._gauges[name].set(record[name], tags=self._tags)
            self._newest[name] = record[name]

    def hold(self) -> None:
        """Set all gauges again, at most once in HOLD_S.

        Ray drops a gauge that was not set in two report intervals; records may come less often.
        """
        if time.monotonic() - self._set_at > HOLD_S:
            self._set_at = time.monotonic()
            # A copy: the training thread may add a metric meanwhile.
            for name, value in list(self._newest.items()):
                self._gauges[name].set(value, tags=self._tags)

"""What rank 0 says while it trains, kept until the driver asks."""

from __future__ import annotations

from collections import deque
from typing import Any

from nanoray.launch.gauges import RayMetrics
from nanoray.observe.track.observer import Observer


class MessageQueue(Observer):
    """Keeps rank 0's notes, records and number of steps until the driver polls them, and sets the Ray metrics."""

    def __init__(self, messages: deque[tuple[str, Any]], metrics: RayMetrics) -> None:
        self._messages = messages
        self._metrics = metrics

    def on_length(self, steps: int) -> None:
        self._messages.append(("length", steps))

    def on_note(self, text: str) -> None:
        self._messages.append(("note", text))

    def on_record(self, record: dict[str, Any]) -> None:
        self._messages.append(("record", record))
        self._metrics.set(record)

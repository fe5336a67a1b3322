"""How long a rank has not been called by its driver, and how long it waits for the next call.

    driver calls ─► called_at ─► seconds of silence, less those in which this process was frozen
                                       └─► longer than the patience: stop, save, or end (worker.py)

A rank must end by itself when its driver is gone: Ray ends actors only once the cluster's head has
noticed that their driver is dead, and the head may be gone, too.
"""

from __future__ import annotations

import threading
import time

FROZEN_S = 2.0  # a process that is not frozen reads its clock more often than this


class UnfrozenClock:
    """The monotonic clock without the time in which this process was frozen.

    A paused container or machine, and Ctrl-Z, freeze a process. Answers could not reach it in that
    time, so it must not count as the silence of another process. It has the methods of the module
    `time` that the driver uses. As a context manager it ends its thread.
    """

    def __init__(self) -> None:
        # When the clock was last read, and the seconds frozen until then.
        self._last_reading = (time.monotonic(), 0.0)
        self._over = threading.Event()
        threading.Thread(target=self._read_until_over, daemon=True).start()

    def __enter__(self) -> UnfrozenClock:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _read_until_over(self) -> None:
        while not self._over.wait(FROZEN_S / 4):
            now = time.monotonic()
            # One assignment of a tuple: another thread never sees half of it.
            self._last_reading = (now, self._frozen_s(now))

    def _frozen_s(self, now: float) -> float:
        """Return how many seconds this process has been frozen until `now`."""
        read_at, frozen_s = self._last_reading
        # A longer gap between two readings than FROZEN_S is time in which no thread ran.
        return frozen_s + max(0.0, now - read_at - FROZEN_S)

    def monotonic(self) -> float:
        """Return seconds since some fixed moment: only differences are meaningful."""
        now = time.monotonic()
        return now - self._frozen_s(now)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class DriverSilence:
    """Measures the driver's silence and compares it with a rank's patience."""

    def __init__(self) -> None:
        self._own_time = UnfrozenClock()
        self._called_at = 0.0
        self.note_call()

    def note_call(self, next_within_s: float = 0.0) -> None:
        """Note that the driver called; it will call again once `next_within_s` are over."""
        self._called_at = self.now() + next_within_s

    def now(self) -> float:
        """Return this process's own time in seconds, without the time in which it was frozen."""
        return self._own_time.monotonic()

    def exceeds(self, patience_s: float) -> bool:
        """Return whether the driver has been silent for longer than this rank waits."""
        return self.now() - self._called_at > patience_s

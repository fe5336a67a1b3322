"""Durations from Unix seconds: a host's clock may be set back while a run lasts.

A moment that one process writes for another must be of the host's clock. Between two moments of one
process no such change may count, or the duration is wrong, and negative where the clock goes back.
"""

from __future__ import annotations

import time
from functools import cache


def unix_time() -> float:
    """Return Unix seconds that never go back in this process, also while the machine sleeps."""
    at_first, reading = _first_reading()
    return at_first + time.clock_gettime(time.CLOCK_BOOTTIME) - reading


def seconds_since(started: float) -> float:
    """Return the seconds since a moment of `unix_time`, of this or of another process; never below 0."""
    return max(0.0, unix_time() - started)


@cache
def _first_reading() -> tuple[float, float]:
    """Return what the host's clock said when this process first asked, and its time since the boot."""
    return time.time(), time.clock_gettime(time.CLOCK_BOOTTIME)

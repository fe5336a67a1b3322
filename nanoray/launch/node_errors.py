"""What the nodes of a cluster report to every driver as an error: here it is one line.

When a raylet ends without a signal, as in a pod that was too slow to start, both agents of its node
send the last 20 lines of its log, and Ray prints them all.
"""

from __future__ import annotations

import math
import re
import time
from typing import Any

from nanoray.base.output import say

REPEAT_S = 20.0  # both agents of a node report within a few seconds; a pod starts again later
LONGEST = 200  # characters
# Ids of leases, workers and nodes, pids and ports differ between reports that say the same. An address
# stays: two nodes differ by it.
_IDS = re.compile(r"\b[0-9a-f]{16,}\b|(?<![\d.])\d+(?![\d.]*\d)")


class NodeErrors:
    """Prints errors of nodes, each as one line, and the same one once for several reporters."""

    def __init__(self, clock: Any = time) -> None:
        self._clock = clock
        self._printed_at: dict[str, float] = {}  # line without ids -> monotonic seconds

    def show(self, error: str) -> None:
        """Print an error's first line, unless that was done just now."""
        first, _, rest = error.strip().partition("\n")
        # Ray lists what may end a process in general.
        whole_line = first.partition(" Possible reasons include")[0]
        key = _IDS.sub("#", whole_line)
        now = self._clock.monotonic()
        if now > self._printed_at.get(key, -math.inf) + REPEAT_S:
            line = whole_line[:LONGEST]
            if rest:
                line += " (more in the log of its node, or pod)"
            say(f"ray    a node reports: {line}")
        self._printed_at[key] = now

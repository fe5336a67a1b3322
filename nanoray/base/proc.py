"""Read /proc about a process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


def stat_of(pid: int) -> list[str]:
    """Return a process' fields in /proc, state ppid pgrp ...; empty if it is gone, or a zombie."""
    try:
        # The command's name, in brackets, may contain spaces and brackets.
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
    except (OSError, IndexError):
        return []
    state = fields[0]
    if state in "ZX":  # zombie, dead
        return []
    return fields


def start_time(pid: int) -> str:
    """Return when a living process started, in ticks since boot; "" if it is gone.

    Together with the pid this identifies a process, because pids are used again.
    """
    fields = stat_of(pid)
    return fields[19] if fields else ""


def cpu_seconds(fields: Sequence[str]) -> float:
    """Return the CPU seconds that a process with these fields has used."""
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # utime + stime

"""Read /proc about processes."""

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


def session_members(session: int) -> dict[int, float]:
    """Return the CPU seconds of each living process of a session; empty without /proc."""
    members = {}
    for pid, (its_session, cpu_s) in all_processes().items():
        if its_session == session:
            members[pid] = cpu_s
    return members


def all_processes() -> dict[int, tuple[int, float]]:
    """Return the session and CPU seconds of every living process; empty without /proc."""
    if not os.path.isdir("/proc"):
        return {}
    processes = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        fields = stat_of(int(name))
        if fields:  # else it has ended meanwhile
            processes[int(name)] = (int(fields[3]), cpu_seconds(fields))
    return processes

"""hashes.jsonl: hashes of a run's states, to compare it with another run, or with its replay.

    {"group": step, "ranks": 2, "threads": 1, "config": {...}, ...}      a group continues after step
    {"step": 250, "samples": ..., "losses": [...], "ranks": [...], "tensors": {...}, "differ": {}}

The second kind is written at each comparison of the ranks (--hash_every, and before each
checkpoint), by rank 0: each rank's own loss in this step, a hash of each rank's state after it, and
the hash of each tensor. `differ` contains the ranks that disagree with the others, and for each the
first tensor that differs.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanoray.machine.atomic import append_line, read_json_lines

log = logging.getLogger("nanoray.rank")
NAME = "hashes.jsonl"


@dataclass
class StateHashes:
    """The lines of a run's hashes.jsonl, without those that a resume has made void."""

    groups: list[dict[str, Any]] = field(default_factory=list)  # in the order of their steps
    states: dict[int, dict[str, Any]] = field(default_factory=dict)  # by step


def append(folder: Path, line: dict[str, Any]) -> None:
    """Append a line to a run's file. On a full disk it is left out: the run does not need it."""
    try:
        append_line(folder / NAME, json.dumps(line, allow_nan=False))
    except OSError as error:
        log.warning(
            "%s has no line of step %s: %s",
            NAME,
            line.get("step", line.get("group")),
            error.strerror,
        )


def read(folder: Path) -> StateHashes:
    """Read a run's file; a line of a step that was done again replaces the older one."""
    state_hashes = StateHashes()
    for line in read_json_lines(folder / NAME):
        if "group" in line:
            # The run went back to this step: later states, and groups that began later, are void.
            begun = line["group"]
            states = state_hashes.states
            state_hashes.states = {step: states[step] for step in states if step <= begun}
            groups = [group for group in state_hashes.groups if group["group"] < begun]
            state_hashes.groups = [*groups, line]
        elif "step" in line:
            state_hashes.states[line["step"]] = line
    return state_hashes


def format_hash(value: int) -> str:
    """Return a 64-bit hash as 16 hexadecimal digits."""
    return f"{value % 2**64:016x}"

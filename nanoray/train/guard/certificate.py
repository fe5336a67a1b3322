"""hashes.jsonl: what a run says of its states, so that another run, or its re-enactment, can be
compared with it.

    {"group": step, "ranks": 2, "threads": 1, "config": {...}, ...}      a group of ranks goes on after this step
    {"step": 250, "samples": ..., "losses": [...], "ranks": [...], "tensors": {...}, "differ": {}}

The second kind is written at each comparison of the ranks (--hash_every, and before each
checkpoint), by rank 0: each rank's own loss in this step, a hash of each rank's state after it, and
the hash of each tensor. `differ` names ranks that disagree with the others, and the first tensor in
which they do.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanoray.atomic import append_line, read_json_lines

log = logging.getLogger("nanoray")
NAME = "hashes.jsonl"


@dataclass
class Certificate:
    """What a run's hashes.jsonl says, without what a resume has made void."""

    groups: list[dict[str, Any]] = field(default_factory=list)  # in the order of their steps
    states: dict[int, dict[str, Any]] = field(default_factory=dict)  # by step


def append(folder: Path, line: dict[str, Any]) -> None:
    """Add a line to a run's file. On a full disk it is left out: the run does not need it."""
    try:
        append_line(folder / NAME, json.dumps(line, allow_nan=False))
    except OSError as error:
        log.warning(
            "%s has no line of step %s: %s",
            NAME,
            line.get("step", line.get("group")),
            error.strerror,
        )


def read(folder: Path) -> Certificate:
    """Read a run's file; a line of a step that was done again replaces the older one."""
    found = Certificate()
    for line in read_json_lines(folder / NAME):
        if "group" in line:
            found.states = {
                step: state for step, state in found.states.items() if step <= line["group"]
            }
            found.groups = [group for group in found.groups if group["group"] < line["group"]] + [
                line
            ]
        elif "step" in line:
            found.states[line["step"]] = line
    return found


def written(value: int) -> str:
    """Write a 64-bit hash."""
    return f"{value % 2**64:016x}"

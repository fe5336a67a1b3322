"""How many collectives a rank has begun and ended, in a small file that can be read while it hangs.

The program's process writes it (traced.py), its actor reads it (rank.py): neither waits for the
other, and neither torch nor Python's lock is needed to read it.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

# Optimizer steps and collectives that have ended; then of each group its name, the collectives begun
# and ended, and the oldest that has not ended, else the newest: its kind and bytes
HEAD = struct.Struct("<2q")
GROUP = struct.Struct("<64s2q24sq")
MOST_GROUPS = 64


class GroupCounts(NamedTuple):
    """The collectives of one process group on one rank."""

    begun: int
    ended: int
    op: str  # of the oldest that has not ended, else of the newest
    size: int  # its bytes


@dataclass(frozen=True)
class Counts:
    """The collectives of a rank."""

    steps: int = 0
    ended: int = 0
    groups: dict[str, GroupCounts] = field(default_factory=dict)

    @property
    def waits(self) -> bool:
        """Whether some collective has begun and not ended."""
        return any(group.begun > group.ended for group in self.groups.values())


class CountsFile:
    """The file, as the rank writes it."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(HEAD.size + MOST_GROUPS * GROUP.size))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)

    def write_head(self, steps: int, ended: int) -> None:
        """Write the numbers of all groups."""
        HEAD.pack_into(self._memory, 0, steps, ended)

    def write_group(self, place: int, name: str, counts: GroupCounts) -> None:
        """Write those of a group. The first MOST_GROUPS are in the file."""
        if place < MOST_GROUPS:
            begun, ended, op, size = counts
            values = name.encode()[:64], begun, ended, op.encode()[:24], size
            GROUP.pack_into(self._memory, HEAD.size + place * GROUP.size, *values)


def read_counts(path: Path) -> Counts:
    """Return what a rank's file says; nothing where there is none."""
    try:
        content = path.read_bytes()
    except OSError:
        return Counts()
    if len(content) < HEAD.size + MOST_GROUPS * GROUP.size:
        return Counts()  # it is being made
    groups = {}
    for name, begun, ended, op, size in GROUP.iter_unpack(content[HEAD.size :]):
        if begun:
            text = name.rstrip(b"\0").decode(errors="replace")
            groups[text] = GroupCounts(begun, ended, op.rstrip(b"\0").decode(), size)
    steps, ended = HEAD.unpack_from(content)
    return Counts(steps, ended, groups)

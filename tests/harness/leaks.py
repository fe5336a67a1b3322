"""What a run left behind: actors, placement groups, processes, shared memory, temporary folders."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

SHARED = ("/dev/shm", "/tmp")  # where every user may write
# Ray ends the actors of a driver that is gone within two seconds; a node that is busy takes longer
SETTLE_S = 15.0

_ON_CLUSTER = """
import json, os, ray
ray.init(address=os.environ["RAY_ADDRESS"], namespace="nanoray", log_to_driver=False)
from ray.util.placement_group import placement_group_table
from ray._private.state import actors  # the public ray.util.state needs the dashboard
left = [f"actor {a['Name']} ({a['State']}, pid {a['Pid']})" for a in actors().values() if a["State"] != "DEAD"]
left += [f"placement group {g['placement_group_id']} ({g['state']})" for g in placement_group_table().values()
         if g["state"] != "REMOVED"]
print(json.dumps(left))
"""


def on_cluster(env: Mapping[str, str]) -> list[str]:
    """Return the actors and placement groups on the cluster of RAY_ADDRESS.

    Polls until none is left, for at most SETTLE_S seconds.
    """
    deadline = time.monotonic() + SETTLE_S
    while True:
        command = [sys.executable, "-c", _ON_CLUSTER]
        asked = subprocess.run(command, env=dict(env), capture_output=True, text=True, timeout=120)
        if asked.returncode:
            return [f"the cluster did not answer: {asked.stderr.strip()[-300:]}"]
        left = _newest_list(asked.stdout)
        if not left or time.monotonic() > deadline:
            return left


def _newest_list(text: str) -> list[str]:
    """Return the newest line that is a JSON list.

    Ray also logs to stdout, even after the last line of the program.
    """
    for line in reversed(text.splitlines()):
        with suppress(ValueError):
            content = json.loads(line)
            if isinstance(content, list):
                return [str(item) for item in content]
    raise RuntimeError(f"no list of what is left in {text[-300:]!r}")


def processes(marker: str, wait_s: float = SETTLE_S) -> list[str]:
    """Return the other living processes whose command line or environment holds `marker`.

    Polls until none is left, for at most `wait_s` seconds.
    """
    deadline = time.monotonic() + wait_s
    while True:
        left = [
            f"process {pid}: {' '.join(words)[:120]}"
            for pid, words in _naming(marker.encode()).items()
        ]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.2)


def _naming(marker: bytes) -> dict[int, list[str]]:
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command = (folder / "cmdline").read_bytes()
            mentions = marker in command or marker in (folder / "environ").read_bytes()
            if mentions and int(folder.name) != os.getpid():
                found[int(folder.name)] = command.decode(errors="replace").split("\0")
    return found


def entries() -> set[str]:
    """Return the entries of the folders where every user may write."""
    return {
        f"{folder}/{name}"
        for folder in SHARED
        if os.path.isdir(folder)
        for name in os.listdir(folder)
    }


def abandoned(before: set[str]) -> list[str]:
    """Return our user's new entries that no living process names, opens, maps or listens at.

    What others on this machine use is named, sooner or later, in the command, environment, memory
    map or open files of one of their processes; what this program used is not, once all of its
    processes have ended.
    """
    new = {path for path in entries() - before if _is_ours(path)}
    deadline = time.monotonic() + SETTLE_S
    while new and time.monotonic() < deadline:
        time.sleep(1.0)
        text = _in_use()
        new = {path for path in new if path not in text and os.path.lexists(path)}
    return sorted(new)


def _in_use() -> str:
    """Return all names that living processes, but this one, mention or hold."""
    parts = [_read(Path("/proc/net/unix"))]
    for folder in Path("/proc").glob("[0-9]*"):
        if int(folder.name) != os.getpid():
            parts += [_read(folder / name) for name in ("cmdline", "environ", "maps")]
            for fd in folder.glob("fd/*"):
                with suppress(OSError):
                    parts.append(os.readlink(fd))
    return "\0".join(parts)


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_bytes().decode(errors="replace")
    return ""


def _is_ours(path: str) -> bool:
    with suppress(OSError):
        return os.lstat(path).st_uid == os.geteuid()
    return False

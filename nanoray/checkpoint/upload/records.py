"""What a run's folder has to be sent: its checkpoints, and the files beside them that are due again."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nanoray.checkpoint.manifest import STEP_NAME

# Folders of the run's folder that are not sent: checkpoints go another way, trackers have their own.
NOT_SENT = ("checkpoints", "wandb", "mlruns", ".aim")
# Of this machine and this moment
LOCAL = ("lock", "attempt")
_LOCAL_ENDS = (".progress", ".exit.json", ".tmp")

# With the id of a process, the folder of the run that holds what this process sends
HOLD = ".upload-"

LOOK_S = 15.0  # between two looks for what has changed: each asks for every file of the run
EVERY_S = 60.0  # before a file is sent again
LOGS_EVERY_S = 600.0  # logs/ has files of each rank
# An object cannot be appended to, so a file that grows is sent whole. At most this share of the time.
SHARE = 0.05


@dataclass(frozen=True)
class Version:
    """What shows that a file has changed."""

    size: int
    mtime_ns: int


@dataclass
class SentVersion:
    """The newest version of a file that was sent, and when it may be sent again."""

    version: Version
    due_at: float  # monotonic seconds


def record_files(run: Path) -> Iterator[tuple[str, Path]]:
    """Yield name and path of each file of a run, but for checkpoints and what is this machine's."""
    for folder, folders, names in os.walk(run):
        is_top = Path(folder) == run
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".") and not (is_top and name in NOT_SENT)
        )
        for name in sorted(names):
            if name.startswith(".") or name.endswith(_LOCAL_ENDS) or (is_top and name in LOCAL):
                continue
            path = Path(folder, name)
            yield path.relative_to(run).as_posix(), path


def version_of(path: Path) -> Version | None:
    """Return the present version of a regular file; None for one that is gone, or is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    if not path.is_file():
        return None
    return Version(status.st_size, status.st_mtime_ns)


def pause_s(name: str, took_s: float) -> float:
    """Return the seconds until a file that took so long may be sent again."""
    least = LOGS_EVERY_S if name.startswith("logs/") else EVERY_S
    return max(least, took_s / SHARE)


def steps_on_disk(folder: Path) -> list[str]:
    """Return the names of committed checkpoints, newest first."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    steps = [name for name in names if STEP_NAME.fullmatch(name)]
    return sorted(steps, key=lambda name: int(name.removeprefix("step_")), reverse=True)


def release(run: Path) -> None:
    """Remove what processes that upload hold of a run, also those that were killed."""
    for folder in run.glob(f"{HOLD}[0-9]*"):
        shutil.rmtree(folder, ignore_errors=True)

"""Remove the folder of a run that was refused before its first step.

An error in one line has said all there is to say, and `--resume auto`, a user and `du` would find an
empty run among the others. A folder that has anything else in it stays: a record, a checkpoint, a
file that the script has written.

The driver uses this, so nothing here imports torch.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nanoray.checkpoint.run import RunSpec
from nanoray.errors import NanorayError
from nanoray.faults.progress import AFTER_UPDATE, ProgressFile

# What a run writes before its first step. Files of records are empty until then
_FILES = (
    "attempt",
    "config.json",
    "faults.jsonl",
    "hashes.jsonl",
    "lock",
    "run.json",
    "summary.json",
)
_LOGS = ("rank*.log", "rank*.progress", "rank*.exit.json", "rank*.ledger")


@contextmanager
def discarding_refused(spec: RunSpec) -> Iterator[None]:
    """Call discard_refused if the run is refused, and raise the error again."""
    try:
        yield
    except NanorayError as error:
        if error.refuses:
            discard_refused(spec)
        raise


def discard_refused(spec: RunSpec) -> bool:
    """Remove the run's folder if this command has made it and nothing in it is of value.

    Return whether it was removed. Called by the process that has opened the run, after its ranks
    have ended.
    """
    if not spec.is_new or not _is_worthless(spec.folder):
        return False
    shutil.rmtree(spec.folder, ignore_errors=True)
    return not spec.folder.exists()


def _is_worthless(folder: Path) -> bool:
    """Return whether a run's folder has only what a run without a step writes."""
    # A run may log rarely: each rank's last position says whether it has completed a step
    if any(_has_trained(path) for path in folder.glob("logs/rank*.progress")):
        return False
    try:
        for path in folder.rglob("*"):
            if path.is_dir() or path.stat().st_size == 0:
                continue
            if not _is_of_the_start(path.relative_to(folder)):
                return False
    except OSError:  # what cannot be read is not removed
        return False
    return True


def _has_trained(progress: Path) -> bool:
    """Return whether a rank has completed a step of its own, by its progress file."""
    position = ProgressFile.read_all(progress)
    if position is None:
        return False
    step, phase, base, _ = position
    completed = step if phase in AFTER_UPDATE else step - 1
    return completed > max(base, 0)


def _is_of_the_start(name: Path) -> bool:
    """Return whether a file is written before the first step."""
    if len(name.parts) == 1:
        return name.name in _FILES
    if name.parts[0] == "logs":
        return any(name.match(f"logs/{pattern}") for pattern in _LOGS)
    # TensorBoard's header, which is written when its writer opens
    return name.parts[0] == "tb" and name.name.startswith("events.out.tfevents.")

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

from nanoray.checkpoint.run_folder import RunSpec
from nanoray.errors import NanorayError

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
    """Return whether a run's folder has only what a run without a step writes.

    The first step of each command has a record.
    """
    for path in folder.rglob("*"):
        if (
            path.is_file()
            and path.stat().st_size
            and not _is_of_the_start(path.relative_to(folder))
        ):
            return False
    return True


def _is_of_the_start(name: Path) -> bool:
    """Return whether a file is written before the first step."""
    if len(name.parts) == 1:
        return name.name in _FILES
    return name.parts[0] == "tb" or (name.parts[0] == "logs" and name.name.startswith("rank"))

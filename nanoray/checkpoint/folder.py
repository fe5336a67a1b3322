"""Make anew what another program takes away from a run's folder while the run trains.

A cleaner removes logs/, a user moves the folder or deletes a file in it. The run goes on, but its
next checkpoint would lie in a folder that no resume accepts, and without its lock a second command
could write to it, too. So one process of the run looks at the folder every second or two.

The driver uses this, so nothing here imports torch.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from nanoray.base.atomic import write_json
from nanoray.checkpoint.run import ROOM, RunSpec, lock_run, write_attempt
from nanoray.errors import NanorayError
from nanoray.faults.progress import AFTER_UPDATE, ProgressFile

FOLDERS = ("checkpoints", "logs")


class FolderKeeper:
    """Keeps a run's folder complete for the process that has opened the run."""

    def __init__(self, spec: RunSpec) -> None:
        """Note what the folder contains now: only that is ever made anew."""
        self._spec = spec
        self._failed = False
        self._identity = _identity(spec.folder)
        makers: dict[str, Callable[[], None]] = dict.fromkeys(FOLDERS, self._make_folders)
        makers["attempt"] = self._write_attempt
        makers["lock"] = self._lock
        makers["config.json"] = self._write_config
        makers["run.json"] = self._write_run
        self._makers = {}
        for name, make in makers.items():
            if not _is_missing(spec.folder / name):
                self._makers[name] = make

    def check(self, spec: RunSpec) -> str | None:
        """Make anew what is missing; return a line that says so, None if nothing was missing.

        spec: of the present attempt.
        """
        # The lock of this process may be newer than that of the driver's spec.
        self._spec = replace(spec, lock=self._spec.lock)
        folder = spec.folder
        missing = [name for name in self._makers if _is_missing(folder / name)]
        if not missing:
            self._failed = False
            return None

        what = f"another program has removed {', '.join(missing)} from {folder}"
        identity = _identity(folder)
        if self._identity and identity != self._identity:
            what = f"another program has moved or removed the run's folder {folder}"
        try:
            self._make_folders()
            for name in missing:
                self._makers[name]()
        except (OSError, NanorayError) as error:
            # It is tried again at the next call, and reported once.
            first_time = not self._failed
            self._failed = True
            return f"warning  {what}, which cannot be made anew: {error}" if first_time else None

        self._identity = _identity(folder)
        kept = ""
        if "checkpoints" in missing:
            kept = "; checkpoints that were in it count no more, the next one does"
        return f"warning  {what}; it is made anew, and training goes on{kept}"

    def _make_folders(self) -> None:
        self._spec.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in FOLDERS:
            (self._spec.folder / name).mkdir(exist_ok=True)

    def _write_attempt(self) -> None:
        write_attempt(self._spec)

    def _lock(self) -> None:
        # The old lock belongs to a file that other commands do not see any more.
        lock, _ = lock_run(self._spec.folder)
        self._spec = replace(self._spec, lock=lock)

    def _write_config(self) -> None:
        write_json(self._spec.folder / "config.json", self._spec.config.model_dump())

    def _write_run(self) -> None:
        write_json(self._spec.folder / "run.json", self._spec.to_dict())


def _is_missing(path: Path) -> bool:
    """Return whether nothing is at a path.

    Any other error, of a storage that does not answer for a while, proves nothing.
    """
    try:
        path.stat()
    except FileNotFoundError:
        return True
    except OSError:
        pass
    return False


def _identity(folder: Path) -> tuple[int, int] | None:
    """Return device and inode of a folder; None if it cannot be read."""
    with suppress(OSError):
        status = folder.stat()
        return status.st_dev, status.st_ino
    return None


# Remove the folder of a run that was refused before its first step.
#
# An error in one line has said all there is to say, and `--resume auto`, a user and `du` would find an
# empty run among the others. A folder that has anything else in it stays: a record, a checkpoint, a
# file that the script has written.


# What a run writes before its first step. Files of records are empty until then
_FILES = ("attempt", "config.json", "faults.jsonl", "lock", "run.json", "summary.json", ROOM)
_LOGS = ("rank*.log", "rank*.progress", "rank*.exit.json", "rank*.outcome.json", "rank*.ledger")


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

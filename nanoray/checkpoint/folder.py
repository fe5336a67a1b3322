"""Make anew what another program takes away from a run's folder while the run trains.

A cleaner removes logs/, a user moves the folder or deletes a file in it. The run goes on, but its
next checkpoint would lie in a folder that no resume accepts, and without its lock a second command
could write to it, too. So one process of the run looks at the folder every second or two.

The driver uses this, so nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from nanoray.base.atomic import write_json
from nanoray.checkpoint.run import RunSpec, lock_run, write_attempt
from nanoray.errors import NanorayError

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

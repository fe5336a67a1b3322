"""Bring a run's copy in object storage up to date: `python -m nanoray.checkpoint.upload.send`.

    RUN/checkpoints/step_00000200/*  ─► URL/RUN/checkpoints/step_00000200/*, manifest.json at the end
    RUN/metrics.jsonl, config.json … ─► URL/RUN/metrics.jsonl, …            before each manifest

A committed checkpoint never changes, so what is on disk decides what is sent, and a process that
starts anew continues where another one has ended. The newest checkpoint comes first. Nothing is
removed there. A checkpoint without a manifest, or with an empty one, is not there.

The process is started by the one that opens the run (process.py). It has its own memory, and ends
with its parent.

    arguments   the run's folder, the URL, the parent's pid
    stdin       a line, or its end: the run has ended, so send the rest and exit with 0
    stdout      lines for the user
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from nanoray.checkpoint.manifest import MANIFEST, STEP_NAME
from nanoray.machine.storage.store import StorageError, Store, reason_of
from nanoray.machine.storage.url import join, local_folder

LOOK_S = 1.0  # between two looks at the run's folder, and at the parent
RETRY_S = 10.0  # after a failure
RETRY_AT_END_S = 1.0

# Folders of a run that are not copied: checkpoints go another way, trackers have their own
_OTHER_FOLDERS = ("checkpoints", "wandb", "mlruns")
# Of this machine and this moment
_LOCAL = ("lock", "attempt")
_LOCAL_ENDS = (".progress", ".tmp")


def is_record(name: str) -> bool:
    """Return whether a file of a run is copied beside its checkpoints.

    A name that leads out of the folder is none: a user who may write to the storage must not choose
    where a resume writes.
    """
    parts = name.split("/")
    if any(not part or part.startswith(".") for part in parts):
        return False
    return parts[0] not in (*_OTHER_FOLDERS, *_LOCAL) and not name.endswith(_LOCAL_ENDS)


def record_files(run: Path) -> Iterator[tuple[str, Path]]:
    """Yield name and path of each file of a run that is copied beside its checkpoints."""
    for folder, folders, files in os.walk(run):
        if Path(folder) == run:
            folders[:] = [name for name in folders if name not in _OTHER_FOLDERS]
        for file in files:
            path = Path(folder, file)
            name = path.relative_to(run).as_posix()
            if is_record(name):
                yield name, path


def steps_on_disk(folder: Path) -> list[str]:
    """Return the names of committed checkpoints, newest first."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    steps = [name for name in names if STEP_NAME.fullmatch(name)]
    return sorted(steps, key=step_of, reverse=True)


def step_of(name: str) -> int:
    """Return the step of a checkpoint's name."""
    return int(name.removeprefix("step_"))


class RunCopy:
    """A run's copy in object storage. `update` raises StorageError."""

    def __init__(self, run: Path, url: str) -> None:
        self._run = run
        self.store = Store(join(url, run.name))
        there = local_folder(self.store.url)
        if there and run.resolve() in (there, *there.parents):
            raise StorageError(f"{self.store.url} is in the run's own folder, so it is no copy")
        self._manifests: dict[str, bytes] = {}  # of checkpoints there; b"" if there is none
        self._records: dict[str, tuple[int, int]] = {}  # size and time of the versions there

    @property
    def newest(self) -> str:
        """The name of the newest checkpoint that is known to be there."""
        names = [name for name, manifest in self._manifests.items() if manifest]
        return max(names, key=step_of, default="none")

    def update(self, is_last: bool = False) -> None:
        """Send the checkpoints that are not there, and the other files with each of them.

        `is_last`: no checkpoint follows, so the other files are sent in any case.
        """
        while name := self._missing():
            self._send_checkpoint(name)
        if is_last:
            self._send_records()
            self._send_records("logs/")

    def _missing(self) -> str | None:
        """Return the newest checkpoint on disk that is not there."""
        for name in steps_on_disk(self._run / "checkpoints"):
            if name not in self._manifests:
                self._manifests[name] = self.store.read(f"checkpoints/{name}/{MANIFEST}") or b""
            manifest = self._manifest(name)
            if manifest and manifest != self._manifests[name]:
                return name
        return None

    def _manifest(self, name: str) -> bytes:
        """Return the manifest of a checkpoint on disk; empty if it is gone."""
        with suppress(OSError):
            return (self._run / "checkpoints" / name / MANIFEST).read_bytes()
        return b""

    def _send_checkpoint(self, name: str) -> None:
        """Send a checkpoint's files, then its manifest. The caller looks again afterwards."""
        manifest = self._manifest(name)
        folder = self._run / "checkpoints" / name
        target = f"checkpoints/{name}"

        # A step that was saved again must not look complete while its files are replaced.
        if self._manifests[name]:
            self.store.write(f"{target}/{MANIFEST}", b"")
            self._manifests[name] = b""

        try:
            for file in os.listdir(folder):
                if file != MANIFEST:
                    self.store.put(folder / file, f"{target}/{file}")
        except (OSError, StorageError):
            if self._manifest(name) == manifest:
                raise
        # Files of two checkpoints must not be mixed.
        if self._manifest(name) != manifest:
            print(
                f"warning  upload: {name} was removed or replaced here before it was sent; a "
                "higher --keep_checkpoints gives it more time",
                flush=True,
            )
            return

        # A resume needs the run's configuration, too.
        self._send_records()
        self.store.write(f"{target}/{MANIFEST}", manifest)
        self._manifests[name] = manifest

    def _send_records(self, prefix: str = "") -> None:
        """Send the files whose names begin so and that have changed; those of logs/ apart."""
        for name, path in record_files(self._run):
            if not name.startswith(prefix) or (name.startswith("logs/") and not prefix):
                continue
            with suppress(FileNotFoundError):  # it was removed meanwhile
                status = path.stat()
                version = (status.st_size, status.st_mtime_ns)
                if self._records.get(name) != version:
                    self.store.put(path, name)
                    self._records[name] = version


def main(argv: list[str]) -> int:
    """Send what a run writes until it has ended, and all is there. Returns 0 then."""
    run, url, parent = Path(argv[0]), argv[1], int(argv[2])
    os.nice(19)  # training comes first
    ended = threading.Event()
    threading.Thread(target=_wait_for_end, args=(ended,), daemon=True).start()
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    copy: RunCopy | None = None
    has_failed = False
    while True:
        is_last = ended.is_set()
        try:
            copy = copy or RunCopy(run, url)
            copy.update(is_last)
        except Exception as error:  # of any package: training goes on
            copy = None  # with new connections and credentials next time
            if not has_failed:
                text = str(error) if isinstance(error, StorageError) else reason_of(error)
                print(f"warning  upload: {text}; it is tried again", flush=True)
            has_failed = True
            if is_last:
                time.sleep(RETRY_AT_END_S)
            else:
                ended.wait(RETRY_S)
            continue

        if has_failed:
            print("upload   works again", flush=True)
        has_failed = False
        if is_last:
            print(f"upload   {copy.store.url}: all is there, newest {copy.newest}", flush=True)
            return 0
        ended.wait(LOOK_S)


def _wait_for_end(ended: threading.Event) -> None:
    """Set `ended` when the parent says so. (a thread)"""
    sys.stdin.readline()
    ended.set()


def _end_with(parent: int) -> None:
    """End this process with its parent, also in the middle of a file. (a thread)"""
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    os._exit(1)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

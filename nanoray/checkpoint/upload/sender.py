"""Send a run's folder to object storage: each checkpoint's manifest last, then the records.

    RUN/checkpoints/step_00000200/*  ─► URL/RUN/checkpoints/step_00000200/*, manifest.json at the end
    RUN/metrics.jsonl, config.json … ─► URL/RUN/metrics.jsonl, …            when they have changed

What is on disk decides what is sent, so a sender that starts anew continues where another one has
ended. The newest checkpoint comes first: with a slow line it matters most. Nothing is removed there,
except the manifest of a step that is sent again with other content.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from nanoray.base.storage.store import StorageError, Store
from nanoray.base.storage.url import local_folder
from nanoray.checkpoint.manifest import MANIFEST, Damage, Sums, parse_manifest
from nanoray.checkpoint.upload.records import (
    SentVersion,
    pause_s,
    record_files,
    steps_on_disk,
    version_of,
)


class NotAllowed(Exception):
    """Another command or attempt has taken over the run: this process may not send it any more."""


class Removed(Exception):
    """A checkpoint was removed from the run's folder before it was sent."""


class RunSender:
    """Sends one run. Its methods raise StorageError, and NotAllowed where `allowed` does."""

    def __init__(
        self,
        run: Path,
        store: Store,
        hold: Path,
        allowed: Callable[[], None] = lambda: None,
        log: Callable[[str], None] = lambda text: None,
        sent_bytes: Callable[[int], None] = lambda count: None,
    ) -> None:
        """`store` is that of the run. `hold` is a hidden folder beside its checkpoints' folder.

        `allowed` is called before each object. `log` takes lines of text.
        """
        there = local_folder(store.url)
        if there and run.resolve() in (there, *there.parents):
            raise StorageError(f"{store.url} is in the run's own folder, so no copy", refused=True)
        self.store = store
        self._run = run
        self._hold = hold
        self._allowed = allowed
        self._log = log
        self._sent_bytes = sent_bytes
        # Checkpoint -> the sha256 of its manifest there; "" if it has none there
        self._there: dict[str, str] = {}
        # Checkpoint -> when the manifest of one that is damaged on disk was written, in ns
        self._damaged: dict[str, int] = {}
        # What has arrived of the checkpoint with this manifest: sha256 and bytes of each file
        self._objects_of = ""
        self._objects: dict[str, tuple[str, int]] = {}
        self._records: dict[str, SentVersion] = {}

    # Checkpoints.

    def find_sent(self) -> None:
        """Ask the store, once for each checkpoint on disk, whether it is there already."""
        for name in steps_on_disk(self._run / "checkpoints"):
            if name in self._there:
                continue
            try:
                manifest = self.store.read(f"checkpoints/{name}/{MANIFEST}")
                self._there[name] = _sha256(manifest)
            except StorageError as error:
                if not error.missing:
                    raise
                self._there[name] = ""

    def pending(self) -> list[str]:
        """Return the names of checkpoints on disk that are not known to be there, newest first."""
        names = []
        for name in steps_on_disk(self._run / "checkpoints"):
            manifest, written_at = self._manifest(name)
            is_there = self._there.get(name) == _sha256(manifest)
            is_damaged = self._damaged.get(name) == written_at
            if manifest and not is_there and not is_damaged:
                names.append(name)
        return names

    def sent(self) -> list[str]:
        """Return the names of checkpoints that are known to be there, newest first."""
        return sorted((name for name, digest in self._there.items() if digest), reverse=True)

    def _manifest(self, name: str) -> tuple[bytes, int]:
        """Return the manifest of a checkpoint on disk, and when it was written, in ns.

        Empty if it is gone.
        """
        path = self._run / "checkpoints" / name / MANIFEST
        try:
            return path.read_bytes(), path.stat().st_mtime_ns
        except OSError:
            return b"", 0

    def send_checkpoint(self, name: str) -> None:
        """Send a checkpoint whole. Raises Removed and Damage, too.

        After an error the objects that have arrived are not sent again by this process.
        """
        began = time.monotonic()
        folder = self._hold_files(name)
        try:
            raw = (folder / MANIFEST).read_bytes()
            sums, _ = parse_manifest(raw)
            size = self._send_files(name, folder, sums, _sha256(raw))
            # The records of the steps before it, so that a resume from there has all of them. What
            # fails here is sent later, or the manifest fails, too.
            with suppress(StorageError):
                self.send_records()
            self._require_complete(name, sums)
            self._allowed()
            self.store.put(f"checkpoints/{name}/{MANIFEST}", raw)
            self._there[name] = _sha256(raw)
        except (Damage, FileNotFoundError) as error:
            manifest, written_at = self._manifest(name)
            if not manifest:
                raise Removed(f"{name} was removed before it was sent") from None
            # It is left out until it is saved again.
            self._damaged[name] = written_at
            raise Damage(f"{name} is damaged ({error})") from None
        finally:
            shutil.rmtree(self._hold, ignore_errors=True)
        seconds = time.monotonic() - began
        self._log(f"{name} is at {self.store.url}: {size / 1e6:.1f} MB in {seconds:.1f} s")

    def _hold_files(self, name: str) -> Path:
        """Return a folder with a checkpoint's files that stay when the run removes the checkpoint."""
        source = self._run / "checkpoints" / name
        held = self._hold / name
        shutil.rmtree(self._hold, ignore_errors=True)
        try:
            files = os.listdir(source)
            held.mkdir(parents=True)
            for file in files:
                os.link(source / file, held / file)
        except FileNotFoundError:
            raise Removed(f"{name} was removed before it was sent") from None
        except OSError:
            # A file system without hard links: the checkpoint is sent if it stays long enough.
            return source
        return held

    def _send_files(self, name: str, folder: Path, sums: Sums, digest: str) -> int:
        """Send all but the manifest; return their bytes. Raises Damage."""
        if self._objects_of != digest:
            self._objects_of = digest
            self._objects = {}
        # Another checkpoint of this step must not look whole while its files are replaced.
        there = self.store.sizes(f"checkpoints/{name}")
        if MANIFEST in there:
            self._allowed()
            with suppress(StorageError):  # this user may be allowed to write alone
                self.store.remove(f"checkpoints/{name}/{MANIFEST}")
            self._there[name] = ""

        total = 0
        for file, entry in sums.items():
            total += entry["bytes"]
            is_done = self._objects.get(file) == (entry["sha256"], entry["bytes"])
            if is_done and there.get(file) == entry["bytes"]:
                continue
            self._allowed()
            with (folder / file).open("rb", buffering=0) as source:
                found = os.fstat(source.fileno()).st_size
                if found != entry["bytes"]:
                    raise Damage(f"{file}: {found} bytes instead of {entry['bytes']}")
                sent = self.store.put(
                    f"checkpoints/{name}/{file}", source, entry["bytes"], self._sent_bytes
                )
            if sent != entry["sha256"]:
                raise Damage(f"{file}: sha256 differs")
            self._objects[file] = (sent, entry["bytes"])
        return total

    def _require_complete(self, name: str, sums: Sums) -> None:
        """Raise StorageError unless the store lists all files of a checkpoint, with their sizes."""
        there = self.store.sizes(f"checkpoints/{name}")
        for file, entry in sums.items():
            if there.get(file) != entry["bytes"]:
                self._objects.pop(file, None)
                raise StorageError(
                    f"{self.store.url}/checkpoints/{name}/{file} has {there.get(file, 'no')} bytes "
                    f"there instead of {entry['bytes']}"
                )

    # Records.

    def records_due(self, at_once: bool = False) -> list[tuple[str, Path]]:
        """Return the files that have changed since they were sent, and may be sent again by now.

        `at_once`: also those that may not.
        """
        now = time.monotonic()
        due = []
        for name, path in record_files(self._run):
            sent = self._records.get(name)
            if sent is None or (
                sent.version != version_of(path) and (at_once or now >= sent.due_at)
            ):
                due.append((name, path))
        return due

    def send_records(self, at_once: bool = False) -> None:
        """Send the files that are due. One that is refused does not keep the others back."""
        refused: StorageError | None = None
        for name, path in self.records_due(at_once):
            version = version_of(path)
            if version is None:
                continue
            self._allowed()
            began = time.monotonic()
            try:
                with path.open("rb", buffering=0) as source:
                    self.store.put(name, source, version.size, self._sent_bytes)
            except OSError:
                continue  # removed, or not readable for this user
            except StorageError as error:
                if not error.refused:
                    raise
                refused = error
                continue
            now = time.monotonic()
            self._records[name] = SentVersion(version, now + pause_s(name, now - began))
        if refused:
            raise refused


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()

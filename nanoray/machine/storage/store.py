"""Objects below a URL of object storage, through fsspec.

Credentials, endpoint and region come from where the cloud's own tools take them.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nanoray.machine.atomic import json_mapping
from nanoray.machine.storage.url import join, protocol_of, scrub

PROBE = ".nanoray-probe"  # the object that `check` writes


class StorageError(Exception):
    """What went wrong with an object, in one line without credentials."""

    def __init__(self, text: str, missing: bool = False) -> None:
        """`missing`: there is no such object, or no such bucket."""
        super().__init__(text)
        self.missing = missing


class Store:
    """The objects below a URL. Every method raises StorageError."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._root = self.url.partition("://")[2]
        # Other processes write below this URL, and credentials may change.
        options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
        if protocol_of(url) == "s3":
            options["max_concurrency"] = 2  # parts of 50 MB that are in memory at once
            # Few tries of its own: callers try again, and say why.
            options["config_kwargs"] = {"retries": {"mode": "standard", "max_attempts": 2}}
        if protocol_of(url) == "file":
            options["auto_mkdir"] = True
        with self._errors("use", ""):
            import fsspec  # takes a second, with s3fs two

            self._files = fsspec.filesystem(protocol_of(url), **options)

    def check(self) -> None:
        """Do once what an upload and a resume do: write, read and list."""
        self.write(PROBE, b"nanoray may write here\n")
        self.read(PROBE)
        self.folders()

    def put(self, source: Path, name: str) -> None:
        """Send a file."""
        with self._errors("write", name):
            self._files.put_file(str(source), self._path(name))

    def write(self, name: str, data: bytes) -> None:
        """Write a small object."""
        with self._errors("write", name):
            self._files.pipe_file(self._path(name), data)

    def get(self, name: str, target: Path) -> None:
        """Fetch an object into a file."""
        with self._errors("read", name):
            target.parent.mkdir(parents=True, exist_ok=True)
            self._files.get_file(self._path(name), str(target))

    def read(self, name: str) -> bytes | None:
        """Return a small object; None if it is not there."""
        try:
            with self._errors("read", name):
                data: bytes = self._files.cat_file(self._path(name))
                return data
        except StorageError as error:
            if error.missing:
                return None
            raise

    def read_json(self, name: str) -> dict[str, Any] | None:
        """Return an object that is a JSON mapping; None if it is not there."""
        data = self.read(name)
        try:
            return None if data is None else json_mapping(data)
        except ValueError as error:
            raise StorageError(f"{join(self.url, name)} is damaged ({error})") from None

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the bytes of all objects below a folder, by their names within it."""
        path = self._path(folder)
        with self._errors("list", folder):
            found = self._files.find(path, detail=True)
        sizes = {}
        for name, info in found.items():
            # An object may have the folder's own name.
            if name.startswith(f"{path}/"):
                sizes[name.removeprefix(f"{path}/")] = int(info["size"])
        return sizes

    def folders(self) -> list[str]:
        """Return the names of the folders directly below the URL."""
        found = []
        try:
            with self._errors("list", ""):
                found = self._files.ls(self._root, detail=True)
        except StorageError as error:
            if not error.missing:
                raise
        return [
            posixpath.basename(info["name"].rstrip("/"))
            for info in found
            if info["type"] == "directory"
        ]

    def _path(self, name: str) -> str:
        return posixpath.join(self._root, name) if name else self._root

    @contextmanager
    def _errors(self, verb: str, name: str) -> Iterator[None]:
        """Raise an error of any package as a StorageError."""
        try:
            yield
        except Exception as error:
            where = join(self.url, name) if name else self.url
            is_missing = isinstance(error, FileNotFoundError)
            raise StorageError(f"cannot {verb} {where} ({reason_of(error)})", is_missing) from None


def reason_of(error: Exception) -> str:
    """Return an error of any package as one line without credentials."""
    lines = scrub(str(error)).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}".rstrip(": ")

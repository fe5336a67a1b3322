"""Objects below a URL, through fsspec: sent and fetched whole or not at all, in parts.

An object appears when its last part has arrived. Of an object in transfer two parts are in memory.
Credentials, endpoint and region come from where the cloud's own tools take them.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import io
import os
import posixpath
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

from nanoray.base.storage.url import PACKAGES, join, protocol_of, scrub

PART = 8 << 20  # bytes of one request; S3 takes parts of 5 MiB and more
MOST_PARTS = 9000  # S3 takes 10,000
CONNECT_S = 10
ANSWER_S = 60  # without a byte of the answer
PROBE = ".nanoray-probe"  # a folder with the object that tries what an upload does
_PROBE_TEXT = b"written by nanoray to find out whether it may write, read and list here\n"
PROBE_LISTED_S = 5.0  # some stores list a new object a moment later

# What a key must be allowed for each verb. Google's stores ask for `delete` where an object is
# replaced.
_RIGHTS = {
    "s3": {"write": "s3:PutObject", "read": "s3:GetObject", "list": "s3:ListBucket"},
    "gs": {
        "write": "storage.objects.create and storage.objects.delete",
        "read": "storage.objects.get",
        "list": "storage.objects.list",
    },
}

# Errors that another try does not change: of files, and s3fs and gcsfs raise these, too; and classes
# of botocore, aiobotocore and google.auth, which are imported only where they are used.
_NO_PLACE = (PermissionError, NotADirectoryError, IsADirectoryError, FileExistsError)
_MISUSE = (
    ImportError,
    TypeError,
    ValueError,
)  # an endpoint that is no URL, packages that do not fit
_REFUSALS = (
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "TokenRetrievalError",
    "UnauthorizedSSOTokenError",
    "ProfileNotFound",
    "ParamValidationError",
    "DefaultCredentialsError",
    "RefreshError",
)


class StorageError(Exception):
    """What went wrong with an object, in one line without credentials."""

    def __init__(self, text: str, refused: bool = False, missing: bool = False) -> None:
        """`refused`: another try would end the same way. `missing`: no such object or bucket."""
        super().__init__(text)
        self.refused = refused or missing
        self.missing = missing


def missing_package(url: str) -> str | None:
    """Return the line that refuses a URL whose package is missing; None if it is there."""
    package, extra = PACKAGES[protocol_of(url)]
    if importlib.util.find_spec(package) is not None:
        return None
    return (
        f"{url} needs the package {package}, which this Python does not have; run: pip install "
        f"'nanoray[{extra}]'"
    )


class Store:
    """The objects below a URL. Every method raises StorageError."""

    def __init__(self, url: str) -> None:
        missing = missing_package(url)
        if missing:
            raise StorageError(missing, refused=True)
        import fsspec  # takes a second, with s3fs two

        self.url = url.rstrip("/")
        self._root = self.url.partition("://")[2]
        self._is_local = protocol_of(url) == "file"
        # Listings are never cached: other processes write below this URL.
        options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
        if protocol_of(url) == "s3":
            options["fixed_upload_size"] = True  # some servers want parts of one size
            # Few tries of its own: callers try again, and say so.
            options["config_kwargs"] = {
                "connect_timeout": CONNECT_S,
                "read_timeout": ANSWER_S,
                "retries": {"mode": "standard", "max_attempts": 2},
            }
        try:
            # Not from the URL: fsspec takes what stands behind `::` for another one.
            self._files = fsspec.filesystem(protocol_of(url), **options)
        except Exception as error:
            raise self._problem("use", "", error) from None

    def probe(self) -> None:
        """Do with an object of its own all that an upload does. Raises StorageError.

        A checkpoint counts when its files are listed there with their sizes, and a resume reads it.
        """
        name = uuid4().hex
        path = f"{PROBE}/{name}"
        self.put(path, _PROBE_TEXT)
        try:
            self.put(path, _PROBE_TEXT)  # records are replaced
            found = self.read(path)
            size = self._size_listed(PROBE, name)
        finally:
            with suppress(StorageError):  # a key that may write need not be allowed to delete
                self.remove(path)
            if self._is_local:
                with suppress(OSError):
                    os.rmdir(self._path(PROBE))
        if found != _PROBE_TEXT or size != len(_PROBE_TEXT):
            raise StorageError(
                f"{join(self.url, path)}: {len(_PROBE_TEXT)} bytes were written, {len(found)} are read "
                f"and {size} listed"
            )
        # A manifest that is not there must differ from one that may not be read.
        try:
            self.read(f"{path}.none")
        except StorageError as error:
            if not error.missing:
                raise

    def _size_listed(self, folder: str, name: str) -> int | None:
        """Return the bytes of an object that was just written, as they are listed."""
        deadline = time.monotonic() + PROBE_LISTED_S
        while True:
            size = self.sizes(folder).get(name)
            if size is not None or time.monotonic() > deadline:
                return size
            time.sleep(0.5)

    def put(
        self,
        name: str,
        source: bytes | BinaryIO,
        size: int | None = None,
        sent: Callable[[int], None] = lambda count: None,
    ) -> str:
        """Send bytes, or the first `size` bytes of a file, as one object; return their sha256.

        `sent` is called with the bytes of each part.
        """
        if isinstance(source, bytes):
            size = len(source)
            source = io.BytesIO(source)
        assert size is not None
        part = part_size(size)
        digest = hashlib.sha256()
        path = self._path(name)
        # A file appears when it is opened, so it gets its name when it is complete.
        target = path
        if self._is_local:
            target = posixpath.join(posixpath.dirname(path), f".{posixpath.basename(path)}.part")
        file: Any = None
        try:
            if self._is_local:
                self._files.makedirs(posixpath.dirname(path), exist_ok=True)
            file = self._files.open(target, "wb", block_size=part)
            left = size
            while left:
                data = source.read(min(part, left))
                if not data:
                    break
                left -= len(data)
                digest.update(data)
                file.write(data)
                sent(len(data))
            if self._is_local:
                file.flush()
                os.fsync(file.fileno())
            file.close()
            if self._is_local:
                os.replace(target, path)
        except BaseException as error:
            self._discard(file, target)
            if not isinstance(error, Exception):
                raise
            raise self._problem("write", name, error) from None
        return digest.hexdigest()

    def _discard(self, file: Any, target: str) -> None:
        """Drop an object that is not complete. Closing it would make it appear."""
        if file is None:
            return
        if self._is_local:
            with suppress(OSError, ValueError):
                file.close()
            with suppress(OSError):
                os.unlink(target)
            return
        # Marked first: the file closes itself when it is collected.
        file.closed = True
        with suppress(Exception):
            file.discard()

    def read(self, name: str) -> bytes:
        """Return a small object."""
        try:
            data: bytes = self._files.cat_file(self._path(name))
        except Exception as error:
            raise self._problem("read", name, error) from None
        return data

    def get(self, name: str, target: Path) -> tuple[int, str]:
        """Fetch an object into a new file, fsynced; return its bytes and sha256."""
        digest = hashlib.sha256()
        size = 0
        try:
            with (
                self._files.open(
                    self._path(name), "rb", block_size=PART, cache_type="none"
                ) as file,
                target.open("xb", buffering=0) as copy,
            ):
                while data := file.read(PART):
                    digest.update(data)
                    copy.write(data)
                    size += len(data)
                os.fsync(copy.fileno())
        except Exception as error:
            raise self._problem("read", name, error) from None
        return size, digest.hexdigest()

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the bytes of all objects below a folder, by their names within it; {} for none.

        Without directory markers: objects whose names end in a slash, as consoles make them.
        """
        path = self._path(folder)
        try:
            found = self._files.find(path, detail=True)
        except FileNotFoundError:
            found = {}
        except Exception as error:
            raise self._problem("list", folder, error) from None
        below = f"{path}/"
        sizes = {}
        for name, info in found.items():
            # The folder's own name may be that of an object, too.
            if name.startswith(below) and not name.endswith("/"):
                sizes[name.removeprefix(below)] = int(info["size"])
        return sizes

    def folders(self) -> list[str]:
        """Return the names of the folders directly below the URL, sorted."""
        try:
            found = self._files.ls(self._root, detail=True)
        except FileNotFoundError:
            found = []
        except Exception as error:
            raise self._problem("list", "", error) from None
        names = []
        for info in found:
            if info["type"] == "directory":
                names.append(posixpath.basename(info["name"].rstrip("/")))
        return sorted(names)

    def remove(self, name: str) -> None:
        """Remove an object."""
        try:
            self._files.rm_file(self._path(name))
        except Exception as error:
            raise self._problem("remove", name, error) from None

    def _path(self, name: str) -> str:
        return posixpath.join(self._root, name) if name else self._root

    def _problem(self, verb: str, name: str, error: Exception) -> StorageError:
        """Return an error of any package as a StorageError, in one line."""
        if isinstance(error, StorageError):
            return error
        where = join(self.url, name) if name else self.url
        lines = scrub(str(error)).strip().splitlines() or [""]
        reason = f"{type(error).__name__}: {lines[0][:200]}".rstrip(": ")
        is_missing = isinstance(error, FileNotFoundError)
        # gcsfs has no class for it.
        is_denied = isinstance(error, PermissionError) or lines[0].startswith("Forbidden")
        right = _RIGHTS.get(protocol_of(self.url), {}).get(verb)
        if is_denied and right:
            reason += f"; the key needs the right {right}"
        is_refused = is_denied or isinstance(error, (*_NO_PLACE, *_MISUSE))
        is_refused = is_refused or type(error).__name__ in _REFUSALS
        is_refused = is_refused or getattr(error, "errno", None) == errno.EROFS
        return StorageError(f"cannot {verb} {where} ({reason})", is_refused, is_missing)


def part_size(size: int) -> int:
    """Return the bytes of each part of an object: PART, but more for one of very many parts."""
    return max(PART, -(-size // MOST_PARTS))

"""Check the content of token files at first use, and when size, time or inode have changed."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from nanoray.atomic import replace_text
from nanoray.errors import DataError

RECORD = ".verified.json"  # beside the token files, if the folder is writable
FILES = ("train.bin", "val.bin")
SAMPLES = 64  # pages of a file in its sampled hash
SAMPLE_BYTES = 4096
_CHUNK = 1 << 24


def verify(folder: Path, tokens_sha256: str) -> None:
    """Compare the content of train.bin and val.bin with the prepared one.

    (each rank, before it reads them) Reads the whole files, unless they were read before and have
    not changed since. Raises DataError when they differ.
    """
    # Before the files are read, so that a change during the reading is noticed next time.
    state = {"tokens_sha256": tokens_sha256, **_stats(folder)}
    record = folder / RECORD
    # No record, a damaged one, or one of other files: read them.
    with suppress(OSError, ValueError):
        if json.loads(record.read_text(encoding="utf-8")) == state:
            return
    digest = hashlib.sha256()
    for name in FILES:
        with _open(folder / name) as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    if digest.hexdigest() != tokens_sha256:
        raise DataError(
            f"dataset changed: train.bin and val.bin of {folder} have sha256 "
            f"{digest.hexdigest()[:16]}..., but {tokens_sha256[:16]}... was prepared; prepare it "
            "again, or restore the files"
        )
    with suppress(OSError):  # a folder that is not writable: the files are read again next time
        replace_text(record, json.dumps(state) + "\n")


def sampled_hash(folder: Path) -> str:
    """Return a hash of pages from end to end of both files. Costs a millisecond or two."""
    digest = hashlib.sha256()
    for name in FILES:
        with _open(folder / name) as file:
            size = (folder / name).stat().st_size
            last_start = max(0, size - SAMPLE_BYTES)
            for i in range(SAMPLES):
                file.seek(last_start * i // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def _open(path: Path) -> Any:
    try:
        return path.open("rb")
    except OSError as error:
        raise DataError(
            f"dataset changed: cannot open {path}: {error.strerror}; prepare it again"
        ) from None


def _stats(folder: Path) -> dict[str, list[int]]:
    """Return size, time of change and inode of each file."""
    stats = {}
    for name in FILES:
        with _open(folder / name) as file:
            stat = os.fstat(file.fileno())
        stats[name] = [stat.st_size, stat.st_mtime_ns, stat.st_ino]
    return stats

"""Check the content of token files at first use, and when size, time or inode have changed."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path

from nanoray.data.dataset import DatasetInfo, TokenFile, read_tokens
from nanoray.errors import DataError
from nanoray.machine.atomic import json_mapping, replace_text

RECORD = ".verified.json"  # beside the token files, if the folder is writable


def verify(info: DatasetInfo) -> None:
    """Compare the tokens of both splits with the prepared ones.

    (each rank, before it reads them) Reads the whole files, unless they were read before and have
    not changed since. Raises DataError when they differ.
    """
    # Before the files are read, so that a change during the reading is noticed next time.
    files = (*info.files("train"), *info.files("val"))
    state = {"tokens_sha256": info.tokens_sha256, **_stats(info.path, files)}
    record = info.path / RECORD
    # No record, a damaged one, or one of other files: read them.
    with suppress(OSError, ValueError):
        if json_mapping(record.read_text(encoding="utf-8")) == state:
            return
    digest = hashlib.sha256()
    for file in files:
        try:
            for chunk in read_tokens(info.path, file):
                digest.update(chunk)
        except OSError as error:
            raise _missing(info.path / file.name, error) from None
    if digest.hexdigest() != info.tokens_sha256:
        raise DataError(
            f"dataset changed: {_name_files(files)} of {info.path} have sha256 "
            f"{digest.hexdigest()[:16]}..., but {info.tokens_sha256[:16]}... was prepared; prepare "
            "it again, or restore the files"
        )
    with suppress(OSError):  # a folder that is not writable: the files are read again next time
        replace_text(record, json.dumps(state) + "\n")


def _name_files(files: tuple[TokenFile, ...]) -> str:
    """Return the names of files, or of the first and last one of many."""
    names = [file.name for file in files]
    if len(names) == 2:
        return f"{names[0]} and {names[1]}"
    return f"{names[0]} to {names[-1]} ({len(names)} files)"


def _missing(path: Path, error: OSError) -> DataError:
    return DataError(f"dataset changed: cannot open {path}: {error.strerror}; prepare it again")


def _stats(folder: Path, files: tuple[TokenFile, ...]) -> dict[str, list[int]]:
    """Return size, time of change and inode of each file."""
    stats = {}
    for file in files:
        try:
            stat = os.stat(folder / file.name)
        except OSError as error:
            raise _missing(folder / file.name, error) from None
        stats[file.name] = [stat.st_size, stat.st_mtime_ns, stat.st_ino]
    return stats

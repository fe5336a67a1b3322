"""Where the records of a file of lines begin: found once, and kept beside the file.

    corpus/part-0.jsonl
    corpus/.nanoray/part-0.jsonl.npy    (records,) uint64: the first byte of each record
    corpus/.nanoray/part-0.jsonl.json   the size and time of the file that they were found in; last

A record is a line with more than white space in it. Where the folder cannot be written, the index is
kept in the user's cache, and without one in memory alone.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from nanoray.base.atomic import json_mapping, one_at_a_time, replace_bytes, replace_text
from nanoray.errors import DataError

VERSION = 1
FOLDER = ".nanoray"
_CHUNK = 1 << 24
_BLANKS = np.frombuffer(b" \t\r\n\v\f", np.uint8)


def starts_of(path: Path) -> np.ndarray:
    """Return the first byte of each record of a file, (records,) uint64, from the index or the file.

    One process of a machine reads the file, others wait for it. It takes a few seconds per GB.
    Raises DataError for a file that is no text.
    """
    state = _state_of(path)
    for folder in _folders_of(path):
        known = _load(folder, path.name, state)
        if known is not None:
            return known

    for folder in _folders_of(path):
        with suppress(OSError), _locked(folder):
            # Another process may have written it meanwhile.
            known = _load(folder, path.name, state)
            if known is None:
                known = find_starts(path)
                _store(folder, path.name, state, known)
            return known
    return find_starts(path)


def find_starts(path: Path) -> np.ndarray:
    """Read a file of lines and return the first byte of each record, (records,) uint64.

    Raises DataError for a file that is no text.
    """
    if path.stat().st_size == 0:
        return np.empty(0, np.uint64)

    everything = np.asarray(np.memmap(path, np.uint8, "r"))
    found = [np.empty(0, np.int64)]
    size = len(everything)
    start = 0  # of the line that the last chunk has not ended
    for begin in range(0, size, _CHUNK):
        chunk = everything[begin : begin + _CHUNK]
        require_no_nul(chunk, path, begin)
        ends = np.flatnonzero(chunk == ord("\n")) + begin
        if len(ends):
            starts = np.concatenate([[start], ends[:-1] + 1])
            found.append(_not_blank(starts, ends, everything))
            start = int(ends[-1]) + 1
    # The last line may have no newline.
    if start < size:
        found.append(_not_blank(np.array([start]), np.array([size]), everything))
    return np.concatenate(found).astype(np.uint64)


def require_no_nul(data: bytes | np.ndarray, path: Path, start: int) -> None:
    """Raise DataError where bytes from `start` on have a NUL, which UTF-16 and binary files have."""
    nul = np.flatnonzero(np.frombuffer(data, np.uint8) == 0)
    if len(nul):
        raise DataError(
            f"{path} is not UTF-8 text (NUL byte at offset {start + int(nul[0])}); give lines of "
            "UTF-8, e.g. from iconv -f utf-16 -t utf-8"
        )


def _not_blank(starts: np.ndarray, ends: np.ndarray, everything: np.ndarray) -> np.ndarray:
    """Return the starts of the lines that have more than white space."""
    filled = ends > starts
    starts = starts[filled]
    ends = ends[filled]
    keep = np.ones(len(starts), bool)
    # Only a line whose first byte is white space can have nothing else.
    for i in np.flatnonzero(np.isin(everything[starts], _BLANKS)).tolist():
        keep[i] = not np.isin(everything[starts[i] : ends[i]], _BLANKS).all()
    return starts[keep]


def _state_of(path: Path) -> dict[str, int]:
    """Return what changes when a file is written anew."""
    stat = path.stat()
    return {"version": VERSION, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def _folders_of(path: Path) -> list[Path]:
    """Return the folders that may hold the index of a file, the best one first."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    key = hashlib.sha256(str(path.parent).encode()).hexdigest()[:16]
    return [path.parent / FOLDER, Path(cache, "nanoray", "index", key)]


def _load(folder: Path, name: str, state: dict[str, int]) -> np.ndarray | None:
    """Return an index that was written for this state of the file; else None."""
    try:
        record = json_mapping((folder / f"{name}.json").read_bytes())
        records = record.pop("records", None)
        # Mapped: the ranks of a machine share it.
        starts = np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    if record != state or starts.shape != (records,) or starts.dtype != np.uint64:
        return None
    return np.asarray(starts)


def _store(folder: Path, name: str, state: dict[str, int], starts: np.ndarray) -> None:
    """Write the index of a file: the record comes last, so that a killed process leaves none."""
    buffer = io.BytesIO()
    np.save(buffer, starts, allow_pickle=False)
    replace_bytes(folder / f"{name}.npy", buffer.getvalue(), sync=False)
    replace_text(folder / f"{name}.json", json.dumps(state | {"records": len(starts)}) + "\n")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process at a time write in a folder. Raises OSError where it cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    # On a file system without locks processes write the same bytes, each by a rename.
    with one_at_a_time(folder / "lock"):
        yield

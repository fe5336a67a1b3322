"""Where the records of a file of lines begin: found once, and kept beside the file.

    corpus/part-0.jsonl
    corpus/.nanoray/part-0.jsonl.SIZE-TIME.npy    (records,) uint64: the first byte of each record

A record is a line with more than white space in it. The name has the size and the time of the file, so
another file has another index. Where the folder cannot be written, each process reads the file.
"""

from __future__ import annotations

import io
from contextlib import suppress
from pathlib import Path

import numpy as np

from nanoray.base.atomic import replace_bytes
from nanoray.errors import DataError

FOLDER = ".nanoray"
_CHUNK = 1 << 24
_BLANKS = np.frombuffer(b" \t\r\n\v\f", np.uint8)


def starts_of(path: Path) -> np.ndarray:
    """Return the first byte of each record of a file, (records,) uint64, from the index or the file.

    To read the file takes a few seconds per GB. Raises DataError for a file that is no text.
    """
    stat = path.stat()
    index = path.parent / FOLDER / f"{path.name}.{stat.st_size}-{stat.st_mtime_ns}.npy"
    with suppress(OSError, ValueError, EOFError):
        # Mapped: the ranks of a machine share it.
        return np.asarray(np.load(index, mmap_mode="r", allow_pickle=False))

    starts = find_starts(path)
    buffer = io.BytesIO()
    np.save(buffer, starts, allow_pickle=False)
    with suppress(OSError):
        index.parent.mkdir(exist_ok=True)
        # By a rename: ranks that find the same at the same moment write the same bytes.
        replace_bytes(index, buffer.getvalue(), sync=False)
    return starts


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

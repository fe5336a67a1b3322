"""Atomic file writes: a temporary file beside the target is renamed. And files written by lines."""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_ASIDE = ".tmp"  # the end of a temporary file's name
_JSON_TYPES = {
    list: "list",
    str: "string",
    int: "number",
    float: "number",
    bool: "true or false",
    type(None): "null",
}


def json_mapping(text: str | bytes) -> dict[str, Any]:
    """Return the object in a JSON text. Raises ValueError for every other text."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("its lists and objects are nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"it is a JSON {_JSON_TYPES[type(value)]} and no object")
    return value


def without_nan(value: Any) -> Any:
    """Return JSON data with None for floats that are not finite, of which JSON has no word."""
    return json.loads(json.dumps(value), parse_constant=lambda name: None)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; {} where it is missing, or torn by a kill or a full disk."""
    with suppress(OSError, ValueError):
        return json_mapping(path.read_bytes())
    return {}


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file with one per line; [] without the file.

    A killed run or a full disk may have torn a line: it is left out.
    """
    if not path.is_file():
        return []
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError):
            records.append(json_mapping(line))
    return records


def append_line(path: Path, line: str, sync: bool = False) -> None:
    """Append a line, or on a full disk no part of it. Raises OSError.

    A torn last line is ended first, so that the new one is a line of its own.
    """
    with path.open("ab+", buffering=0) as file:
        data = line.encode() + b"\n"
        end = file.tell()
        if end > 0 and os.pread(file.fileno(), 1, end - 1) != b"\n":
            data = b"\n" + data
        write_whole(file.fileno(), data)
        if sync:
            os.fsync(file.fileno())


def write_whole(fd: int, data: bytes) -> None:
    """Append `data` to a file, or on a full disk no part of it. Raises OSError."""
    count = os.write(fd, data)
    if count < len(data):
        # Remove the part. It begins at the descriptor's own position: another process may have
        # appended before this.
        os.ftruncate(fd, os.lseek(fd, 0, os.SEEK_CUR) - count)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON; a reader sees the old file or the new one, never a part."""
    replace_text(path, json.dumps(value, indent=2) + "\n")


def replace_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8; a reader sees the old file or the new one, never a part."""
    replace_bytes(path, text.encode("utf-8"), sync=False)


def replace_bytes(path: Path, data: bytes, sync: bool = True) -> None:
    """Write `data`; a reader sees the old file or the new one, never a part.

    With `sync` it survives a power cut.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}{_ASIDE}")
    try:
        with aside.open("xb") as stream:
            stream.write(data)
            if sync:
                stream.flush()
                os.fsync(stream.fileno())
        os.replace(aside, path)
    except OSError as error:
        error.filename = str(path)  # what is meant, also where a write failed, which names nothing
        raise
    finally:
        with suppress(OSError):
            aside.unlink()  # it is there only if the rename did not happen: a full disk, Ctrl-C


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a hidden folder that gets the name `out` when nothing has failed inside."""
    hidden = out.with_name(f".{out.name}.tmp-{os.getpid()}")
    hidden.mkdir()
    try:
        yield hidden
        os.rename(hidden, out)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)

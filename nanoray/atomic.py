"""Atomic file writes: write a temporary file beside the target, then rename it."""

from __future__ import annotations

import json
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON; a reader sees the old file or the new one, never a part."""
    replace_text(path, json.dumps(value, indent=2) + "\n")


def replace_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8; a reader sees the old file or the new one, never a part."""
    replace_bytes(path, text.encode("utf-8"), sync=False)


def replace_bytes(path: Path, data: bytes, sync: bool = True) -> None:
    """Write `data`; a reader sees the old file or the new one, never a part. With `sync` it survives a power cut."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with aside.open("xb") as stream:
            stream.write(data)
            if sync:
                stream.flush()
                os.fsync(stream.fileno())
        os.replace(aside, path)
    finally:
        with suppress(OSError):
            aside.unlink()  # it is there only if the rename did not happen: a full disk, Ctrl-C

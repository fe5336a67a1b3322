"""The cache of downloads and prepared datasets. A folder of it that has a meta.json is complete."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from nanoray.config import Config
from nanoray.data.dataset import DatasetInfo, absolute
from nanoray.data.tokenizer import tokenizer_from_json
from nanoray.data.verify import verify
from nanoray.errors import DataError
from nanoray.machine.atomic import json_mapping, replace_bytes


def cache_dir(config: Config) -> Path:
    """Return the folder of downloads and tokens.

    It is data_dir, else $XDG_CACHE_HOME/nanoray, else ~/.cache/nanoray.
    """
    folder = config.data_dir
    if not folder:
        folder = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "nanoray")
    # Absolute, because ranks may run in another working directory.
    path = absolute(folder)
    # expanduser returns "~" unchanged when there is no home.
    if folder.startswith("~/") and os.path.expanduser(folder) == folder:
        raise DataError(
            f"no home folder for the cache {folder}; name a writable folder with --data_dir"
        )
    return path


def write(path: Path, data: bytes) -> None:
    """Write a file of the cache whole or not at all. Raises DataError when it cannot."""
    try:
        # By a rename, so that another process reads no half of a file.
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_bytes(path, data)
    except OSError as error:
        raise DataError(
            f"cannot write {path}: {error.strerror}; name a writable folder with --data_dir"
        ) from None


def store(info: DatasetInfo, train: bytes, val: bytes) -> None:
    """Write a dataset of one file for each split into its folder.

    Two processes that race write the same bytes, so replacing file by file never mixes two datasets.
    meta.json comes last.
    """
    write(info.path / "train.bin", train)
    write(info.path / "val.bin", val)
    write(info.path / "meta.json", json.dumps(info.to_dict(), indent=2).encode())
    verify(info)


def reuse(folder: Path) -> DatasetInfo | None:
    """Return the record of a complete and unchanged folder; None when it is absent or damaged."""
    with suppress(OSError, ValueError, TypeError, DataError):
        info = DatasetInfo.from_dict(json_mapping((folder / "meta.json").read_bytes()))
        info = replace(info, path=folder)  # the cache may have been moved
        if info.kind == "tokens":
            tokenizer_from_json(info.tokenizer)
        verify(info)
        return info
    return None

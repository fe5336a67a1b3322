"""The record of a prepared dataset, and the cache that its files are in."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nanoray.atomic import replace_bytes
from nanoray.config import Config
from nanoray.errors import DataError


@dataclass(frozen=True)
class DatasetInfo:
    """A prepared dataset: enough to open it, to decode its tokens, and to notice that it changed.

    A dataset of images has one byte array per image; then vocab_size counts classes, and the splits
    count images.
    """

    name: str  # shakespeare | stdlib | cifar10 | ... | the file's stem or the folder's name
    note: str  # one line for the log: where it came from and, for a fallback, why
    path: Path  # the folder with train.bin, val.bin and meta.json
    dtype: str  # uint16 | uint32 | uint8 (images)
    vocab_size: int
    train_tokens: int
    val_tokens: int
    sha256: str  # of the source text; empty for a folder that does not say
    tokens_sha256: str  # of train.bin followed by val.bin
    tokenizer: dict[str, Any]  # for tokenizer_from_json; empty for images
    # tokens | images | own (data of the user's script; the other fields are then empty)
    kind: str = "tokens"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON types."""
        return asdict(self) | {"path": str(self.path)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DatasetInfo:
        """Read `to_dict` back. Raises DataError for a missing or unknown key, or a wrong type."""
        try:
            return cls(**(values | {"path": Path(values["path"])}))
        except (KeyError, TypeError) as error:
            raise DataError(
                f"not the record of a dataset: {error}; prepare the dataset again"
            ) from None


def own_data() -> DatasetInfo:
    """Return the record of data that the user's script opens."""
    return DatasetInfo(
        name="own",
        note="data of the script",
        path=Path("/"),
        dtype="",
        vocab_size=0,
        train_tokens=0,
        val_tokens=0,
        sha256="",
        tokens_sha256="",
        tokenizer={},
        kind="own",
    )


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


def absolute(path: str) -> Path:
    return Path(os.path.abspath(os.path.expanduser(path)))

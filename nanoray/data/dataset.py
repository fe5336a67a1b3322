"""The record of a prepared dataset."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nanoray.errors import DataError

CHUNK_BYTES = 1 << 24  # a multiple of every token's size


@dataclass(frozen=True)
class TokenFile:
    """A file of a split: its tokens begin after its header."""

    name: str  # in the dataset's folder
    offset: int  # bytes of the header; 0 for a file of bare numbers
    tokens: int


@dataclass(frozen=True)
class DatasetInfo:
    """A prepared dataset: enough to open it, to decode its tokens, and to notice that it changed.

    A dataset of images has one byte array per image; then vocab_size counts classes, and the splits
    count images.
    """

    name: str  # shakespeare | stdlib | cifar10 | ... | the file's stem or the folder's name
    note: str  # one line for the log: where it came from and, for a fallback, why
    path: Path  # the folder of the files
    dtype: str  # uint16 | uint32 | int64 | ... of each token; uint8 for images
    vocab_size: int
    train_tokens: int
    val_tokens: int
    sha256: str  # of the source text; empty for a folder that does not say
    tokens_sha256: str  # of the train tokens followed by the val tokens, without headers
    tokenizer: dict[str, Any]  # for tokenizer_from_json; empty for images
    # tokens | images | own (data of the user's script; the other fields are then empty)
    kind: str = "tokens"
    # The files of each split, in their order; none for one file without a header, train.bin or val.bin
    train_files: tuple[TokenFile, ...] = ()
    val_files: tuple[TokenFile, ...] = ()

    def files(self, split: str) -> tuple[TokenFile, ...]:
        """Return the files of `train` or `val`. Their tokens follow each other as in one file."""
        if split == "train":
            return self.train_files or (TokenFile("train.bin", 0, self.train_tokens),)
        return self.val_files or (TokenFile("val.bin", 0, self.val_tokens),)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON types."""
        values = asdict(self)
        values["path"] = str(self.path)
        for key in ("train_files", "val_files"):
            values[key] = list(values[key])
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DatasetInfo:
        """Read `to_dict` back. Raises DataError for a missing or unknown key, or a wrong type."""
        try:
            # JSON has no tuples.
            converted: dict[str, Any] = {"path": Path(values["path"])}
            for key in ("train_files", "val_files"):
                converted[key] = tuple(TokenFile(**file) for file in values[key])
            return cls(**(values | converted))
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"not the record of a dataset: {error}; prepare the dataset again"
            ) from None


def read_tokens(folder: Path, file: TokenFile) -> Iterator[bytes]:
    """Yield the bytes of a file's tokens in order, without its header. Raises OSError."""
    with (folder / file.name).open("rb") as stream:
        stream.seek(file.offset)
        while chunk := stream.read(CHUNK_BYTES):
            yield chunk


def script_data() -> DatasetInfo:
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


def absolute(path: str) -> Path:
    return Path(os.path.abspath(os.path.expanduser(path)))

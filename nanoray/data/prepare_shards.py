"""Prepare token shards from documents, in bounded memory.

    OUT/train_000000.bin  train_000001.bin ...  val_000000.bin    llm.c's format (headers.py)
    OUT/meta.json                                                 tokenizer and counts

The folder gets its name when all is in it, so a folder of that name is complete.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from nanoray.data.documents import DocumentPiece, DocumentSource
from nanoray.data.headers import LLMC_HEADER_BYTES, llmc_header
from nanoray.data.tokenizer import Tokenizer
from nanoray.errors import DataError
from nanoray.machine.atomic import new_folder, write_json

BATCH = 1 << 20  # characters that are tokenized at once, about: all cores work on them
Say = Callable[[str], None]


def prepare_shards(
    source: DocumentSource,
    tokenizer: Tokenizer,
    out: Path,
    shard_tokens: int,
    say: Say = print,
) -> dict[str, Any]:
    """Write the documents' tokens into shards of `shard_tokens`, and return the content of meta.json.

    Raises DataError, and OSError where the folder cannot be written.
    """
    with new_folder(out) as folder:
        shards = {
            split: _Shards(folder, split, tokenizer.dtype, shard_tokens, say)
            for split in ("train", "val")
        }
        for batch in _in_batches(source.pieces()):
            _write(batch, tokenizer, shards)
        for each in shards.values():
            each.close()

        train, val = shards["train"].total, shards["val"].total
        if train == 0:
            raise DataError(
                f"the documents have no tokens for training, and {val} for validation; give "
                "more text, or lower --val_fraction"
            )
        meta = {
            "tokenizer": tokenizer.to_json(),
            "dtype": tokenizer.dtype,
            "vocab_size": tokenizer.vocab_size,
            "train_tokens": train,
            "val_tokens": val,
        }
        write_json(folder / "meta.json", meta)
    say(f"{out}: {train} train + {val} val tokens ({tokenizer.kind}, {tokenizer.dtype})")
    return meta


def _in_batches(pieces: Iterator[DocumentPiece]) -> Iterator[list[DocumentPiece]]:
    """Group pieces that are tokenized together."""
    batch: list[DocumentPiece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= BATCH:
            yield batch
            batch = []
            size = 0
    yield batch


def _write(batch: list[DocumentPiece], tokenizer: Tokenizer, shards: dict[str, _Shards]) -> None:
    """Write a batch's tokens, each document's with its end."""
    texts = []
    for piece in batch:
        # A newline ends a document where no token does.
        needs_end = tokenizer.end_of_text is None and piece.ends and not piece.is_file
        has_end = piece.text.endswith("\n")
        texts.append(piece.text + "\n" if needs_end and not has_end else piece.text)
    for piece, ids in zip(batch, tokenizer.encode_all(texts), strict=True):
        shards[piece.split].append(ids)
        if piece.ends and tokenizer.end_of_text is not None:
            shards[piece.split].append(np.array([tokenizer.end_of_text], tokenizer.dtype))


class _Shards:
    """The shards of a split, of which the last one is being written."""

    def __init__(self, folder: Path, split: str, dtype: str, most: int, say: Say) -> None:
        self._folder = folder
        self._split = split
        self._dtype = dtype
        self._most = most
        self._say = say
        self._number = 0
        self._tokens = 0  # of the present shard
        self._file: Any = None
        self._began = time.monotonic()
        self.total = 0  # tokens of all shards

    def append(self, ids: np.ndarray) -> None:
        """Write tokens."""
        while len(ids):
            if self._file is None:
                self._file = self._path.open("wb")
                self._file.seek(LLMC_HEADER_BYTES)
            part = ids[: self._most - self._tokens]
            self._file.write(part.astype(self._dtype).tobytes())
            self._tokens += len(part)
            self.total += len(part)
            ids = ids[len(part) :]
            if self._tokens == self._most:
                self.close()

    def close(self) -> None:
        """Write the header of the present shard, if there is one."""
        if self._file is None:
            return
        self._file.seek(0)
        self._file.write(llmc_header(self._dtype, self._tokens))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        speed = self.total / max(1e-9, time.monotonic() - self._began)
        self._say(f"{self._path.name} · {speed / 1e6:.2f} M tokens/s")
        self._file = None
        self._number += 1
        self._tokens = 0

    @property
    def _path(self) -> Path:
        return self._folder / f"{self._split}_{self._number:06d}.bin"

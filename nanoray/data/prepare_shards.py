"""Prepare token shards from documents, in bounded memory.

    OUT/train_000000.bin  train_000001.bin ...  val_000000.bin    llm.c's format (headers.py)
    OUT/meta.json                                                 tokenizer and counts; written last
    OUT/.unfinished                                               until then: nothing trains on it

A command that was killed is started anew, in another folder or in one that was emptied.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from nanoray.base.atomic import write_json
from nanoray.data.dataset import UNFINISHED
from nanoray.data.documents import DocumentPiece
from nanoray.data.headers import LLMC_HEADER_BYTES, llmc_header
from nanoray.data.tokenizer import Tokenizer, tokenizer_from_json
from nanoray.errors import DataError

META = "meta.json"
Say = Callable[[str], None]
Source = Callable[[], Iterator[list[DocumentPiece]]]  # yields all documents, in their order


def prepare_shards(
    source: Source,
    tokenizer: str | dict[str, Any],
    out: Path,
    shard_tokens: int,
    say: Say = print,
) -> dict[str, Any]:
    """Write the documents' tokens into shards of `shard_tokens`, and return the content of meta.json.

    `tokenizer`: char, whose characters are those of the documents, or the description of one.
    Raises DataError for a folder that has files already.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise DataError(
                f"{out} is not empty; choose another folder with --out, or remove this one"
            )
        # Exclusive: of two commands that begin at the same moment one fails.
        (out / UNFINISHED).touch(exist_ok=False)
        if tokenizer == "char":
            say("reading the documents once for their characters")
            tokenizer = _tokenizer_of_characters(source)
        assert isinstance(tokenizer, dict)
        meta = _write(source, tokenizer_from_json(tokenizer), out, shard_tokens, say)
        write_json(out / META, meta)
        (out / UNFINISHED).unlink()
    except OSError as error:
        raise DataError(
            f"cannot prepare {out}: {error}; choose another folder with --out"
        ) from None
    say(
        f"{out}: {meta['train_tokens']} train + {meta['val_tokens']} val tokens "
        f"({tokenizer['kind']}, {meta['dtype']})"
    )
    return meta


def _write(
    source: Source, tokenizer: Tokenizer, out: Path, shard_tokens: int, say: Say
) -> dict[str, Any]:
    """Write all shards, and return the content of meta.json."""
    train, val = (_Shards(out, split, tokenizer.dtype, shard_tokens) for split in ("train", "val"))
    began = time.monotonic()
    for pieces in source():
        texts = [_text_of(piece, tokenizer) for piece in pieces]
        finished = []
        for piece, ids in zip(pieces, tokenizer.encode_all(texts), strict=True):
            shards = train if piece.split == "train" else val
            finished += shards.append(ids)
            if piece.ends and tokenizer.end_of_text is not None:
                finished += shards.append(np.array([tokenizer.end_of_text], tokenizer.dtype))
        for name in finished:
            speed = (train.total + val.total) / max(1e-9, time.monotonic() - began)
            say(f"{name} · {speed / 1e6:.2f} M tokens/s")
    train.close()
    val.close()

    if train.total == 0:
        raise DataError(
            f"the documents have no tokens for training, and {val.total} for validation; give "
            "more text, or lower --val_fraction"
        )
    return {
        "tokenizer": tokenizer.to_json(),
        "dtype": tokenizer.dtype,
        "vocab_size": tokenizer.vocab_size,
        "train_tokens": train.total,
        "val_tokens": val.total,
    }


def _text_of(piece: DocumentPiece, tokenizer: Tokenizer) -> str:
    """Return a piece's text; a newline ends a document where no token does."""
    ends = piece.ends and not piece.is_file and tokenizer.end_of_text is None
    if ends and not piece.text.endswith("\n"):
        return piece.text + "\n"
    return piece.text


class _Shards:
    """The shards of a split, of which the last one is being written."""

    def __init__(self, out: Path, split: str, dtype: str, most: int) -> None:
        self.total = 0  # tokens of all shards
        self._out = out
        self._split = split
        self._dtype = dtype
        self._most = most
        self._tokens = 0  # of the shard that is being written
        self._number = 0
        self._file: Any = None

    def append(self, ids: np.ndarray) -> list[str]:
        """Write tokens, and return the names of the shards that became full."""
        finished = []
        while len(ids):
            if self._file is None:
                self._file = self._path.open("xb")
                self._file.write(bytes(LLMC_HEADER_BYTES))
            part = ids[: self._most - self._tokens]
            self._file.write(part.astype(self._dtype).tobytes())
            self._tokens += len(part)
            self.total += len(part)
            ids = ids[len(part) :]
            if self._tokens == self._most:
                finished.append(self._path.name)
                self.close()
        return finished

    def close(self) -> None:
        """Write the header of the present shard, if there is one."""
        if self._file is None:
            return
        self._file.seek(0)
        self._file.write(llmc_header(self._dtype, self._tokens))
        self._file.close()
        self._file = None
        self._number += 1
        self._tokens = 0

    @property
    def _path(self) -> Path:
        return self._out / f"{self._split}_{self._number:06d}.bin"


def _tokenizer_of_characters(source: Source) -> dict[str, Any]:
    """Return the description of a tokenizer whose characters are those of all documents."""
    chars = {"\n"}  # what ends a document
    for pieces in source():
        for piece in pieces:
            chars.update(piece.text)
    return {"kind": "char", "chars": "".join(sorted(chars))}

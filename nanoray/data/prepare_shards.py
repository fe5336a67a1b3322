"""Prepare token shards from documents: resumable at any moment, in bounded memory.

    OUT/train_000000.bin  train_000001.bin ...  val_000000.bin    llm.c's format (headers.py)
    OUT/meta.json                                                 tokenizer and counts; written last
    OUT/.train_000002.part                                        the shard that is being written
    OUT/.progress.json                                            the place up to which all is on disk

Progress is written after the tokens before its place are on disk. So a command that is killed at any
moment is followed by one that reads on from there, and the files are those of one unbroken command, to
the byte.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from nanoray.base.atomic import json_mapping, remove_asides, write_json
from nanoray.data.dataset import PROGRESS
from nanoray.data.documents import DocumentBatch, DocumentPiece, DocumentSource
from nanoray.data.headers import LLMC_HEADER_BYTES, llmc_header
from nanoray.data.tokenizer import Tokenizer, tokenizer_from_json
from nanoray.errors import DataError

META = "meta.json"
SPLITS = ("train", "val")
_SAVE_S = 5.0  # between two writes of the progress
Say = Callable[[str], None]


def prepare_shards(
    source: DocumentSource,
    tokenizer: str | dict[str, Any],
    out: Path,
    shard_tokens: int,
    say: Say = print,
) -> dict[str, Any]:
    """Write the documents' tokens into shards of `shard_tokens`, and return the content of meta.json.

    `tokenizer`: char, whose characters are those of the documents, or the description of one. A
    folder that an earlier command has begun with the same settings is finished. Raises DataError.
    """
    settings = {"tokenizer": tokenizer, "shard_tokens": shard_tokens, **source.settings()}
    with _alone_in(out):
        for name in (META, PROGRESS):
            remove_asides(out / name)
        done = _read(out / META)
        if done is not None:
            _require_same(out, META, done.get("prepared_from"), settings)
            with suppress(FileNotFoundError):
                (out / PROGRESS).unlink()  # of a command that was killed at its very end
            say(f"{out} is prepared already: {_describe(done)}")
            return done
        progress = _read(out / PROGRESS)
        if progress is None:
            _require_empty(out)
            progress = {"settings": settings, "place": None, "shards": {}, "tokenizer": None}
        else:
            _require_same(out, PROGRESS, progress.get("settings"), settings)
            say(f"going on with {out}, where an earlier command ended")

        if progress["tokenizer"] is None:
            progress["tokenizer"] = _describe_tokenizer(tokenizer, source, say)
            write_json(out / PROGRESS, progress)
        meta = _Preparation(source, out, shard_tokens, progress, say).run()
        write_json(out / META, meta | {"prepared_from": settings})
        (out / PROGRESS).unlink()
    say(f"{out}: {_describe(meta)}")
    return meta


class _Preparation:
    """One command's work on a folder."""

    def __init__(
        self,
        source: DocumentSource,
        out: Path,
        shard_tokens: int,
        progress: dict[str, Any],
        say: Say,
    ) -> None:
        self._source = source
        self._out = out
        self._progress = progress
        self._say = say
        self._tokenizer: Tokenizer = tokenizer_from_json(progress["tokenizer"])
        dtype = self._tokenizer.dtype
        self._shards = {
            split: _Shards(out, split, dtype, shard_tokens, progress["shards"].get(split))
            for split in SPLITS
        }
        self._began = time.monotonic()
        self._saved = self._began
        self._read_now = 0  # tokens of this command

    def run(self) -> dict[str, Any]:
        """Write what is left, and return the counts."""
        place = self._progress["place"]
        for batch in self._source.batches(place):
            finished = self._write(batch)
            place = batch.place
            self._progress["place"] = place
            if finished or time.monotonic() - self._saved > _SAVE_S:
                self._save()
                for name in finished:
                    self._report(name, place)
        for shards in self._shards.values():
            shards.finish()

        train, val = (self._shards[split] for split in SPLITS)
        if train.total == 0:
            raise DataError(
                f"the documents have no tokens for training, and {val.total} for validation; give "
                "more text, or lower --val_fraction"
            )
        return {
            "tokenizer": self._tokenizer.to_json(),
            "dtype": self._tokenizer.dtype,
            "vocab_size": self._tokenizer.vocab_size,
            "train_tokens": train.total,
            "val_tokens": val.total,
            "documents": place["documents"] if place else 0,
        }

    def _write(self, batch: DocumentBatch) -> list[str]:
        """Write a batch's tokens, and return the names of the shards that became full."""
        finished = []
        texts = [self._text_of(piece) for piece in batch.pieces]
        for piece, ids in zip(batch.pieces, self._tokenizer.encode_all(texts), strict=True):
            shards = self._shards[piece.split]
            finished += shards.append(ids)
            if piece.ends and self._tokenizer.end_of_text is not None:
                end = np.array([self._tokenizer.end_of_text], self._tokenizer.dtype)
                finished += shards.append(end)
            self._read_now += len(ids)
        return finished

    def _text_of(self, piece: DocumentPiece) -> str:
        """Return a piece's text; a newline ends a document where no token does."""
        if self._tokenizer.end_of_text is None and piece.ends and not piece.is_file:
            return piece.text if piece.text.endswith("\n") else piece.text + "\n"
        return piece.text

    def _save(self) -> None:
        # First the tokens, then the place behind them.
        self._progress["shards"] = {split: each.sync() for split, each in self._shards.items()}
        write_json(self._out / PROGRESS, self._progress)
        self._saved = time.monotonic()

    def _report(self, name: str, place: dict[str, Any]) -> None:
        seconds = max(1e-9, time.monotonic() - self._began)
        speed = f"{self._read_now / seconds / 1e6:.2f} M tokens/s"
        share = self._source.share(place)
        if share is not None:
            speed += f" · {100 * share:.0f} % read"
        self._say(f"{name} · {speed}")


class _Shards:
    """The shards of a split, of which the last one is being written."""

    def __init__(
        self, out: Path, split: str, dtype: str, most: int, at: dict[str, int] | None
    ) -> None:
        """`at`: the shard that is being written and its tokens, as `sync` has returned them."""
        self._out = out
        self._split = split
        self._dtype = dtype
        self._most = most
        self._number = at["number"] if at else 0
        self._tokens = at["tokens"] if at else 0
        self._file: Any = None
        self._cut_back()

    @property
    def total(self) -> int:
        """The tokens of all shards."""
        return self._number * self._most + self._tokens

    def append(self, ids: np.ndarray) -> list[str]:
        """Write tokens, and return the names of the shards that became full."""
        finished = []
        while len(ids):
            if self._file is None:
                self._open()
            part = ids[: self._most - self._tokens]
            self._file.write(part.astype(self._dtype).tobytes())
            self._tokens += len(part)
            ids = ids[len(part) :]
            if self._tokens == self._most:
                finished.append(self._close())
                self._number += 1
                self._tokens = 0
        return finished

    def sync(self) -> dict[str, int]:
        """Bring what was written onto the disk, and return where it ends."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
        return {"number": self._number, "tokens": self._tokens}

    def finish(self) -> None:
        """Close the last shard, which may be shorter than the others."""
        if self._tokens:
            if self._file is None:
                self._open()
            self._close()

    def _close(self) -> str:
        """Write the header of a shard, and give it its name; return that."""
        self._file.seek(0)
        self._file.write(llmc_header(self._dtype, self._tokens))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        os.replace(self._part(self._number), self._final(self._number))
        return self._final(self._number).name

    def _open(self) -> None:
        part = self._part(self._number)
        part.touch()
        self._file = part.open("r+b")
        self._file.seek(LLMC_HEADER_BYTES + self._tokens * np.dtype(self._dtype).itemsize)

    def _cut_back(self) -> None:
        """Remove the shards behind the place that the progress has.

        What its own shard has behind that place is written again, with the same tokens.
        """
        final = self._final(self._number)
        if final.exists():  # it became full after that
            os.replace(final, self._part(self._number))
        for path in self._out.iterdir():
            number = self._number_of(path)
            if number is not None and number > self._number:
                path.unlink()
        part = self._part(self._number)
        size = LLMC_HEADER_BYTES + self._tokens * np.dtype(self._dtype).itemsize
        found = part.stat().st_size if part.exists() else 0
        if self._tokens and found < size:
            raise DataError(
                f"{part} has {found} bytes, but the progress counts {size}; the folder was changed: "
                "remove it, and prepare it anew"
            )

    def _final(self, number: int) -> Path:
        return self._out / f"{self._split}_{number:06d}.bin"

    def _part(self, number: int) -> Path:
        return self._out / f".{self._split}_{number:06d}.part"

    def _number_of(self, path: Path) -> int | None:
        """Return the number of a shard of this split, by its name."""
        stem = path.stem.removeprefix(".")
        if path.suffix in (".bin", ".part") and stem.startswith(f"{self._split}_"):
            digits = stem.removeprefix(f"{self._split}_")
            return int(digits) if digits.isdigit() else None
        return None


def _describe_tokenizer(
    tokenizer: str | dict[str, Any], source: DocumentSource, say: Say
) -> dict[str, Any]:
    """Return the description of a tokenizer; that of characters needs a pass through the text."""
    if isinstance(tokenizer, dict):
        return tokenizer
    assert tokenizer == "char"
    say("reading the documents once for their characters")
    chars = {"\n"}  # what ends a document
    for batch in source.batches(None):
        for piece in batch.pieces:
            chars.update(piece.text)
    return {"kind": "char", "chars": "".join(sorted(chars))}


# The folder.


@contextmanager
def _alone_in(out: Path) -> Iterator[None]:
    """Let one command at a time work in a folder. Raises DataError where another one does."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = (out / ".lock").open("ab")
    except OSError as error:
        raise DataError(
            f"cannot write into {out}: {error.strerror}; choose another folder with --out"
        ) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise DataError(
                    f"another command prepares {out}; wait for it, or choose another --out"
                ) from None
        try:
            yield
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise DataError(
                f"no space left for {out}; make room, and run the same command again: it goes on"
            ) from None


def _read(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None without the file. Raises DataError for another one."""
    try:
        return json_mapping(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        raise DataError(f"{path} is damaged; remove the folder, and prepare it anew") from None


def _require_empty(out: Path) -> None:
    names = sorted(path.name for path in out.iterdir() if path.name != ".lock")
    if names:
        raise DataError(
            f"{out} is not empty ({', '.join(names[:3])}), and nothing in it says how it was "
            "prepared; choose another folder with --out"
        )


def _require_same(out: Path, name: str, then: Any, now: dict[str, Any]) -> None:
    """Raise DataError where a folder was prepared with other settings."""
    then = then if isinstance(then, dict) else {}
    for key, value in now.items():
        if then.get(key) != value:
            raise DataError(
                f"{out / name} is of {_short(key, then.get(key))}, but now it is "
                f"{_short(key, value)}; choose another folder with --out, or remove this one"
            )


def _short(key: str, value: Any) -> str:
    text = json.dumps(value)
    if len(text) > 60:
        text = f"{text[:57]}..."
    return f"{key} = {text}"


def _describe(meta: dict[str, Any]) -> str:
    kind = meta["tokenizer"]["kind"]
    return (
        f"{meta['train_tokens']} train + {meta['val_tokens']} val tokens ({kind}, "
        f"{meta['dtype']}), documents: {meta['documents']}"
    )

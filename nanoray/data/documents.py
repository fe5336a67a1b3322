"""Read documents from files one after the other, in bounded memory.

a text file    one document, in pieces; its end is for validation
JSON lines     a document in each line: the text of a field
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from nanoray.data.utf8 import decode
from nanoray.errors import DataError

FORMATS = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".jsonl.gz": "jsonl",
    ".ndjson.gz": "jsonl",
}
PIECE = 1 << 20  # bytes of a piece of a text file, about
_SPACES = " \n\t\r"


class DocumentPiece(NamedTuple):
    """A part of a document, or all of it."""

    text: str
    split: str  # train | val
    ends: bool  # the document ends with it
    is_file: bool = False  # the document is a whole file, and separated from others by nothing


class DocumentSource(Protocol):
    """Where documents come from."""

    def pieces(self) -> Iterator[DocumentPiece]:
        """Yield the documents from the first one on."""


class Divider:
    """Puts documents into splits: the first of every 1 / val_fraction is for validation."""

    def __init__(self, val_fraction: float) -> None:
        self._every = round(1 / val_fraction) if val_fraction else 0
        self._count = 0

    def piece(self, text: str) -> DocumentPiece:
        """Return the next document."""
        is_val = self._every and self._count % self._every == 0
        self._count += 1
        return DocumentPiece(text, "val" if is_val else "train", ends=True)


class Files:
    """The documents of files, which stay in the order that they are given in."""

    def __init__(self, paths: Sequence[Path], field: str, val_fraction: float) -> None:
        """Raises DataError for files that cannot be read."""
        self._paths = list(paths)
        self._field = field
        self._val_fraction = val_fraction
        self._formats = [format_of(path) for path in paths]

    def pieces(self) -> Iterator[DocumentPiece]:
        splits = Divider(self._val_fraction)
        for path, kind in zip(self._paths, self._formats, strict=True):
            if kind == "text":
                yield from self._read_text(path)
                continue
            for text in self._read_lines(path):
                if text:
                    yield splits.piece(text)

    def _read_text(self, path: Path) -> Iterator[DocumentPiece]:
        size = path.stat().st_size
        border = size
        if self._val_fraction:
            border = _line_start(path, int(size * (1 - self._val_fraction)))
        at = 0
        for split, end in (("train", border), ("val", size)):
            while at < end:
                text, at = read_piece(path, at, end)
                yield DocumentPiece(text, split, ends=at == end, is_file=True)

    def _read_lines(self, path: Path) -> Iterator[str]:
        with _open(path) as stream:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    yield _text_of_line(line, self._field, f"line {number} of {path}")


def format_of(path: Path) -> str:
    """Return the format of a file by its ending. Raises DataError for another one."""
    if not path.is_file():
        raise DataError(f"no file {path}; check the path")
    for ending, kind in FORMATS.items():
        if path.name.endswith(ending):
            return kind
    raise DataError(
        f"{path} ends in none of {', '.join(FORMATS)}; name it by what it holds, or unpack it"
    )


def read_piece(path: Path, start: int, end: int) -> tuple[str, int]:
    """Return the text from a byte on, about PIECE bytes of it, and the byte after it.

    It ends before white space that follows something else. No token of GPT-2's goes across such a
    place, so the tokens of the pieces are those of the whole text.
    """
    size = PIECE
    while True:
        with path.open("rb") as file:
            file.seek(start)
            data = file.read(min(size, end - start))
        if start + len(data) < end:
            text = decode(data, str(path), start, is_last=False)
            cut = _last_break(text)
        else:
            text = decode(data, str(path), start)
            cut = len(text)
        if cut:
            piece = text[:cut]
            after = start + len(piece.encode("utf-8"))
            # A mark of the byte order is no text.
            return piece.removeprefix("\ufeff") if start == 0 else piece, after
        if not data:
            raise DataError(f"{path} became shorter while it was read; restore it")
        size *= 2  # a word longer than a piece


def _last_break(text: str) -> int:
    """Return the last place of white space that follows something else; 0 without one."""
    for i in range(len(text) - 1, 0, -1):
        if text[i] in _SPACES and not text[i - 1].isspace():
            return i
    return 0


def _line_start(path: Path, at: int) -> int:
    """Return where the first line from a byte on begins, or the size of the file."""
    with path.open("rb") as file:
        file.seek(max(0, at - 1))  # before a line's first byte is the newline of the last one
        file.readline()
        return file.tell()


def _open(path: Path) -> Any:
    if path.suffix == ".gz":
        return gzip.open(path, "rb")
    return path.open("rb")


def _text_of_line(line: bytes, field: str, where: str) -> str:
    """Return the text of a line of JSON. Raises DataError where it has none."""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where} is no JSON: {error}; mend the file") from None
    if not isinstance(record, dict) or not isinstance(record.get(field, 0), (str, type(None))):
        raise DataError(
            f"{where} has no text under {field}; it must be an object with one: choose with --field"
        )
    return record[field] or ""

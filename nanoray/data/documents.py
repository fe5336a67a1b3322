"""Read documents from files one after the other, in bounded memory.

a text file    one document, in pieces; its end is for validation
JSON lines     a document in each line: the text of a field
parquet        a document in each row: the text of a column; needs pyarrow
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nanoray.data.line_index import require_no_nul
from nanoray.errors import DataError

FORMATS = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".jsonl.gz": "jsonl",
    ".ndjson.gz": "jsonl",
    ".parquet": "parquet",
}
BATCH = 1 << 20  # characters of a batch, about
_SPACES = " \n\t\r"


def import_parquet() -> Any:
    """Return pyarrow's module for parquet. Raises DataError where it is not installed."""
    try:
        from pyarrow import parquet  # optional, and slow to import
    except ImportError:
        raise DataError("parquet files need pyarrow; pip install 'nanoray[parquet]'") from None
    return parquet


class DocumentPiece(NamedTuple):
    """A part of a document, or all of it."""

    text: str
    split: str  # train | val
    ends: bool  # the document ends with it
    is_file: bool = False  # the document is a whole file, and separated from others by nothing


class Choice:
    """Chooses documents for validation: the first of every `every`; 0: none."""

    def __init__(self, val_fraction: float) -> None:
        self.every = round(1 / val_fraction) if val_fraction else 0

    def split_of(self, number: int) -> str:
        """Return the split of a document, by its number through all files."""
        if self.every and number % self.every == 0:
            return "val"
        return "train"


class Files:
    """The documents of files, which stay in the order that they are given in."""

    def __init__(self, paths: Sequence[Path], field: str, val_fraction: float) -> None:
        """Raises DataError for files that cannot be read."""
        self._paths = list(paths)
        self._field = field
        self._val_fraction = val_fraction
        self._choice = Choice(val_fraction)
        self._formats = [format_of(path) for path in paths]
        for path, kind in zip(paths, self._formats, strict=True):
            if kind == "parquet":
                require_column(path, field)

    def batches(self) -> Iterator[list[DocumentPiece]]:
        """Yield all documents, about BATCH characters at a time."""
        return in_batches(self._pieces())

    def _pieces(self) -> Iterator[DocumentPiece]:
        # The first documents of all files together are for validation, so one count goes through.
        number = 0
        for path, kind in zip(self._paths, self._formats, strict=True):
            if kind == "text":
                yield from self._read_text(path)
                number += 1
                continue
            texts = self._read_lines(path) if kind == "jsonl" else self._read_rows(path)
            for text in texts:
                if text:
                    yield DocumentPiece(text, self._choice.split_of(number), ends=True)
                    number += 1

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
        start = 0
        with _open(path) as stream:
            for line in stream:
                if line.strip():
                    yield _text_of_line(line, self._field, path, start)
                start += len(line)

    def _read_rows(self, path: Path) -> Iterator[str | None]:
        file = import_parquet().ParquetFile(path)
        for group in range(file.metadata.num_row_groups):
            yield from file.read_row_group(group, columns=[self._field]).column(0).to_pylist()


def in_batches(pieces: Iterable[DocumentPiece]) -> Iterator[list[DocumentPiece]]:
    """Group pieces, about BATCH characters at a time."""
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


def format_of(path: Path) -> str:
    """Return the format of a file by its ending. Raises DataError for another one."""
    for ending, kind in FORMATS.items():
        if path.name.endswith(ending):
            return kind
    raise DataError(
        f"{path} ends in none of {', '.join(FORMATS)}; name it by what it holds, or unpack it"
    )


def require_column(path: Path, column: str) -> None:
    """Raise DataError unless a parquet file has a column of text under this name."""
    parquet = import_parquet()
    try:
        schema = parquet.read_schema(path)
    except Exception as error:  # pyarrow's errors have no common base
        raise DataError(f"cannot read {path} as parquet: {error}") from None
    if column not in schema.names:
        raise DataError(
            f"{path} has no column {column}; it has {', '.join(schema.names)}: choose with --field"
        )
    kind = str(schema.field(column).type)
    if kind not in ("string", "large_string"):
        raise DataError(
            f"the column {column} of {path} holds {kind} and no text; choose another with --field"
        )


def read_piece(path: Path, start: int, end: int) -> tuple[str, int]:
    """Return the text from a byte on, about BATCH bytes of it, and the byte after it.

    It ends before white space that follows something else. No token of GPT-2's goes across such a
    place, so the tokens of the pieces are those of the whole text.
    """
    size = BATCH
    while True:
        with path.open("rb") as file:
            file.seek(start)
            data = file.read(min(size, end - start))
        if start + len(data) < end:
            text = _decode(data, path, start, is_last=False)
            cut = _last_break(text)
        else:
            text = _decode(data, path, start, is_last=True)
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


def _decode(data: bytes, path: Path, start: int, is_last: bool) -> str:
    """Return the text of bytes; the last character of a piece may be cut off."""
    require_no_nul(data, path, start)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        cut_off = not is_last and error.reason == "unexpected end of data"
        if cut_off and len(data) - error.start < 4:
            return data[: error.start].decode("utf-8")
        raise DataError(
            f"{path} is not UTF-8: byte 0x{data[error.start]:02x} at offset {start + error.start} "
            f"({error.reason}); convert it, e.g. iconv -f latin1 -t utf-8"
        ) from None


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


def _text_of_line(line: bytes, field: str, path: Path, start: int) -> str:
    """Return the text of a line of JSON. Raises DataError where it has none."""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{path} at byte {start} is no JSON: {error}; mend the file") from None
    if not isinstance(record, dict):
        raise DataError(
            f"{path} at byte {start} is a {type(record).__name__} and no object with a field "
            f"{field}; mend the file"
        )
    if field not in record:
        raise DataError(
            f"{path} at byte {start} has no field {field}; it has {', '.join(record)}: choose with "
            "--field"
        )
    text = record[field]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise DataError(
            f"{path} at byte {start} has a {type(text).__name__} in {field}, and no text; mend the "
            "file"
        )
    return text

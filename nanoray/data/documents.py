"""Read documents from files one after the other, from any place on, in bounded memory.

    a text file    one document, in pieces; its end is for validation
    JSON lines     a document in each line: the text of a field
    parquet        a document in each row: the text of a column; needs pyarrow

The place after a batch is plain JSON, and reading from there yields what would have followed.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

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
Place = dict[str, Any]


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


class DocumentBatch(NamedTuple):
    """Some pieces, in their order, and where reading goes on after them."""

    pieces: list[DocumentPiece]
    place: Place


class DocumentSource(Protocol):
    """Where documents come from."""

    def settings(self) -> dict[str, Any]:
        """Return what the documents depend on, as JSON types."""

    def batches(self, place: Place | None) -> Iterator[DocumentBatch]:
        """Yield the documents from a place on; None: from the first one."""

    def share(self, place: Place) -> float | None:
        """Return how much lies before a place, 0 to 1; None where it is not known."""


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
        self._sizes = [path.stat().st_size for path in paths]

    def settings(self) -> dict[str, Any]:
        files = []
        for path, size in zip(self._paths, self._sizes, strict=True):
            files.append({"path": str(path), "size": size, "mtime_ns": path.stat().st_mtime_ns})
        return {"files": files, "field": self._field, "val_fraction": self._val_fraction}

    def batches(self, place: Place | None) -> Iterator[DocumentBatch]:
        now = place or {"file": 0, "at": 0, "documents": 0}
        readers = {"text": self._read_text, "jsonl": self._read_lines, "parquet": self._read_rows}
        while now["file"] < len(self._paths):
            number = now["file"]
            read = readers[self._formats[number]]
            yield from _in_batches(read(self._paths[number], now), now)
            now = {"file": number + 1, "at": 0, "documents": now["documents"]}

    def share(self, place: Place) -> float | None:
        before = sum(self._sizes[: place["file"]])
        # A row is no byte of the file, and neither is a byte of what was compressed.
        if place["file"] < len(self._paths):
            in_bytes = self._formats[place["file"]] != "parquet"
            if in_bytes and self._paths[place["file"]].suffix != ".gz":
                before += place["at"]
        return before / max(1, sum(self._sizes))

    # Each of these yields pieces, and moves `now` behind the newest one.

    def _read_text(self, path: Path, now: Place) -> Iterator[DocumentPiece]:
        size = path.stat().st_size
        border = size
        if self._val_fraction:
            border = _line_start(path, int(size * (1 - self._val_fraction)))
        for split, end in (("train", border), ("val", size)):
            while now["at"] < end:
                text, after = read_piece(path, now["at"], end)
                now["at"] = after
                yield DocumentPiece(text, split, ends=after == end, is_file=True)
        now["documents"] += 1

    def _read_lines(self, path: Path, now: Place) -> Iterator[DocumentPiece]:
        with _open(path) as stream:
            stream.seek(now["at"])
            for line in stream:
                start = now["at"]
                now["at"] += len(line)
                if line.strip():
                    text = _text_of_line(line, self._field, path, start)
                    if text:
                        now["documents"] += 1
                        yield DocumentPiece(
                            text, self._choice.split_of(now["documents"] - 1), ends=True
                        )

    def _read_rows(self, path: Path, now: Place) -> Iterator[DocumentPiece]:
        file = import_parquet().ParquetFile(path)
        first = 0
        for group in range(file.metadata.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if first + rows > now["at"]:
                column = file.read_row_group(group, columns=[self._field]).column(0)
                for row in range(now["at"] - first, rows):
                    text = column[row].as_py()
                    now["at"] += 1
                    if text:
                        now["documents"] += 1
                        yield DocumentPiece(
                            text, self._choice.split_of(now["documents"] - 1), ends=True
                        )
            first += rows


def _in_batches(pieces: Iterator[DocumentPiece], now: Place) -> Iterator[DocumentBatch]:
    """Group pieces; the reader has moved `now` behind the last one of a batch."""
    batch: list[DocumentPiece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= BATCH:
            yield DocumentBatch(batch, dict(now))
            batch = []
            size = 0
    # Also without a piece: the place after the file.
    yield DocumentBatch(batch, {"file": now["file"] + 1, "at": 0, "documents": now["documents"]})


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

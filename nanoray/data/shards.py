"""Files of a stream, one class for each kind: how many records a file has, and how one is read.

jsonl     a line is a record: the value of its JSON
text      a line is a record: its text
tokens    block_size + 1 tokens are a record, and the next one begins with the last of them
"""

from __future__ import annotations

import glob
import json
import mmap
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nanoray.base.environment import working_folder
from nanoray.data.headers import read_header
from nanoray.data.line_index import starts_of
from nanoray.data.token_folder import read_dtype
from nanoray.errors import DataError

SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".txt": "text",
    ".text": "text",
    ".bin": "tokens",
}
KINDS = ("jsonl", "text", "tokens")
_SPLIT = re.compile(r"(?<![a-z])(train|valid|validation|val|dev|test|eval)(?![a-z])")
_COMPRESSED = (".gz", ".zst", ".bz2", ".xz", ".lz4")
_READ_AHEAD = 1 << 23  # bytes


# Which files.


def find_files(
    given: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    endings: Collection[str] = tuple(SUFFIXES),
) -> list[Path]:
    """Return the files that paths, folders and patterns name, sorted within a folder or pattern.

    `endings`: of the files of a folder. Raises DataError where one names no file, and for a file that is named twice.
    """
    names = [given] if isinstance(given, (str, os.PathLike)) else list(given)
    files: list[Path] = []
    for name in names:
        path = Path(os.path.abspath(os.path.expanduser(name)))
        files += _files_of(path, str(name), tuple(endings))
    if not files:
        raise DataError("no files are named; name files, a folder or a pattern such as *.jsonl")

    seen = set()
    for file in files:
        if file in seen:
            raise DataError(
                f"{file} is named twice, so its samples would count twice; name each file once"
            )
        seen.add(file)
    return files


def _files_of(path: Path, given: str, endings: tuple[str, ...]) -> list[Path]:
    if path.is_dir():
        files = [file for file in sorted(path.iterdir()) if file.name.endswith(endings)]
        files = [file for file in files if file.is_file() and not file.name.startswith(".")]
        if not files:
            kinds = ", ".join(endings)
            raise DataError(
                f"the folder {given} has no file that ends in {kinds}; name files of these kinds"
            )
        _require_one_split(path, files)
        return files
    if path.exists():
        return [path]
    files = [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]
    files = [file for file in files if file.is_file()]
    if not files:
        raise DataError(f"no file {given}; check the path, which starts at {working_folder()}")
    return files


def _require_one_split(folder: Path, files: list[Path]) -> None:
    """Raise DataError for a folder whose files are of several splits, by their names."""
    splits: dict[str, Path] = {}
    for file in files:
        found = _SPLIT.search(file.name)
        if found:
            splits.setdefault(found[1], file)
    if len(splits) > 1:
        first, second = list(splits.values())[:2]
        word = next(iter(splits))
        raise DataError(
            f"the folder {folder} has {first.name} and {second.name}, which are of different "
            f"splits; name one of them by a pattern, such as {folder}/*{word}*"
        )


def kind_of(files: Sequence[Path]) -> str:
    """Return the kind of files by their names. Raises DataError where it is not clear."""
    kinds: dict[str, Path] = {}
    for file in files:
        if file.suffix in _COMPRESSED:
            raise DataError(
                f"{file} is compressed, and a record in the middle of it cannot be read alone; "
                "unpack it, or prepare token shards: nanoray data tokenize"
            )
        kind = SUFFIXES.get(file.suffix)
        if kind is None:
            raise DataError(
                f"{file} has no known ending ({', '.join(SUFFIXES)}); say what it is with kind=, "
                f"one of {', '.join(KINDS)}"
            )
        kinds.setdefault(kind, file)
    if len(kinds) > 1:
        (first, one), (second, other) = list(kinds.items())[:2]
        raise DataError(
            f"a stream has files of one kind, but {one} is {first} and {other} is {second}; name "
            "the files of one kind"
        )
    return next(iter(kinds))


# How a file of each kind is read.


class ShardFile(ABC):
    """One file, with records 0 ... records - 1. Each process opens it anew."""

    records: int

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = path.stat().st_size
        self._file: Any = None

    def _open_file(self) -> None:
        """Open the file, which must be as large as it was counted. Raises DataError."""
        try:
            self._file = self.path.open("rb")
        except OSError as error:
            raise DataError(
                f"cannot open {self.path}: {error.strerror}; restore the file"
            ) from None
        self.require_size(os.fstat(self._file.fileno()).st_size)

    @abstractmethod
    def read(self, record: int) -> Any:
        """Return a record. Raises DataError where the file has changed, or cannot be parsed."""

    @abstractmethod
    def close(self) -> None:
        """Close the file; a later read opens it again."""

    def __getstate__(self) -> dict[str, Any]:
        self.close()  # a worker process opens its own
        return self.__dict__

    def require_size(self, size: int) -> None:
        """Raise DataError when the file no longer has the size that it was counted with."""
        if size != self.size:
            raise DataError(
                f"{self.path} has {size} bytes, but had {self.size} when the stream was opened; "
                "files of a stream must stay as they are: restore it, or start a new run"
            )


class Lines(ShardFile):
    """A file with a record in each line that is not blank."""

    def __init__(self, path: Path, parse: Callable[[bytes], Any], what: str) -> None:
        """`what` a record must be, for messages."""
        super().__init__(path)
        self._parse = parse
        self._what = what
        self._starts = starts_of(path)
        self.records = len(self._starts)
        self._map: mmap.mmap | None = None
        self._advised: set[int] = set()

    def read(self, record: int) -> Any:
        if self._map is None:
            self._open_file()
            self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        data = self._map
        # Reading a map beyond the end of its file would end the process.
        self.require_size(os.fstat(self._file.fileno()).st_size)
        start = int(self._starts[record])
        self._read_ahead(start)
        end = data.find(b"\n", start)
        if end < 0:
            end = self.size
        try:
            return self._parse(data[start:end])
        except ValueError as error:
            raise DataError(
                f"{self.path}: record {record} (at byte {start}) is no {self._what}: {error}; "
                "mend the file"
            ) from None

    def _read_ahead(self, start: int) -> None:
        """Let the kernel read what lies around a record in one go: the window's others are there."""
        chunk = start // _READ_AHEAD
        if chunk in self._advised or self._map is None:
            return
        self._advised.add(chunk)
        if hasattr(mmap, "MADV_WILLNEED"):
            begin = chunk * _READ_AHEAD
            self._map.madvise(mmap.MADV_WILLNEED, begin, min(_READ_AHEAD, self.size - begin))

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
            self._file.close()
        self._map = None
        self._file = None
        self._advised = set()


class Tokens(ShardFile):
    """A file of tokens, cut into records of block_size + 1 that share their first and last one."""

    def __init__(self, path: Path, block_size: int) -> None:
        super().__init__(path)
        self._block_size = block_size
        self._header = read_header(path, read_dtype(path.parent))
        self.records = max(0, self._header.tokens - 1) // block_size
        self._tokens: np.ndarray | None = None

    def read(self, record: int) -> Any:
        """Return (block_size + 1,) int64."""
        if self._tokens is None:
            self._open_file()
            self._tokens = np.memmap(
                self._file, self._header.dtype, "r", self._header.offset, (self._header.tokens,)
            )
        self.require_size(os.fstat(self._file.fileno()).st_size)
        first = record * self._block_size
        return np.array(self._tokens[first : first + self._block_size + 1], np.int64)

    def close(self) -> None:
        self._tokens = None
        if self._file is not None:
            self._file.close()
        self._file = None


def parse_text(line: bytes) -> str:
    """Return a line without its ending and without a mark of the byte order. Raises ValueError."""
    return line.decode("utf-8-sig").rstrip("\r")


def parse_json(line: bytes) -> Any:
    """Return the value of a line of JSON. Raises ValueError."""
    return json.loads(line)

"""Documents of data sets on the Hugging Face hub, or of a copy of one, through its `datasets` library.

They are streamed, so only the files that are being read are downloaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoray.data.documents import Divider, DocumentPiece
from nanoray.errors import DataError
from nanoray.machine.script_errors import one_line


@dataclass(frozen=True)
class HubSet:
    """A data set that presets name."""

    path: str
    name: str | None  # one of its configurations
    column: str
    val_fraction: float
    what: str


SETS = {
    "openwebtext": HubSet(
        "Skylion007/openwebtext",
        None,
        "text",
        0.0005,
        "8 million web pages, 9 billion tokens of GPT-2's, 18 GB of shards",
    ),
    "fineweb-edu": HubSet(
        "HuggingFaceFW/fineweb-edu",
        "sample-10BT",
        "text",
        0.001,
        "educational web pages, 10 billion tokens of GPT-2's, 20 GB of shards",
    ),
}


class Hub:
    """The documents of a data set in the order of its files."""

    def __init__(self, data: HubSet, source: str | None, val_fraction: float) -> None:
        """`source`: a folder with a copy, or another name on the hub.

        Raises DataError where it cannot be opened.
        """
        self._path = source or data.path
        self._name = data.name
        # A copy is the files of one configuration.
        if source and Path(source).expanduser().exists():
            self._path = str(Path(source).expanduser().absolute())
            self._name = None
        self._column = data.column
        self._val_fraction = val_fraction
        self._stream = self._open()

    def pieces(self) -> Iterator[DocumentPiece]:
        splits = Divider(self._val_fraction)
        for row in self._stream:
            if row[self._column]:
                yield splits.piece(row[self._column])

    def _open(self) -> Any:
        try:
            from datasets import load_dataset  # optional, and slow to import
        except ImportError:
            raise DataError(
                "data sets of the hub need the library datasets; pip install 'nanoray[hub]'"
            ) from None
        try:
            stream = load_dataset(self._path, self._name, split="train", streaming=True)
        except Exception as error:  # of the network, of the hub, or of the files
            raise DataError(
                f"cannot open the data set {self._path}: {one_line(error)}; check the network, or "
                "give a folder with a copy of its files with --source"
            ) from None
        columns = stream.column_names
        if columns is not None and self._column not in columns:
            raise DataError(
                f"the data set {self._path} has no column {self._column}; it has "
                f"{', '.join(columns)}"
            )
        return stream

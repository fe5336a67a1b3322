"""Small files that a process maps into its memory: they outlive it, also after SIGKILL."""

from __future__ import annotations

import mmap
from contextlib import suppress
from pathlib import Path
from weakref import WeakValueDictionary


class MappedFile:
    """A file of fixed size. Values that are packed into `memory` are in the file at once."""

    def __init__(self, path: Path, content: bytes) -> None:
        """Create the file. If that fails, as on a full disk, the content stays in memory alone."""
        self.path = path
        self.memory: mmap.mmap | bytearray = bytearray(content)
        with suppress(OSError):
            self._create()
        _OPEN[path] = self

    def _create(self) -> None:
        """Write the content to the path, and map that file. Raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Written before it is mapped, because an empty file cannot be.
        content = bytes(self.memory)
        self.path.write_bytes(content)
        with self.path.open("r+b") as file:
            self.memory = mmap.mmap(file.fileno(), len(content))


# The files of this process that are still in use.
_OPEN: WeakValueDictionary[Path, MappedFile] = WeakValueDictionary()


def content_of(path: Path) -> bytes | None:
    """Return the content of a file that this process has mapped, from memory; None for others."""
    file = _OPEN.get(path)
    return None if file is None else bytes(file.memory)
